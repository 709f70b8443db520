"""From a request's constraint to a grammar of the model's tokens, by llguidance. Knows the message, no engine, no link.

Compiling takes a millisecond or some; the library ends by itself what would take long. Compiled grammars are kept.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.v1.types_pb2 import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_KEPT = 256
"""Compiled constraints, those used last."""
_MAX_WORDS_CHARS = 300
_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ \n\t]{1,40}"}
"""Between JSON's tokens: a line's end and an indent, and no more, or a model could go on with it for ever."""


class Grammars:
    """Constraints in the tokens of one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str) -> None:
        """`tokenizer_json`: the text of a tokenizer.json.

        Raises:
            FailedPreconditionError: the library cannot make grammars for such a tokenizer.
        """
        if not tokenizer_json:
            raise FailedPreconditionError("tokenizer.json is missing")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json)
        except BaseException as error:  # its panics do not derive from `Exception`
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise FailedPreconditionError(f"no grammars for this tokenizer: {_brief(str(error))}") from error
        self.vocab_size = self._tokenizer.vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint, field: str = "constraint") -> LLMatcher:
        """A matcher at the grammar's beginning, to be copied and never moved; `constraint` has passed validation.

        Raises:
            InvalidArgumentError: the grammar is malformed or larger than the library takes, in the library's words.
        """
        key = constraint.SerializeToString(deterministic=True)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        matcher = self._make(constraint, field)
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def num_allowed(self, matcher: LLMatcher, ids: Sequence[int], eos_token_ids: Collection[int]) -> int:
        """How many of the leading `ids` an answer may begin with, EOS at its end included."""
        copy = matcher.deep_copy()
        for index, token_id in enumerate(ids):
            if token_id in eos_token_ids:
                return index + copy.is_accepting()
            if token_id >= self.vocab_size or copy.try_consume_tokens([token_id]) != 1:
                return index
        return len(ids)

    def _make(self, constraint: Constraint, field: str) -> LLMatcher:
        kind = constraint.WhichOneof("kind") or ""
        path, value = f"{field}.{kind}", getattr(constraint, kind)
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
            words = matcher.get_error()
            if not words:  # some limits are met only at the first step
                first = matcher.deep_copy()
                is_empty = not any(first.compute_bitmask()) and not first.is_accepting()
                words = first.get_error() or ("allows no text at all" if is_empty else "")
        except (ValueError, RecursionError) as error:
            words = str(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            words = f"fails: {type(error).__name__}"
        if words:
            raise InvalidArgumentError(path, value if isinstance(value, str) else list(value.texts), _brief(words))
        return matcher


def _grammar(constraint: Constraint) -> str:
    """The library's grammar.

    Raises:
        ValueError: a JSON schema that is not JSON.
    """
    match constraint.WhichOneof("kind"):
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON)
        case "json_schema":
            schema = json.loads(constraint.json_schema)
            if not isinstance(schema, dict):
                raise ValueError("must be a JSON object")
            return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.regex)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in constraint.choice.texts)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case _:
            return LLMatcher.grammar_from_lark(constraint.lark)


def _brief(words: str) -> str:
    """One line of the library's words; none of a link's marks within."""
    line = " ".join(words.split()).replace(": ", " - ")
    return line if len(line) <= _MAX_WORDS_CHARS else f"{line[:_MAX_WORDS_CHARS]}..."
