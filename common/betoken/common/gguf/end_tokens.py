"""The end tokens of a GGUF file, named by its keys or recognised by their text as in llama.cpp.

Many files name one EOS only, often not the token with which their chat template ends a turn.
Source: llama.cpp's llama-vocab.cpp, `special_eog_ids`.
"""

from collections.abc import Sequence

from betoken.common.gguf.header import GgufError, GgufHeader

_KEY = "tokenizer.ggml"
_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_END_OF_TURN = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
)
_END_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_FILL_IN_THE_MIDDLE = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""Padding and separators of repositories and files: the text before them is complete."""
_NAMES = frozenset((*_END_OF_TURN, *_END_OF_TEXT, *_FILL_IN_THE_MIDDLE))
_CONTROL = 3
_CONTROL_ONLY = "</s>"
"""Ends a text only as a control token: some vocabularies have the HTML tag as an ordinary one."""
_INNER = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|calls|>", "<|flush|>")),
    ("</s>", ("<|tool_response>",)),
)
"""Tokens that end a part of an answer, not the answer, in vocabularies that have all the others."""


def end_tokens(header: GgufHeader) -> dict[int, str]:
    """Return the ids that end an answer, in ascending order, with the key or the text by which each was recognised.

    Raises:
        GgufError: a key names an id outside the vocabulary.
    """
    tokens = _list(header, "tokens")
    types = _list(header, "token_type")
    found: dict[int, str] = {}
    for key in _KEYS:
        value = header.metadata.get(f"{_KEY}.{key}")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise GgufError(f"{header.path}: {_KEY}.{key}: {value!r} is not an id of {len(tokens)} tokens")
        found.setdefault(value, key)
    named = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if token in _NAMES and (token != _CONTROL_ONLY or types[token_id : token_id + 1] == [_CONTROL])
    }
    for token, others in _INNER:
        if named.keys() >= {token, *others}:
            found.pop(named[token], None)
            del named[token]
    for token, token_id in named.items():
        found.setdefault(token_id, token)
    return dict(sorted(found.items()))


def _list(header: GgufHeader, name: str) -> Sequence[object]:
    value = header.metadata.get(f"{_KEY}.{name}")
    return value if isinstance(value, list) else []
