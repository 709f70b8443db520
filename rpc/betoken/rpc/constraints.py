"""From a request's constraint to a grammar of the model's tokens, by llguidance. Knows the message, no engine, no link.

Compiling takes a millisecond or some; the library ends by itself what would take long. Compiled grammars are cached, in
bounded memory.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llguidance import LLMatcher, LLTokenizer

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.rpc.grammar_tokens import GrammarTokens
from betoken.v1.types_pb2 import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WORKER_CACHE_BYTES = 64 << 20
"""Compiled constraints that a worker caches."""
ROUTER_CACHE_BYTES = 8 << 20
"""Compiled constraints that a router caches: it compiles each only to check it."""
_BASE_BYTES, _BYTES_PER_TEXT_BYTE, _BYTES_PER_FORCED_BYTE = 1 << 19, 150, 512
"""Memory of a compiled constraint, rounded up from measurements: at least, for a byte of its text, and for a byte that
it forces at its beginning (`a{100000}` takes 38 MB)."""
_MAX_USES = 256
"""Answers of one compiled constraint, whose lexer grows in use; then it is compiled again."""
_MAX_WORDS_CHARS = 300
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
"""White space between JSON's tokens: what pretty printers write, a space or a line end and an indent."""


class _Cached(NamedTuple):
    """A compiled constraint."""

    matcher: LLMatcher
    num_bytes: int
    """Estimated memory."""
    num_uses: int = 1


class Grammars:
    """Constraints in the tokens of one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, max_cache_bytes: int = WORKER_CACHE_BYTES) -> None:
        """`tokenizer_json`: the text of a tokenizer.json. `max_cache_bytes`: bound of `cached_bytes`.

        Raises:
            FailedPreconditionError: the library cannot make grammars for such a tokenizer.
        """
        if not tokenizer_json:
            raise FailedPreconditionError("tokenizer.json is missing")
        try:
            tokens = GrammarTokens(tokenizer_json)
            self._tokenizer = LLTokenizer(cast(Any, tokens))
        except BaseException as error:  # its panics do not derive from `Exception`
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise FailedPreconditionError(f"no grammars for this tokenizer: {_brief(str(error))}") from error
        self.vocab_size = tokens.vocab_size
        self._lock = threading.Lock()
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self.cached_bytes = 0
        """Estimated memory of the cached constraints."""

    def compile(self, constraint: Constraint, field: str = "constraint") -> LLMatcher:
        """A matcher at the grammar's beginning, to be copied and never moved; `constraint` has passed validation.

        Raises:
            InvalidArgumentError: the grammar is malformed or larger than the library takes, in the library's words.
        """
        key = constraint.SerializeToString(deterministic=True)
        with self._lock:
            cached = self._remove(key)
            if cached is not None and cached.num_uses < _MAX_USES:
                self._add(key, cached._replace(num_uses=cached.num_uses + 1))
                return cached.matcher
        made = self._make(constraint, field)
        with self._lock:
            self._remove(key)  # another thread may have compiled it, too
            self._add(key, made)
        return made.matcher

    def _remove(self, key: bytes) -> _Cached | None:
        if (cached := self._cache.pop(key, None)) is not None:
            self.cached_bytes -= cached.num_bytes
        return cached

    def _add(self, key: bytes, added: _Cached) -> None:
        """Put it into the cache as the newest, and evict the oldest ones beyond the bound."""
        self._cache[key] = added
        self.cached_bytes += added.num_bytes
        while self.cached_bytes > self._max_cache_bytes:
            _, evicted = self._cache.popitem(last=False)
            self.cached_bytes -= evicted.num_bytes

    def num_allowed(self, matcher: LLMatcher, ids: Sequence[int], eos_token_ids: Collection[int]) -> int:
        """How many of the leading `ids` an answer may begin with, EOS at its end included."""
        copy = matcher.deep_copy()
        for index, token_id in enumerate(ids):
            if token_id in eos_token_ids:
                return index + ends_with(copy, token_id)
            if token_id >= self.vocab_size or copy.try_consume_tokens([token_id]) != 1:
                return index
        return len(ids)

    def _make(self, constraint: Constraint, field: str) -> _Cached:
        kind = constraint.WhichOneof("kind") or ""
        path, value, num_forced = f"{field}.{kind}", getattr(constraint, kind), 0
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
            words = matcher.get_error()
            if not words:  # some limits are met only at the first step
                first = matcher.deep_copy()
                is_empty = not any(first.compute_bitmask()) and not first.is_accepting()
                words = first.get_error() or ("allows no text at all" if is_empty else "")
                num_forced = len(first.compute_ff_bytes())
        except (ValueError, RecursionError) as error:
            words = str(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            words = f"fails: {type(error).__name__}"
        if words:
            raise InvalidArgumentError(path, value if isinstance(value, str) else list(value.texts), _brief(words))
        text_bytes, forced_bytes = _BYTES_PER_TEXT_BYTE * constraint.ByteSize(), _BYTES_PER_FORCED_BYTE * num_forced
        return _Cached(matcher, _BASE_BYTES + text_bytes + forced_bytes)


def ends_with(matcher: LLMatcher, token_id: int) -> bool:
    """Whether an answer may end here with this EOS id: the grammar is complete, or is with the id that it names."""
    if matcher.is_accepting():
        return True
    if matcher.try_consume_tokens([token_id]) != 1:
        return False
    is_complete = bool(matcher.is_accepting())
    matcher.rollback(1)
    return is_complete


def _grammar(constraint: Constraint) -> str:
    """The library's grammar.

    Raises:
        ValueError: a JSON schema that is not JSON.
    """
    match constraint.WhichOneof("kind"):
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
        case "json_schema":
            schema = json.loads(constraint.json_schema)
            if not isinstance(schema, dict):
                raise ValueError("must be a JSON object")
            return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
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
