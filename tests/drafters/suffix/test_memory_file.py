"""The file of a memory: what is written is read again, and no other file is overwritten or trusted."""

import logging
import random

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.suffix.memory import SuffixMemory
from betoken.drafters.suffix.memory_file import MemoryFile
from betoken.drafters.suffix.text_store import TextStore

RNG = random.Random(6)
TEXTS = {owner: [[RNG.randrange(5000) for _ in range(40 * n)] for n in range(1, 9)] for owner in (b"a", b"\x00b")}


def memory_at(path, tokenizer_hash="t", **options):
    return SuffixMemory(1 << 20, file=MemoryFile(path, tokenizer_hash), **options)


def filled(path, **options):
    memory = memory_at(path, **options)
    for owner, texts in TEXTS.items():
        for text in texts:
            memory.remember(owner, text, 0)
    memory.write()
    return memory


def held(memory):
    return {owner: [ids.tolist() for ids in memory.store.documents(owner)] for owner in memory.store.owners}


def test_a_memory_survives_a_restart(tmp_path):
    path = tmp_path / "new folder" / "memory"
    first = filled(path)
    again = memory_at(path)
    assert held(again) == held(first) == TEXTS and again.counts.num_documents == 16
    again.store.check_integrity()
    assert again.find(b"a", TEXTS[b"a"][3][:20], 4) == first.find(b"a", TEXTS[b"a"][3][:20], 4) is not None
    assert path.stat().st_mode & 0o077 == 0, "prompts are in it"
    assert [each.name for each in path.parent.iterdir()] == ["memory"]


def damaged(data):
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return {
        "a bit": bytes(flipped),
        "its end": data[:-9],
        "its header": data[:24] + b"\n",
        "its version": data.replace(b"memory 1", b"memory 2", 1),
    }


@pytest.mark.parametrize("what", ["a bit", "its end", "its header", "its version"])
def test_a_damaged_file_is_one_warning_and_an_empty_memory(tmp_path, caplog, what):
    path = tmp_path / "memory"
    filled(path)
    path.write_bytes(damaged(path.read_bytes())[what])
    with caplog.at_level(logging.WARNING):
        memory = memory_at(path)
    assert held(memory) == {} and len(caplog.records) == 1 and str(path) in caplog.text
    memory.remember(b"a", TEXTS[b"a"][0], 0)
    memory.write()
    assert held(memory_at(path)) == {b"a": TEXTS[b"a"][:1]}


def test_texts_of_another_tokenizer_are_not_used(tmp_path, caplog):
    filled(tmp_path / "memory")
    assert held(memory_at(tmp_path / "memory", tokenizer_hash="u")) == {}
    assert "another tokenizer" in caplog.text


def test_a_file_that_is_not_a_memory_is_rejected_and_kept(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(FailedPreconditionError, match=r"--suffix-memory: file = .*thesis.txt: is not a memory"):
        memory_at(path)
    assert path.read_text() == "years of work"


def test_a_suffix_file_that_cannot_be_written_is_rejected_at_start(tmp_path):
    with pytest.raises(FailedPreconditionError, match=r"--suffix-memory: file = .*: Is a directory"):
        memory_at(tmp_path)


def test_a_smaller_memory_reads_the_newest_texts_and_tenants_stay_apart(tmp_path):
    path = tmp_path / "memory"
    store, memory = TextStore(4096), filled(path)
    for owner, text in MemoryFile(path, "t").read():
        store.add(owner, text)
    store.check_integrity()
    assert memory.find(b"a", TEXTS[b"\x00b"][5][:20], 4) is None
    assert [ids.tolist() for ids in store.documents(b"a")][-1] == TEXTS[b"a"][-1]


def test_texts_kept_by_tenant_are_shared_or_not_as_the_next_start_says(tmp_path):
    path = tmp_path / "memory"
    filled(path)
    shared = memory_at(path, shares_tenants=True)
    assert shared.find(b"new", TEXTS[b"a"][3][:20], 4) is not None
    shared.write()
    apart = memory_at(path)
    assert apart.find(b"new", TEXTS[b"a"][3][:20], 4) is None and apart.counts.num_documents == 0
