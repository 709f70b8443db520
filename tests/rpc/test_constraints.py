"""Constraints as grammars of one tokenizer: what they mean, and how bad ones are refused."""

import json
import re

import pytest

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.rpc.constraints import Grammars
from betoken.rpc.grammar_tokens import GrammarTokens
from betoken.rpc.validation import validate_constraint
from betoken.v1.types_pb2 import Constraint
from tests.router.harness import byte_tokenizer_json

GRAMMARS = Grammars(byte_tokenizer_json())
EOS = 0


def takes(constraint: Constraint, text: str) -> bool:
    ids = [*GRAMMARS._tokenizer.tokenize_str(text), EOS]
    return GRAMMARS.num_allowed(GRAMMARS.compile(constraint), ids, (EOS,)) == len(ids)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint(json_object=True), '{"a": [1, {"b": null}]}', "[1]"),
        (Constraint(json_schema='{"type": "integer", "minimum": 3}'), "4", "2"),
        (Constraint(regex="[a-c]{2,3}"), "abc", "abcd"),
        (Constraint(choice={"texts": ["yes", "no"]}), "no", "nor"),
        (Constraint(lark='start: "a" b+\nb: "b"'), "abb", "aab"),
    ],
)
def test_each_kind_of_constraint_accepts_its_texts_and_no_others(constraint: Constraint, good: str, bad: str) -> None:
    assert takes(constraint, good) and not takes(constraint, bad) and not takes(constraint, good[:-1] + "\0")


@pytest.mark.parametrize("text", ['"', "\\", "/a|b/", "%x", "a\nb", "ü😀", " ", "start: b", "{}", "'"])
def test_a_choice_constraint_is_literal_text(text: str) -> None:
    constraint = Constraint(choice={"texts": [text, "other"]})
    assert takes(constraint, text) and takes(constraint, "other") and not takes(constraint, text + text)


def test_json_may_be_indented_within_bounds() -> None:
    constraint = Constraint(json_object=True)
    assert takes(constraint, json.dumps({"a": [1, 2], "b": {"c": 3}}, indent=8)) and takes(constraint, '{"a":1}')
    assert not takes(constraint, "{" + " " * 200 + '"a":1}')


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        (Constraint(json_schema="{nope"), "constraint.json_schema", "Expecting property name"),
        (Constraint(json_schema="[]"), "constraint.json_schema", "must be a JSON object"),
        (Constraint(json_schema='{"type": "objekt"}'), "constraint.json_schema", "Invalid type - objekt"),
        (Constraint(json_schema='{"uniqueItems": true, "type": "array"}'), "constraint.json_schema", "uniqueItems"),
        (Constraint(json_schema="[" * 100_000), "constraint.json_schema", "recursion"),
        (Constraint(regex="(ab"), "constraint.regex", "unclosed group"),
        (Constraint(regex="a(?=b)"), "constraint.regex", "look-around"),
        (Constraint(lark="start: foo"), "constraint.lark", "unknown name"),
        (Constraint(lark="nothing"), "constraint.lark", ""),
    ],
)
def test_a_bad_constraint_is_rejected_with_the_librarys_message(constraint: Constraint, field: str, words: str) -> None:
    for _ in range(2):  # a refusal is not kept as a grammar
        with pytest.raises(InvalidArgumentError, match=f"^{field} = ") as caught:
            GRAMMARS.compile(constraint)
        assert words in caught.value.limit and ": " not in caught.value.limit


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(), "constraint = absent: must have one of json_object, json_schema, regex, choice, lark"),
        (Constraint(json_object=False), "constraint.json_object = False: must be true"),
        (Constraint(regex=""), "constraint.regex = 0 bytes: must be at least 1"),
        (Constraint(regex="x" * 301), "constraint.regex = 301 bytes: must be at most 300"),
        (Constraint(choice={"texts": []}), "constraint.choice.texts = 0 entries: must be at least 1"),
        (Constraint(choice={"texts": ["a", ""]}), "constraint.choice.texts[1] = 0 bytes: must be at least 1"),
        (Constraint(choice={"texts": ["abc"] * 200}), "constraint.choice = 1000 bytes: must be at most 300"),
        (Constraint(choice={"texts": ["a"] * 1025}), "constraint.choice.texts = 1025 entries: must be at most 1024"),
    ],
)
def test_sizes_and_kinds_of_constraints_are_checked(constraint: Constraint, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}$"):
        validate_constraint(constraint, max_bytes=300)


def test_a_compiled_constraint_is_cached() -> None:
    constraint = Constraint(regex="kept[0-9]")
    matcher = GRAMMARS.compile(constraint)
    assert GRAMMARS.compile(Constraint(regex="kept[0-9]")) is matcher


def test_a_tokenizer_without_grammars_is_refused() -> None:
    for text, words in (("{}", "no grammars"), ("", "tokenizer.json is missing")):
        with pytest.raises(FailedPreconditionError, match=words):
            Grammars(text)


def test_cached_constraints_are_bounded_by_bytes() -> None:
    grammars = Grammars(byte_tokenizer_json(), max_cache_bytes=40 << 20)
    for length in range(20_000, 20_020):
        grammars.compile(Constraint(regex=f"a{{{length}}}"))
        assert 10 << 20 < grammars.cached_bytes <= 40 << 20
    first = Constraint(regex="a{20000}")
    assert grammars.compile(first) is not GRAMMARS.compile(first) and len(grammars._cache) <= 3


def test_a_constraint_larger_than_the_cache_is_compiled_at_each_use() -> None:
    grammars = Grammars(byte_tokenizer_json(), max_cache_bytes=4 << 20)
    large, small = Constraint(regex="a{20000}"), Constraint(regex="a{20}")
    assert grammars.compile(large) is not grammars.compile(large) and grammars.cached_bytes == 0
    assert grammars.compile(small) is grammars.compile(small)


def test_a_cached_constraint_is_renewed_before_its_lexer_grows_without_bound() -> None:
    grammars = Grammars(byte_tokenizer_json(), max_cache_bytes=4 << 20)
    constraint = Constraint(json_object=True)
    matchers = [grammars.compile(constraint) for _ in range(300)]
    assert matchers[0] is matchers[200] and matchers[0] is not matchers[299]


def test_a_long_forced_text_costs_little_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled: list[int] = []
    encode = GrammarTokens.__call__

    def counted(tokens: GrammarTokens, text: str) -> list[int]:
        spelled.append(len(ids := encode(tokens, text)))
        return ids

    monkeypatch.setattr(GrammarTokens, "__call__", counted)
    matcher = Grammars(byte_tokenizer_json()).compile(Constraint(regex="a{50000}")).deep_copy()
    for _ in range(20):
        assert matcher.compute_bitmask() and matcher.try_consume_tokens(GRAMMARS._tokenizer.tokenize_str("a")) == 1
    assert 0 < max(spelled) <= 1024


@pytest.mark.parametrize("space", ["  ", "\n\n", " \n", "\t", "\n" + " " * 41, "\n \t", "\r\n"])
def test_json_has_no_white_space_that_no_pretty_printer_writes(space: str) -> None:
    constraint = Constraint(json_object=True)
    assert not takes(constraint, f'{{{space}"a":1}}') and not takes(constraint, f'{{"a":{space}1}}')


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_may_be_written_as_pretty_printers_write_it(indent: int | str | None) -> None:
    text = json.dumps({"a": [1, {"b": [], "c": {"d": "e f"}}], "g": {}}, indent=indent)
    assert takes(Constraint(json_object=True), text)


@pytest.mark.parametrize(
    "keyword",
    [
        *({"not": {"const": 3}}, {"uniqueItems": True}, {"if": {"required": ["a"]}}, {"contains": {"const": 1}}),
        *({"dependentRequired": {"a": ["b"]}}, {"propertyNames": {"pattern": "^a"}}, {"minContains": 2}),
        *({"unevaluatedProperties": False}, {"dependentSchemas": {"a": {"type": "object"}}}),
    ],
)
def test_a_schema_keyword_that_the_library_lacks_is_refused_by_its_name(keyword: dict[str, object]) -> None:
    for schema in ({**keyword}, {"type": "object", "properties": {"x": keyword}}):
        with pytest.raises(InvalidArgumentError, match=next(iter(keyword))):
            GRAMMARS.compile(Constraint(json_schema=json.dumps(schema)))
