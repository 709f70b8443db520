"""Prompt files: both fields, compression, limits, refusals."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from betoken.bench.prompts import OWN_PROMPTS, fingerprint, load_prompts


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_own_prompts_are_distinct_and_enough_for_a_matrix_run() -> None:
    prompts = load_prompts(OWN_PROMPTS)
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 8


def test_own_prompts_end_where_a_token_ends() -> None:
    """The tokenizer joins a line break with the next line's indentation; after one alone models begin anew."""
    assert [prompt.text for prompt in load_prompts(OWN_PROMPTS)] == [p.text.rstrip() for p in load_prompts(OWN_PROMPTS)]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_a_prompt_file_has_prompts_or_first_turns(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"prompt": "one"}, {"turns": ["two", "and then"]}, {"prompt": "three"})
    assert [(p.index, p.text) for p in load_prompts(path)] == [(0, "one"), (1, "two"), (2, "three")]
    assert [p.text for p in load_prompts(path, limit=2)] == ["one", "two"]


def test_prompts_of_conversations_are_marked_and_begin_with_the_user(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]
    path = write(tmp_path / "prompts.jsonl", {"turns": ["one"]}, {"messages": messages}, {"prompt": "three"})
    assert [(p.text, p.is_chat) for p in load_prompts(path)] == [("one", True), ("two", True), ("three", False)]


def test_a_folder_of_prompt_files_is_read_by_name(tmp_path: Path) -> None:
    for folder, text in (("b", "two"), ("a", "one")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "test.jsonl", {"turns": [text]})
    assert [(p.index, p.text) for p in load_prompts(tmp_path)] == [(0, "one"), (1, "two")]


def test_a_folder_of_parquet_files_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").touch()
    with pytest.raises(ValueError, match=r"Parquet files only; write their rows to \.jsonl files"):
        load_prompts(tmp_path)


def test_a_prompt_that_is_only_a_placeholder_of_speed_bench_is_rejected(tmp_path: Path) -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: SPEED-Bench's placeholder"):
        load_prompts(write(tmp_path / "prompts.jsonl", {"turns": [text]}))


def test_a_category_is_the_files_own(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"turns": ["one"], "category": "qa"}, {"prompt": "two"})
    assert [p.category for p in load_prompts(path)] == ["qa", ""]


@pytest.mark.parametrize("record", [{"prompt": ""}, {"turns": []}, {"text": "x"}, ["x"]])
def test_a_prompt_line_without_text_is_rejected_by_number(tmp_path: Path, record: object) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        load_prompts(path)


def test_a_prompt_line_that_is_not_json_is_rejected_by_number(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\nnot so\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: not JSON"):
        load_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
@pytest.mark.parametrize(
    "change",
    [lambda packed: packed[:-9], lambda packed: packed[:14] + b"~~" + packed[16:], lambda packed: b"\xff" + packed],
    ids=["cut off", "another byte", "no text"],
)
def test_an_unreadable_prompt_file_is_rejected_by_name(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    packed = gzip.compress(b'{"prompt": "fine"}\n')
    (tmp_path / name).write_bytes(change(packed))
    with pytest.raises(ValueError, match=r"prompts\.jsonl.* cannot be read"):
        load_prompts(tmp_path / name)


def test_a_prompt_line_with_half_of_a_surrogate_pair_is_rejected_by_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*surrogate"):
        load_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "a\ud800"}))


def test_an_empty_prompt_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        load_prompts(write(tmp_path / "prompts.jsonl"))


def test_fingerprint_depends_on_where_texts_end(tmp_path: Path) -> None:
    left = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "ab"}, {"prompt": "c"}))
    right = load_prompts(write(tmp_path / "b.jsonl", {"prompt": "a"}, {"prompt": "bc"}))
    assert fingerprint(left) != fingerprint(right)
