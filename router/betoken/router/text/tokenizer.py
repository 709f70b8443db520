"""The model's tokenizer, chat template and vocabulary hash, from a local directory or a hub id.

Reads the files the `tokenizers` library and the chat template need; imports neither transformers nor torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.router.text.alphabet import Alphabet
from betoken.router.text.chat import Chat
from betoken.router.text.chat_template import ChatTemplate
from betoken.router.text.clean_up import CleaningDetokenizer, clean_up
from betoken.router.text.detokenizer import Detokenizer
from betoken.router.text.escaping import EscapingTokenizer
from betoken.router.text.infill import InfillFormat, has_blank_prefix
from betoken.router.text.pipeline import adapted, cleans_up, refused_options
from betoken.router.text.special_tokens import add_tokens, named_tokens
from betoken.router.text.tokenizer_files import CONFIG, FIM_TOKENS, TokenizerError, read_files
from betoken.router.text.tool_format import tool_format
from betoken.rpc.constraints import ROUTER_CACHE_BYTES, Grammars
from betoken.rpc.token_bytes import TokenBytes
from betoken.v1.generation_pb2 import ToolFormat

__all__ = ["Tokenizer", "TokenizerError", "TokenizerFailedError"]

_JOINT = "\u263a"
"""Character that no token joins with others: a text after it begins without a blank."""


class TokenizerFailedError(Exception):
    """The tokenizer's library fails at an input, with an error or a panic."""


class Tokenizer:
    """Text to ids and back, as the model's own tokenizer does it."""

    def __init__(
        self,
        text: str,
        config: Mapping[str, Any],
        chat_template: str | None,
        name: str,
        tool_template: str | None = None,
    ) -> None:
        """`text` is the content of `tokenizer.json`, `config` of `tokenizer_config.json`; `tool_template` the template
        for chats with tools, None = `chat_template` too."""
        for refused in refused_options(config):
            raise TokenizerError(f"{name}/{CONFIG}: {refused}")
        try:
            given = json.loads(text)
            data = adapted(given, config)
            self._fast = FastTokenizer.from_str(text if data is given else json.dumps(data))
            self.hash = hash_tokenizer_json(text)
            """SHA-256 hex of vocabulary, merges and added tokens; workers announce theirs in the handshake."""
        except Exception as error:  # the Rust library raises plain Exception
            raise TokenizerError(f"{name}/tokenizer.json is not a tokenizer: {error}") from error
        try:
            add_tokens(self._fast, config)
        except Exception as error:  # whatever its contents are taken for
            raise TokenizerError(f"{name}/{CONFIG} describes tokens that are none: {error}") from error
        self.infill = InfillFormat.of(self._fast, config.get(FIM_TOKENS) or {})
        """Format of fill-in-the-middle prompts; None without tokens for them."""
        self._has_blank_prefix = has_blank_prefix(data)
        self._cleans_up = cleans_up(data, config)
        names = named_tokens(config)
        self.fingerprint = self._fingerprint(chat_template, tool_template, names)
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
        self.is_concatenative = (data.get("decoder") or {}).get("type") == "ByteLevel"
        """Whether the bytes of ids are the concatenated bytes of each id."""
        self._pieces: dict[int, str] = {}
        self.token_bytes = TokenBytes(self._fast, text)
        """Bytes of one id alone."""
        try:
            self.chat_template, self._tool_template = (
                ChatTemplate(template, names) if template else None for template in (chat_template, tool_template)
            )
        except Exception as error:  # jinja raises its own, Python what it makes of the code: RecursionError
            raise TokenizerError(f"the chat template of {name} does not compile: {error}") from error
        bos, eos = names.get("bos_token"), names.get("eos_token")
        self.bos_id: int | None = self._fast.token_to_id(bos) if bos else None
        """Id of its `bos_token`; None without one."""
        self.chat_eos_id: int | None = self._fast.token_to_id(eos) if eos and self.chat_template else None
        """Id of its `eos_token`, with which a template ends the assistant's turn; None without a template."""

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> Tokenizer:
        """Read the tokenizer of a GGUF file, a local directory or, where neither exists, of a hub id at `revision`.

        Raises:
            TokenizerError: no `tokenizer.json` there, a broken file, or a directory and a revision.
        """
        files = read_files(source, revision)
        templates = files.templates
        return cls(files.text, files.config, templates.get("default"), source, templates.get("tool_use"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens of the tokenizer's own post-processor are added unless disabled.

        Raises:
            TokenizerFailedError: the tokenizer cannot do it.
        """
        try:
            # A batch leaves the other threads of this process alone meanwhile: `encode` holds them all up.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failed("tokenizes", error) from error
        ids: list[int] = encoding.ids
        return ids

    def encode_plain(self, text: str, *, is_joined: bool = False) -> list[int]:
        """Token ids of `text` in which names of special tokens are text; `is_joined`: without the blank that the
        tokenizer may put before every text.

        Raises:
            TokenizerFailedError: the tokenizer cannot do it.
            InvalidArgumentError: the tokenizer treats a special token's name as the token at any position.
        """
        escaping = self.escaping
        before = _JOINT if is_joined and self._has_blank_prefix else ""
        try:
            return escaping.encode_plain(before + text)[len(escaping.encode_plain(before)) :]
        except BaseException as error:
            raise _failed("tokenizes", error) from error

    def render(self, chat: Chat) -> str:
        """Text of a chat, rendered by the model's template up to the start of the assistant's turn.

        Raises:
            InvalidArgumentError: the model has no template, or the template refuses these messages.
        """
        template = self._tool_template if chat.tools and self._tool_template is not None else self.chat_template
        if template is None:
            raise ChatTemplate.missing()
        return template.render(chat)

    def _fingerprint(self, chat_template: str | None, tool_template: str | None, names: Mapping[str, str]) -> str:
        settings: list[Any] = [self._fast.to_str(), self._fast.encode_special_tokens, chat_template, names]
        settings += [] if self.infill is None else [self.infill.layout]
        settings += [tool_template] * (tool_template is not None) + [self._cleans_up] * self._cleans_up
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tool_format(self) -> ToolFormat:
        """Form in which its template has tools called."""
        template = self._tool_template or self.chat_template
        return tool_format(template.source if template is not None else "", self.special_ids)

    @cached_property
    def thinks(self) -> bool:
        """Whether its template knows thoughts between `<think>` and `</think>`."""
        return any("think>" in each.source for each in (self.chat_template, self._tool_template) if each is not None)

    @cached_property
    def escaping(self) -> EscapingTokenizer:
        """Serves chats whose messages must not spell special tokens."""
        return EscapingTokenizer.of(self._fast)

    @cached_property
    def grammars(self) -> Grammars:
        """Constraints in the tokenizer's tokens.

        Raises:
            FailedPreconditionError: grammars do not support such a tokenizer.
        """
        return Grammars(self._fast.to_str(), ROUTER_CACHE_BYTES)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD.

        Raises:
            TokenizerFailedError: the tokenizer cannot do it.
        """
        text = self._decode(ids)
        return clean_up(text) if self._cleans_up else text

    def detokenizer(self, context_ids: Sequence[int]) -> Detokenizer | CleaningDetokenizer:
        """For the text of an answer as it grows, after a prompt of `context_ids`."""
        made = Detokenizer(self._decode, self.piece, context_ids, is_concatenative=self.is_concatenative)
        return CleaningDetokenizer(made) if self._cleans_up else made

    def piece(self, token_id: int) -> str:
        """Text of one id alone, not cleaned up; remembered."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self._decode((token_id,))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            text: str = self._fast.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            raise _failed("detokenizes", error) from error
        return text


def _failed(verb: str, error: BaseException) -> BaseException:
    """The error to raise in place of the library's, whose panics do not derive from `Exception`; others stay."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return TokenizerFailedError(f"must be a text that the model's tokenizer {verb} (it fails: {type(error).__name__})")
