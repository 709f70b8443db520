"""Text, stop rules and token accounting: functions of the ids alone, however they were split into blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from betoken.router.text.answer import Answer, FinishReason, StopRules
from betoken.router.text.detokenizer import Detokenizer
from betoken.router.text.stop_strings import StopStrings
from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import (
    CHAT_TEMPLATE,
    byte_fallback_tokenizer_json,
    byte_ids,
    byte_tokenizer_json,
    with_special_tokens,
)

TOKENIZER = Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")
BYTE_FALLBACK = Tokenizer(byte_fallback_tokenizer_json(), {}, None, "test")
TEXT = "naïve 日本語 👩‍🚀 the end\n"


def detokenizer(prompt_ids: Sequence[int] = (), *, is_fast: bool = True) -> Detokenizer:
    return Detokenizer(TOKENIZER.decode, TOKENIZER.piece, prompt_ids, is_concatenative=is_fast)


def answer(
    stop: Sequence[str] = (),
    end_ids: Sequence[int] = (0,),
    min_new_tokens: int = 0,
    max_new_tokens: int = 10_000,
    special_names: Mapping[int, str] | None = None,
) -> Answer:
    rules = StopRules(frozenset(end_ids), tuple(stop), min_new_tokens, max_new_tokens, special_names or {})
    return Answer(rules, detokenizer())


def blocks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in sizes:
        if start < len(ids):
            yield ids[start : start + size]
            start += size
    yield ids[start:]


SIZES = st.lists(st.integers(1, 9), max_size=40)


@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.integers(30, 90), max_size=80),
    sizes=SIZES,
    is_fast=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_decoded_whole_for_any_ids(ids: list[int], sizes: list[int], is_fast: bool) -> None:
    assert TOKENIZER.is_concatenative
    stream = detokenizer(is_fast=is_fast)
    text = ""
    for block in blocks(ids, sizes):
        if block:
            piece, num_chars = stream.step(block)
            assert len(num_chars) == len(block) and sum(num_chars) == len(piece)
            text += piece
    assert text + stream.flush() == TOKENIZER.decode(ids)


def test_no_message_ends_within_a_character() -> None:
    stream = detokenizer()
    pieces = [stream.step([token_id])[0] for token_id in byte_ids(TOKENIZER, TEXT.encode())]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.flush() == ""


def test_a_character_begun_in_the_prompt_is_finished_in_the_answer() -> None:
    ids = byte_ids(TOKENIZER, "ab👩c".encode())
    stream = detokenizer(ids[:4])
    assert "".join(stream.step([token_id])[0] for token_id in ids[4:]) == "👩c"


@given(text=st.text("ab \n\u00e9\u6f22\U0001f600\U0001f389", max_size=40), cut=st.integers(1, 40), sizes=SIZES)
@example(text="\u6f22" * 4, cut=12, sizes=[])
@settings(max_examples=100, deadline=None)
def test_runs_of_byte_tokens_stream_as_the_characters_they_are(text: str, cut: int, sizes: list[int]) -> None:
    ids = BYTE_FALLBACK.encode("a" + text)
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    whole_ids = prompt_ids  # without a character that they only begin: it is the answer's
    while BYTE_FALLBACK.decode(whole_ids).endswith("\ufffd"):
        whole_ids = whole_ids[:-1]
    detokenizer = Detokenizer(BYTE_FALLBACK.decode, BYTE_FALLBACK.piece, prompt_ids)
    streamed = ""
    for block in blocks(output_ids, sizes):
        new, num_chars = detokenizer.step(block)
        assert len(num_chars) == len(block) and sum(num_chars) == len(new)
        streamed += new
    assert BYTE_FALLBACK.decode(whole_ids) + streamed + detokenizer.flush() == "a" + text


@pytest.mark.parametrize("num_special", [1, 20, 50])
def test_a_run_of_special_tokens_is_not_the_beginning_of_a_text(num_special: int) -> None:
    ids = BYTE_FALLBACK.encode("a b")  # the decoder strips a text's first space
    ids[2:2] = [BYTE_FALLBACK.special_ids["</s>"]] * num_special  # as with ignore_eos
    assert BYTE_FALLBACK.decode(ids) == "a b"
    detokenizer = Detokenizer(BYTE_FALLBACK.decode, BYTE_FALLBACK.piece, ())
    assert "".join(detokenizer.step([token_id])[0] for token_id in ids) == "a b"


def test_the_prompts_last_character_is_not_the_answers() -> None:
    ids = TOKENIZER.encode("a\ufffdb")
    decode = detokenizer(ids[:-1])
    assert decode.step(ids[-1:])[0] + decode.flush() == "b"


def test_incomplete_utf8_is_flushed_at_the_end() -> None:
    grown = answer(max_new_tokens=3)
    kept = grown.append(byte_ids(TOKENIZER, b"a\xf0\x9f\x91\xa9"))
    assert (kept.num_tokens, kept.text, grown.finish) == (3, "a\ufffd", FinishReason.LENGTH)


@pytest.mark.parametrize("stop", ["the", "語 👩", "\n", "naïve 日本", "e"])
@settings(deadline=None, max_examples=30)
@given(sizes=SIZES)
def test_stop_string_is_found_at_every_split(stop: str, sizes: list[int]) -> None:
    ids = byte_ids(TOKENIZER, TEXT.encode())
    grown = answer(stop=[stop])
    num_tokens, text = 0, ""
    for block in blocks(ids, sizes):
        kept = grown.append(block)
        num_tokens += kept.num_tokens
        text += kept.text
        assert sum(kept.num_chars) == len(kept.text)
        if grown.finish:
            break
    before = TEXT[: TEXT.index(stop)]
    assert text == before
    assert (grown.finish, grown.stop) == (FinishReason.STOP, stop)
    assert num_tokens == len(grown.output_ids) == len((before + stop).encode())


def test_stop_string_inside_a_merged_token() -> None:
    the = TOKENIZER.encode(" the")
    assert len(the) == 1
    grown = answer(stop=["th"])
    kept = grown.append([*byte_ids(TOKENIZER, b"on"), *the, 5, 6])
    assert (kept.num_tokens, kept.text, grown.stop) == (3, "on ", "th")


def test_of_two_stop_strings_in_one_token_the_first_to_begin_wins() -> None:
    grown = answer(stop=["e", "the"])
    kept = grown.append(TOKENIZER.encode(" the"))
    assert (kept.text, grown.stop) == (" ", "the")


def test_text_that_might_begin_a_stop_string_is_held_back_and_released() -> None:
    grown = answer(stop=["abcd"], max_new_tokens=5)
    ids = byte_ids(TOKENIZER, b"xabcx")
    assert [grown.append([token_id]).text for token_id in ids] == ["x", "", "", "", "abcx"]
    grown = answer(stop=["abcd"], max_new_tokens=4)
    assert [grown.append([token_id]).text for token_id in ids[:4]] == ["x", "", "", "abc"]
    assert grown.finish is FinishReason.LENGTH


@given(
    text=st.text("ab\u6f22\U0001f600", min_size=1, max_size=12),
    cut=st.integers(1, 40),
    stops=st.lists(st.text("ab\u6f22@\ufffd", min_size=1, max_size=4), max_size=3),
    ends_with_eos=st.booleans(),
    sizes=SIZES,
)
@settings(deadline=None)
def test_every_character_of_an_answer_belongs_to_one_of_its_tokens(
    text: str, cut: int, stops: list[str], ends_with_eos: bool, sizes: list[int]
) -> None:
    ids = [*byte_ids(TOKENIZER, text.encode())[:cut], *([0] if ends_with_eos else [])]
    grown, streamed, num_tokens = answer(stop=stops, max_new_tokens=len(ids)), "", 0
    for block in blocks(ids, sizes):
        kept = grown.append(block)
        assert len(kept.num_chars) == kept.num_tokens and sum(kept.num_chars) == len(kept.text)
        streamed, num_tokens = streamed + kept.text, num_tokens + kept.num_tokens
    whole = TOKENIZER.decode(grown.output_ids)
    assert grown.finish is not None and num_tokens == len(grown.output_ids)
    if grown.stop:
        assert (streamed + grown.stop) == whole[: len(streamed + grown.stop)]
    else:
        assert streamed == whole


def test_a_stop_string_that_only_the_last_flush_completes_ends_the_text() -> None:
    grown = answer(stop=["b\ufffd"], max_new_tokens=3)
    assert grown.append(byte_ids(TOKENIZER, b"ab\xf0")).text == "a"
    assert (grown.finish, grown.stop) == (FinishReason.STOP, "b\ufffd")
    grown = answer(stop=["b\ufffd"], max_new_tokens=3, min_new_tokens=3)
    assert grown.append(byte_ids(TOKENIZER, b"ab\xf0")).text == "ab\ufffd"
    assert (grown.finish, grown.stop) == (FinishReason.LENGTH, "")


@given(cut=st.integers(0, 30), sizes=SIZES)
def test_resumed_text_continues_what_was_released(cut: int, sizes: list[int]) -> None:
    ids = byte_ids(TOKENIZER, TEXT.encode())
    stop = ["end!", "日本人"]
    whole, resumed = answer(stop=stop, max_new_tokens=len(ids)), answer(stop=stop, max_new_tokens=len(ids))
    released = "".join(whole.append([token_id]).text for token_id in ids[:cut])
    if cut:
        resumed.append(ids[:cut])
    rest = "".join(resumed.append(block).text for block in blocks(ids[cut:], sizes) if block)
    assert released + rest == TEXT


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
    texts=st.lists(st.text("abc", max_size=5), max_size=20),
)
@settings(deadline=None)
def test_the_longest_end_that_begins_a_stop_string_is_held_back(stops: list[str], texts: list[str]) -> None:
    strings, whole, released = StopStrings(stops), "", ""
    for text in texts:
        if strings.match(text) is not None:
            break
        whole += text
        released += strings.feed(text)
        ends = (whole[start:] for start in range(len(whole) + 1))
        assert strings.held == next(end for end in ends if any(stop.startswith(end) for stop in stops))
        assert released + strings.held == whole


def test_long_stop_strings_cost_a_token_little() -> None:
    length, num_tokens = 255, 2000
    stops = ["b" * length + chr(ord("c") + number) for number in range(15)] + ["a" * length + "b"]
    strings = StopStrings(stops)
    started_s = time.thread_time()
    for _ in range(num_tokens):
        strings.feed("a")
    assert strings.held == "a" * length
    assert (time.thread_time() - started_s) / num_tokens < 100e-6  # it took 400; now less than 10


def test_no_token_after_an_end_id_counts() -> None:
    grown = answer(end_ids=[0, 7])
    kept = grown.append([5, 6, 7, 8, 9])
    assert (kept.num_tokens, grown.output_ids, grown.finish) == (3, [5, 6, 7], FinishReason.STOP)
    assert grown.append([1, 2]).num_tokens == 0


def test_max_new_tokens_cuts_a_block() -> None:
    grown = answer(max_new_tokens=4)
    assert grown.append([5, 6, 7]).num_tokens == 3
    assert grown.append([8, 9, 10]).num_tokens == 1
    assert (grown.finish, grown.room) == (FinishReason.LENGTH, 0)


def test_an_end_id_at_the_last_token_is_a_stop() -> None:
    grown = answer(max_new_tokens=2)
    grown.append([5, 0])
    assert grown.finish is FinishReason.STOP


def test_stop_strings_are_sought_after_min_new_tokens() -> None:
    ids = byte_ids(TOKENIZER, b"xxab xx")
    grown = answer(stop=["x"], min_new_tokens=3)
    kept = grown.append(ids)
    assert (kept.text, kept.num_tokens, grown.stop) == ("xxab ", 6, "x")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True),
    text=st.text("ab", max_size=14),
    min_new_tokens=st.integers(0, 8),
    sizes=SIZES,
)
@settings(deadline=None)
def test_stop_strings_count_if_they_end_after_min_new_tokens(
    stops: list[str], text: str, min_new_tokens: int, sizes: list[int]
) -> None:
    grown, streamed = answer(stop=stops, min_new_tokens=min_new_tokens, max_new_tokens=max(1, len(text))), ""
    for block in blocks(byte_ids(TOKENIZER, text.encode()), sizes):
        streamed += grown.append(block).text
    ends = range(min_new_tokens + 1, len(text) + 1)
    found = next(((end, stop) for end in ends for stop in _longest_first(stops) if text[:end].endswith(stop)), None)
    if found is None:
        assert (streamed, grown.finish, grown.stop) == (text, FinishReason.LENGTH if text else None, "")
    else:
        end, stop = found
        assert (streamed, grown.finish, grown.stop) == (text[: end - len(stop)], FinishReason.STOP, stop)
        assert len(grown.output_ids) == end


def test_a_stop_string_may_begin_in_one_that_came_too_early() -> None:
    grown = answer(stop=["aa"], min_new_tokens=2)
    assert grown.append(byte_ids(TOKENIZER, b"aaab")).text == "a"
    assert (grown.finish, grown.stop) == (FinishReason.STOP, "aa")


def _longest_first(stops: Sequence[str]) -> list[str]:
    return sorted(stops, key=len, reverse=True)


def test_a_special_token_ends_the_answer_as_the_stop_string_it_is() -> None:
    for sizes in ([1] * 9, [9]):
        grown = answer(stop=["<eos>", "cd"], min_new_tokens=2, end_ids=(), special_names=TOKENIZER.special_names)
        kept = [grown.append(block) for block in blocks([0, *byte_ids(TOKENIZER, b"abc"), 0, 5], sizes)]
        assert "".join(part.text for part in kept) == "abc"  # the first came too early
        assert (grown.finish, grown.stop, len(grown.output_ids)) == (FinishReason.STOP, "<eos>", 5)
    grown = answer(stop=["<eos>", "b"], special_names=TOKENIZER.special_names)
    assert grown.append([*byte_ids(TOKENIZER, b"abc"), 0]).text == "a"
    assert grown.stop == "b"


def test_text_before_a_special_token_that_is_a_stop_string_is_kept() -> None:
    grown = answer(stop=["<eos>"], end_ids=(), special_names=TOKENIZER.special_names)
    assert grown.append([*byte_ids(TOKENIZER, b"a\xf0"), 0]).text == "a\ufffd"


SPECIAL = Tokenizer(with_special_tokens(byte_tokenizer_json(), "<|a|>", "<|b|>"), {}, None, "test")
PARTS = st.sampled_from(["<eos>", "<|a|>", "<|b|>", "<", "|", "a", "b", ">", "\n"])


@given(
    parts=st.lists(PARTS, max_size=16),
    are_spelled=st.lists(st.booleans(), min_size=16, max_size=16),
    stops=st.lists(st.lists(PARTS, min_size=1, max_size=4).map("".join), min_size=1, max_size=3, unique=True),
    min_new_tokens=st.integers(0, 6),
    sizes=SIZES,
)
@example(["a", "<|a|>", "\n"], [False] * 16, ["<|a|>\n"], 0, [])
@example(["a", "<|a|>", "<|b|>"], [True, True] + [False] * 14, ["a<|a|><|b", "<|a|><|b|>"], 0, [1, 1])
@settings(deadline=None, max_examples=500)
def test_a_stop_string_of_names_and_text_is_found_whether_spelled_or_tokens(
    parts: list[str], are_spelled: list[bool], stops: list[str], min_new_tokens: int, sizes: list[int]
) -> None:
    """The answer ends with the first token after which its text, or what that is with names written, ends in one."""
    ids: list[int] = []
    for part, is_spelled in zip(parts, are_spelled, strict=False):
        special_id = SPECIAL.special_ids.get(part)
        ids += byte_ids(SPECIAL, part.encode()) if special_id is None or is_spelled else [special_id]
    rules = StopRules(frozenset(), tuple(stops), min_new_tokens, max(1, len(ids)), SPECIAL.special_names)
    grown, text = Answer(rules, Detokenizer(SPECIAL.decode, SPECIAL.piece, ())), ""
    for block in blocks(ids, sizes):
        text += grown.append(block).text
    shown = [SPECIAL.decode([token_id]) for token_id in ids]
    written = [SPECIAL.special_names.get(token_id, piece) for token_id, piece in zip(ids, shown, strict=True)]
    is_text = [bool(piece) for piece, name in zip(shown, written, strict=True) for _ in name]
    for end in range(min_new_tokens + 1, len(ids) + 1):
        whole, named, before = ("".join(part) for part in (shown[:end], written[:end], written[: end - 1]))
        starts = {stop: len(whole) - len(stop) for stop in stops if shown[end - 1] and whole.endswith(stop)}
        for stop in stops:
            if any(name in stop for name in SPECIAL.special_ids):
                start = named.find(stop, max(0, len(before) - len(stop) + 1))  # it may end within a name
                if start >= 0:
                    starts[stop] = min(sum(is_text[:start]), starts.get(stop, len(whole)))
        if starts:
            assert (grown.finish, len(grown.output_ids)) == (FinishReason.STOP, end)
            assert starts[grown.stop] == min(starts.values())
            assert text == whole[: starts[grown.stop]]
            break
    else:
        assert (text, grown.stop) == ("".join(shown), "")
