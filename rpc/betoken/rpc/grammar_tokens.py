"""The tokens of a model as llguidance's grammars see them: bytes, special tokens, and the spelling of a forced text.

A token is special exactly if it leaves no text in an answer. llguidance's own reader also takes `<tool_call>` and other
user-defined tokens for special, guesses which token ends an answer, and spells `<|im_end|>` in a text with the control
token of that name.
"""

from __future__ import annotations

import json

from betoken.rpc.plain_tokenizer import plain_tokenizer
from betoken.rpc.token_bytes import TokenBytes, decoder_kinds

_MAX_SPELLED_CHARS = 1024
"""Characters of a forced text that are tokenized. llguidance passes all of it at every token and uses the first id."""


class GrammarTokens:
    """Vocabulary in the form of `llguidance.TokenizerWrapper`.

    The end of an answer is an extra id after the vocabulary, so that no token of the model ends a grammar by itself.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: str) -> None:
        """`tokenizer_json`: the text of a tokenizer.json.

        Raises:
            ValueError: not a tokenizer, or its tokens do not stand for bytes.
        """
        data = json.loads(tokenizer_json)
        if not decoder_kinds(data.get("decoder")) & {"ByteLevel", "ByteFallback"}:
            raise ValueError("its decoder knows no bytes")
        self._fast = plain_tokenizer(tokenizer_json)
        added = self._fast.get_added_tokens_decoder()
        self.vocab_size = 1 + max((*self._fast.get_vocab().values(), *added), default=-1)
        """Ids of the model's tokens: [0, vocab_size)."""
        token_bytes = TokenBytes(self._fast, tokenizer_json)
        self.tokens = [*map(token_bytes, range(self.vocab_size)), b"<end>"]
        self.eos_token_id = self.vocab_size
        special_ids = (token_id for token_id, token in added.items() if token.special)
        self.special_token_ids = [*special_ids, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Ids of a forced text, of its beginning if it is long; special tokens that it names are spelled."""
        ids: list[int] = self._fast.encode(text[:_MAX_SPELLED_CHARS], add_special_tokens=False).ids
        return ids
