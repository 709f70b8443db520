import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from betoken.training.batches import Batches, pad
from betoken.training.prompts import cut, invent, main, user_turn
from betoken.training.samples import Sample, clip, read_prompts, read_samples, read_texts, write_sample


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_pair / "target")


def write(path: Path, *records: dict[str, Any]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_prompts_are_plain_text_or_chats(tokenizer: Any, tmp_path: Path, name: str) -> None:
    chat = [{"role": "user", "content": "hello"}]
    path = write(tmp_path / name, {"prompt": "def f():"}, {"turns": ["hello", "again"]}, {"messages": chat})
    plain, turns, messages = read_prompts(path, tokenizer)
    assert tokenizer.decode(plain) == "def f():"
    assert turns == messages and tokenizer.decode(turns) == "# user:\nhello\n# assistant:\n"
    assert read_prompts(path, tokenizer, 1) == [plain]


@pytest.mark.parametrize(
    ("line", "reported"), [("{", ":1"), ("[]", "not a JSON object"), ("{}", "is missing"), ("", "holds no prompts")]
)
def test_a_bad_file_of_prompts_is_reported_with_its_line(
    tokenizer: Any, tmp_path: Path, line: str, reported: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=reported):
        read_prompts(path, tokenizer)


def test_a_text_is_learnt_whole_and_a_completion_after_its_prompt(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "texts.jsonl", {"text": "a = 1"}, {"prompt": "a =", "completion": " 1"})
    text, completion = read_texts(path, tokenizer)
    assert text.prompt_length == 0 and completion.prompt_length == len(tokenizer.encode("a ="))
    assert tokenizer.decode(completion.ids) == "a = 1"


def test_a_long_text_goes_on_in_the_next_piece_and_an_answer_is_cut() -> None:
    ids = tuple(range(50))
    pieces = clip([Sample(ids, 0), Sample(ids, 5), Sample(ids, 40)], 20)
    assert [piece.ids for piece in pieces] == [ids[:20], ids[20:40], ids[40:], ids[:20]]


def test_samples_are_read_as_they_were_written_but_for_a_line_cut_off(tmp_path: Path) -> None:
    samples = [Sample((1, 2, 3), 1), Sample((4, 5), 0)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(map(write_sample, samples)) + '{"ids":[1')
    assert read_samples(path) == samples


@pytest.mark.parametrize("line", ["{", "{}", "[1]", '{"ids":3,"prompt_length":1}'])
def test_a_line_that_is_no_sample_is_reported_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(write_sample(Sample((1, 2), 1)) + line + "\n")
    with pytest.raises(ValueError, match=r"samples.jsonl:2: not a sample"):
        read_samples(path)


def test_padding_prompts_and_first_ids_are_not_learnt() -> None:
    rows = pad([Sample((5, 6, 7, 8), 2), Sample((9, 9), 0)])
    assert rows.ids.tolist() == [[5, 6, 7, 8], [9, 9, 0, 0]]
    assert rows.learnt.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert rows.num_learnt == 3


def test_an_epoch_visits_every_sample_once_and_batches_follow_from_the_step() -> None:
    rng = np.random.default_rng(0)
    samples = [Sample((index + 1, *rng.integers(1, 9, int(rng.integers(2, 30))).tolist()), 0) for index in range(200)]
    batches, again = Batches(samples, 5, 3), Batches(samples, 5, 3)
    visited = [int(first) for step in range(batches.per_epoch) for first in batches(step).ids[:, 0]]
    assert sorted(visited) == list(range(1, 201))
    assert torch.equal(again(57).ids, batches(57).ids)
    assert not torch.equal(batches(0).ids[:, 0], batches(batches.per_epoch).ids[:, 0])


def test_parts_are_whole_rows() -> None:
    rows = pad([Sample(tuple(range(10)), 0)] * 5, range(5))
    parts = list(rows.parts(20))
    assert [len(part.ids) for part in parts] == [2, 2, 1] and parts[1].indices == (2, 3)


def test_cut_prompts_are_whole_lines_and_repeat_with_the_seed() -> None:
    texts = ["\n".join(f"line {number} of a text" for number in range(200)) + "\n"]
    first = list(cut(texts, 20, 1, 40, 200))
    assert first == list(cut(texts, 20, 1, 40, 200)) and len(first) == 20
    assert all(piece.endswith("\n") and piece.startswith("line") for piece in first)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 10), (20, 10), (5000, 9000)])
def test_impossible_cuts_of_prompts_are_given_up(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match=f"{shortest}.* {longest}"):
        list(cut(["a = 1\nb = 2\n"], 1, 0, shortest, longest))


def test_a_users_turn_ends_where_words_begin(tokenizer: Any) -> None:
    assert tokenizer.decode(user_turn(tokenizer)) == "# user:\n"


def test_prompts_are_written_as_lines(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(30):
        (folder / f"file{number}.py").write_text("".join(f"value_{n} = {n}\n" for n in range(100)))
    out = tmp_path / "prompts.jsonl"
    main(["--cut", str(folder), "--num", "5", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 5 and all(record["prompt"].startswith("value_") for record in records)
    with pytest.raises(SystemExit, match=r"betoken.training.prompts: .*nowhere holds too few"):
        main(["--cut", str(tmp_path / "nowhere"), "--out", str(out)])


class Repeating:
    """A model that always says the same."""

    info = SimpleNamespace(eos_token_ids=(0,))


def test_a_model_that_generates_no_new_prompts_is_given_up(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(runner: Any, prompts: list[list[int]], params_of: Any, keep: Any) -> None:
        for index, prompt in enumerate(prompts):
            keep(index, Sample((*prompt, *tokenizer.encode("what is one and one?"), 0), len(prompt)))

    monkeypatch.setattr("betoken.training.prompts.generate", answer)
    invented = invent(Repeating(), tokenizer, 2, 0)  # type: ignore[arg-type]
    assert next(invented) == "what is one and one?"
    with pytest.raises(ValueError, match="nothing new after 1 of 2 prompts"):
        next(invented)
