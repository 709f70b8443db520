"""A table measured in pieces: what was kept comes back as it was, and never mixes with another run's."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made_up_runs import made_up_run  # noqa: E402

from betoken.bench.drafters_store import DraftersStore, LeftOut, Task  # noqa: E402
from betoken.bench.identity_check import IdentityCount  # noqa: E402

MANIFEST = {"dtype": "bfloat16", "drafters": ["ngram"]}
SPEEDS = {"none": 100.0, "ngram": 150.0, "transformers_generate": 50.0}


def open_store(folder: Path, **prompts: str) -> DraftersStore:
    return DraftersStore.open_for(folder, MANIFEST, prompts or {"file.jsonl": "f1"})


def test_finished_prompts_are_found_again_as_they_were(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    difference = IdentityCount(compared=2, identical=1, differences=["ngram: prompt 7: differs"])
    runs = [made_up_run(3, SPEEDS), made_up_run(7, SPEEDS, repeat=1, identity=difference)]
    for run in runs:
        store.append(run)
    again = DraftersStore.open(tmp_path)
    assert list(again.done.values()) == runs
    assert again.manifest == MANIFEST
    assert Task("file.jsonl", 7, 1) in open_store(tmp_path).done


def test_a_prompt_cut_off_by_an_interruption_is_measured_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(made_up_run(0, SPEEDS))
    text = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(text + text[:50])
    store = open_store(tmp_path)
    assert list(store.done) == [Task("file.jsonl", 0, 0)]
    store.append(made_up_run(1, SPEEDS))
    assert len(open_store(tmp_path).done) == 2


def test_another_file_may_be_added_but_none_may_change(tmp_path: Path) -> None:
    open_store(tmp_path)
    open_store(tmp_path, **{"file.jsonl": "f1", "other.jsonl": "f2"})
    with pytest.raises(ValueError, match=r"fingerprint of other\.jsonl 'f2', this run has 'f3'"):
        open_store(tmp_path, **{"other.jsonl": "f3"})
    with pytest.raises(ValueError, match="dtype 'bfloat16', this run has 'float32'"):
        DraftersStore.open_for(tmp_path, MANIFEST | {"dtype": "float32"}, {})


def test_machine_data_of_a_measurement_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert (store.num_threads, store.left_out, store.sessions) == ({}, [], [])
    store.save_num_threads({"plain": 2})
    store.save_left_out([LeftOut("file.jsonl", "rag", 3), LeftOut("file.jsonl", "qa", 0)])
    store.save_left_out([LeftOut("other.jsonl", "code", 1)])
    store.save_left_out([LeftOut("file.jsonl", "rag", 4)])
    store.begin_session({"cores": 2}, {"commit": "abc"})
    again = DraftersStore.open(tmp_path)
    assert again.num_threads == {"plain": 2}
    assert set(again.left_out) == {LeftOut("other.jsonl", "code", 1), LeftOut("file.jsonl", "rag", 4)}
    assert again.sessions == [{"hardware": {"cores": 2}, "versions": {"commit": "abc"}}]


def test_a_folder_without_measurements_or_with_other_records_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no measurements"):
        DraftersStore.open(tmp_path)
    open_store(tmp_path)
    (tmp_path / "runs.jsonl").write_text('{"task": {"prompts": "a", "index": 0}}\n')
    with pytest.raises(ValueError, match="another version"):
        DraftersStore.open(tmp_path)
