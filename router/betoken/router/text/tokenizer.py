"""The model's tokenizer, chat template and vocabulary hash, from a local directory or a hub id.

Reads the files the `tokenizers` library and the chat template need; imports neither transformers nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars
from tokenizers import Tokenizer as FastTokenizer

from betoken.common.errors import FailedPreconditionError
from betoken.common.gguf import GgufError, GgufTokenizer, find_gguf, read_header, read_tokenizer
from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.router.text.alphabet import Alphabet
from betoken.router.text.chat import Chat
from betoken.router.text.chat_template import ChatTemplate
from betoken.router.text.escaping import EscapingTokenizer
from betoken.router.text.special_tokens import add_tokens, named_tokens
from betoken.router.text.token_bytes import TokenBytes

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL_TOKENS, _TEMPLATE = "special_tokens_map.json", "chat_template.jinja"


class TokenizerError(FailedPreconditionError):
    """The tokenizer's files are missing or unreadable."""


class TokenizerFailedError(Exception):
    """The tokenizer's library fails at an input, by an error or by a panic of its own."""


class Tokenizer:
    """Text to ids and back, as the model's own tokenizer does it."""

    def __init__(self, text: str, config: Mapping[str, Any], chat_template: str | None, name: str) -> None:
        """`text` is the content of `tokenizer.json`, `config` that of `tokenizer_config.json`."""
        try:
            self._fast = FastTokenizer.from_str(text)
            self.hash = hash_tokenizer_json(text)
            """SHA-256 hex of vocabulary, merges and added tokens; workers announce theirs in the handshake."""
        except Exception as error:  # the Rust library raises plain Exception
            raise TokenizerError(f"{name}/tokenizer.json is not a tokenizer: {error}") from error
        try:
            add_tokens(self._fast, config)
        except Exception as error:  # whatever its contents are taken for
            raise TokenizerError(f"{name}/{_CONFIG} describes tokens that are none: {error}") from error
        settings = [self._fast.to_str(), self._fast.encode_special_tokens, chat_template, named_tokens(config)]
        made_of = json.dumps(settings, sort_keys=True)
        self.fingerprint = hashlib.sha256(made_of.encode()).hexdigest()
        """SHA-256 hex of all that makes ids of text and messages, and text of ids; unlike `hash` not the workers'."""
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = self._fast.get_vocab_size()
        """Number of ids, without padding of the model's output layer."""
        added = self._fast.get_added_tokens_decoder()
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Ids of the tokens that leave no text, by their own."""
        self.special_names = {token_id: name for name, token_id in self.special_ids.items()}
        """Their own by id."""
        self.alphabet = Alphabet(self._fast, text)
        """Characters that answers may have."""
        self.is_concatenative = (json.loads(text).get("decoder") or {}).get("type") == "ByteLevel"
        """Whether the bytes of ids are those of each id, one after the other."""
        self._pieces: dict[int, str] = {}
        self.token_bytes = TokenBytes(self._fast, text)
        """Bytes of one id alone."""
        try:
            self.chat_template = ChatTemplate(chat_template, named_tokens(config)) if chat_template else None
        except (
            Exception
        ) as error:  # jinja raises its own, Python what it makes of the code: SyntaxError, RecursionError
            raise TokenizerError(f"the chat template of {name} does not compile: {error}") from error
        eos = named_tokens(config).get("eos_token")
        self.chat_eos_id: int | None = self._fast.token_to_id(eos) if eos and self.chat_template else None
        """Id of its `eos_token`, with which a template ends the assistant's turn; None without a template."""

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> Tokenizer:
        """Read the tokenizer of a GGUF file, a local directory or, where neither exists, of a hub id at `revision`.

        Raises:
            TokenizerError: no `tokenizer.json` there, a broken file, or a directory and a revision.
        """
        directory = _find(source, revision)
        if (gguf := _gguf_tokenizer(directory, source)) is not None:
            return cls(gguf.text, gguf.config, gguf.chat_template, source)
        text = _read(directory, _TOKENIZER, source)
        if text is None:
            raise TokenizerError(f"{_named(source, revision)} has no {_TOKENIZER}")
        config = _read_object(directory, _CONFIG, source)
        if "added_tokens_decoder" not in config:  # of older transformers: the special tokens may be there only
            config |= _read_object(directory, _SPECIAL_TOKENS, source)
        template = _read(directory, _TEMPLATE, source) or _config_template(config)
        return cls(text, config, template, source)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens of the tokenizer's own post-processor are added unless told not to.

        Raises:
            TokenizerFailedError: the tokenizer cannot do it.
        """
        try:
            # Of a batch, which leaves the other threads of this process alone meanwhile: `encode` holds them all up.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failed("tokenizes", error) from error
        ids: list[int] = encoding.ids
        return ids

    def render(self, chat: Chat) -> str:
        """Text of a chat, rendered by the model's template up to where the assistant speaks.

        Raises:
            InvalidArgumentError: the model has no template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise ChatTemplate.missing()
        return self.chat_template.render(chat)

    @cached_property
    def escaping(self) -> EscapingTokenizer:
        """For chats whose messages spell no special tokens."""
        return EscapingTokenizer.of(self._fast)

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat. Raises as `render` and `encode`."""
        return self.encode(self.render(Chat(messages)), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD.

        Raises:
            TokenizerFailedError: the tokenizer cannot do it.
        """
        try:
            text: str = self._fast.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            raise _failed("detokenizes", error) from error
        return text

    def piece(self, token_id: int) -> str:
        """Text of one id alone; remembered."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self.decode((token_id,))
        return text


def _failed(verb: str, error: BaseException) -> BaseException:
    """What to raise instead of an error of the library, whose panics are no subclass of `Exception`; others stay."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return TokenizerFailedError(f"must be a text that the model's tokenizer {verb} (it fails: {type(error).__name__})")


def _find(source: str, revision: str | None) -> Path:
    """The file or directory: itself, or a snapshot of the hub's, where all files are of one commit."""
    directory = Path(os.path.expanduser(source))  # as workers do for --model
    try:
        is_local = directory.is_dir() or (directory.suffix == ".gguf" and directory.is_file())
    except OSError as error:
        raise TokenizerError(f"{source!r} cannot be looked at: {error.strerror}") from error
    if is_local:
        if revision is not None:
            kind = "directory" if directory.is_dir() else "file"
            raise TokenizerError(f"revision {revision!r} is one of the hub, and {source} is a {kind}")
        return directory
    disable_progress_bars()  # standard error is the log
    try:
        wanted = [_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE]
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        reason = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"the tokenizer of {_named(source, revision)} cannot be fetched: {reason}") from error


def _gguf_tokenizer(path: Path, source: str) -> GgufTokenizer | None:
    """That of the GGUF file that the path means; None where it means none."""
    if (path / _TOKENIZER).is_file():
        return None
    try:
        file = find_gguf(path)
        return None if file is None else read_tokenizer(read_header(file))
    except (GgufError, OSError) as error:
        raise TokenizerError(f"the tokenizer of {source} cannot be read: {error}") from error


def _named(source: str, revision: str | None) -> str:
    return source if revision is None else f"{source} at revision {revision!r}"


def _read(directory: Path, name: str, source: str) -> str | None:
    """Content of one file; None where there is none."""
    path = directory / name
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {name} of {source}: {error}") from error


def _read_object(directory: Path, name: str, source: str) -> dict[str, Any]:
    """The JSON object of one file; empty where there is none."""
    try:
        found = json.loads(_read(directory, name, source) or "{}")
    except ValueError as error:
        raise TokenizerError(f"{source}/{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{source}/{name} is not a JSON object")
    return found


def _config_template(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template if isinstance(template, str) else None
