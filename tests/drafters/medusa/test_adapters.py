"""Adapters: only from their folder, read beside the thread that drafts, the least recently used dropped."""

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.medusa import adapters
from betoken.drafters.medusa.adapters import Adapter, AdapterStore
from betoken.drafters.medusa.drafter import MedusaDrafter
from betoken.drafters.medusa.module import MedusaHeads
from betoken.engine.runner import ModelRunner
from tests.drafters.medusa.bench import HIDDEN, VOCAB, Bench
from tests.drafters.medusa.files import RandomHeads

FIELD = "drafter.settings.adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters a, b, c, and d of other shapes: more heads, LoRAX's layout."""
    for seed, name in enumerate("abc"):
        RandomHeads(HIDDEN, VOCAB, seed=seed).save(tmp_path / "adapters" / name, "v1")
    RandomHeads(HIDDEN, VOCAB, num_heads=4, seed=9).save(tmp_path / "adapters" / "d", "lorax")
    RandomHeads(HIDDEN, VOCAB).save(tmp_path / "outside", "v1")
    return tmp_path / "adapters"


class SlowReading:
    """Holds all reading up until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.threads: list[str] = []
        make = MedusaHeads

        def slow(*given: object) -> MedusaHeads:
            self.threads.append(threading.current_thread().name)
            assert self.may_go.wait(30)
            return make(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(adapters, "MedusaHeads", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowReading]:
    reading = SlowReading(monkeypatch)
    yield reading
    reading.may_go.set()


def settle(store: AdapterStore, *wanted: Adapter) -> None:
    """Until these are in memory."""
    end = time.monotonic() + 30
    while any(adapter.heads is None for adapter in wanted):
        assert time.monotonic() < end
        store.look_after()
        store.check_integrity()
        time.sleep(0.001)


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "", "a/../b", "/etc", "a/", "a\\b", "a\0", "~", "x" * 129, "é", "-", "a b"]
)
def test_adapter_ids_outside_the_folder_are_rejected(name: str, folder: Path, target: ModelRunner) -> None:
    store = AdapterStore(folder, target, 2)
    with pytest.raises(InvalidArgumentError, match=rf"^{re.escape(FIELD)} = .*: must be 1 to 128 letters"):
        store.acquire(name)


def test_unknown_and_incompatible_adapters_are_rejected_by_name(folder: Path, target: ModelRunner) -> None:
    store = AdapterStore(folder, target, 2)
    (folder / "file").write_text("")
    os.mkfifo(folder / "pipe")
    for name in ("unknown", "file", "pipe"):
        with pytest.raises(InvalidArgumentError, match=f"{FIELD} = {name}: must be one in the worker's --adapter-dir"):
            store.acquire(name)
    RandomHeads(HIDDEN, VOCAB).save(folder / "foreign", "v1", base="mistral-7b")
    with pytest.raises(InvalidArgumentError, match=f"{FIELD} = foreign: must fit the target, but base_model_name"):
        store.acquire("foreign")
    RandomHeads(HIDDEN * 2, VOCAB).save(folder / "wide", "v1")
    with pytest.raises(InvalidArgumentError, match=f"{FIELD} = wide: must fit the target, but 0.0.linear"):
        store.acquire("wide")
    os.mkfifo(folder / "a" / "model.safetensors")
    (folder / "b" / "config.json").unlink()
    os.mkfifo(folder / "b" / "config.json")
    store.acquire("a")
    with pytest.raises(InvalidArgumentError, match="config.json is not a regular file"):
        store.acquire("b")
    with pytest.raises(InvalidArgumentError, match="must be absent, as this worker has no --adapter-dir"):
        AdapterStore(None, target, 2).acquire("a")


def test_other_sequences_draft_while_an_adapter_is_loaded(folder: Path, target: ModelRunner, slow: SlowReading) -> None:
    store = AdapterStore(folder, target, 2)
    layout = Adapter("", adapters.describe(folder / "c", target)).layout
    own = Adapter("", layout, MedusaHeads(layout, target.parts))
    bench = Bench(MedusaDrafter(own, store, VOCAB))
    waiting, other = bench.open(1, settings={"adapter": "a"}), bench.open(2)
    bench.send([waiting, other])
    first, second = bench.draft((waiting, 6), (other, 6))
    assert first.draft_ids == [] and second.draft_ids
    assert all(name.startswith("medusa-adapters") for name in slow.threads)
    slow.may_go.set()
    adapter = bench.drafter._sequences[waiting].adapter
    assert adapter is not None
    settle(store, adapter)
    assert bench.draft((waiting, 6))[0].draft_ids
    bench.drafter.check_integrity()


def test_tokens_that_depend_on_drafts_wait_for_the_adapter(
    folder: Path, target: ModelRunner, slow: SlowReading
) -> None:
    bench = Bench(MedusaDrafter(None, AdapterStore(folder, target, 2), VOCAB))
    sequence = bench.open(1, draft_affects_output=True, settings={"adapter": "a"})
    bench.send([sequence])
    bench.drafter.request(sequence, 6)
    for _ in range(5):
        assert bench.drafter.step() == [] and bench.drafter.has_work
    slow.may_go.set()
    end = time.monotonic() + 30
    answers = bench.drafter.step()
    while not answers:
        assert time.monotonic() < end
        answers = bench.drafter.step()
    assert answers[0].draft_ids


def test_the_least_recently_used_adapter_is_evicted_and_loaded_again(folder: Path, target: ModelRunner) -> None:
    store = AdapterStore(folder, target, 2)
    a, b = store.acquire("a"), store.acquire("b")
    settle(store, a, b)
    c = store.acquire("c")
    assert not store.is_coming(c), "both are in use"
    store.release(a)
    settle(store, c)
    assert store.names_in_memory == ["b", "c"]
    store.release(b)
    again = store.acquire("b")
    assert again is b, "still in memory"
    store.release(c)
    store.release(again)
    d = store.acquire("d")
    settle(store, d)
    assert store.names_in_memory == ["b", "d"], "c was left before b"
    a = store.acquire("a")
    settle(store, a)
    assert store.names_in_memory == ["d", "a"]
    store.release(d)
    store.release(a)
    store.check_integrity()


def test_adapters_of_several_shapes_draft_in_one_step(folder: Path, target: ModelRunner) -> None:
    store = AdapterStore(folder, target, 4)
    bench = Bench(MedusaDrafter(None, store, VOCAB))
    sequences = [bench.open(n, settings={"adapter": name}) for n, name in enumerate("abda")]
    plain = bench.open(9)
    settle(store, *(entry.adapter for entry in bench.drafter._sequences.values() if entry.adapter is not None))
    bench.send([*sequences, plain])
    together = bench.draft(*((sequence, 9) for sequence in (*sequences, plain)))
    assert together[-1].draft_ids == [], "without heads of its own"
    for sequence, one in zip(sequences, together, strict=False):
        (alone,) = bench.draft((sequence, 9))
        assert one.draft_ids and (alone.draft_ids, alone.parents) == (one.draft_ids, one.parents)
        bench.drafter.close(sequence)
    assert all(adapter.num_users == 0 for adapter in store._known.values())
    bench.drafter.check_integrity()


def test_an_adapter_file_truncated_during_its_load_costs_its_own_drafts(folder: Path, target: ModelRunner) -> None:
    store = AdapterStore(folder, target, 2)
    bench = Bench(MedusaDrafter(None, store, VOCAB))
    good = bench.open(1, settings={"adapter": "b"})
    settle(store, *store._known.values())
    file = folder / "a" / "medusa_lm_head.safetensors"
    content = file.read_bytes()
    describe = adapters.describe(folder / "a", target)
    file.write_bytes(content[: len(content) // 2])
    store._known["a"] = Adapter("a", describe)
    bad = bench.open(2, settings={"adapter": "a"})
    end = time.monotonic() + 30
    while not store._known["a"].is_broken:
        assert time.monotonic() < end
        store.look_after()
    bench.send([good, bad])
    first, second = bench.draft((good, 6), (bad, 6))
    assert first.draft_ids and second.draft_ids == []
    file.write_bytes(content)
    mended = bench.open(3, settings={"adapter": "a"})
    settle(store, store._known["a"])
    bench.send([mended])
    assert bench.draft((mended, 6))[0].draft_ids, "a new sequence reads it anew"
    for sequence in (good, bad, mended):
        bench.drafter.close(sequence)
