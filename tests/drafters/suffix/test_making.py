"""A draft worker's memory: its options, its file at the end of the service, and the operator's corpus."""

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.suffix.settings import MemoryOptions
from betoken.rpc.early_end import undone_at_end
from tests.drafters.suffix.bench import ANSWER, PROMPT, drafted, num_rounds, opened


def drafter_of(memory):
    settings = DraftWorkerSettings(drafters=("suffix",), suffix_memory=memory)
    return load_drafters(settings, lambda *_: None).drafters["suffix"]


def test_a_suffix_file_is_written_when_the_service_ends_and_read_by_the_next(tmp_path):
    with undone_at_end():
        first = num_rounds(drafter_of(f"file={tmp_path / 'memory'}"))
    again = drafter_of(f"file={tmp_path / 'memory'}")
    assert num_rounds(again, tenant=b"b") == first and num_rounds(again) < first / 5


def test_options_of_a_worker_set_the_memory_of_suffix(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f"{PROMPT + ANSWER}\n")
    drafter = drafter_of(f"corpus={corpus} shared_tenants=1 max_bytes=2000000")
    assert drafted(drafter, opened(drafter, tenant=b"")).draft_ids == ANSWER[:8]
    num_rounds(drafter, prompt_ids=[1, 2, 3, 4], answer=[5, 6, 7])
    assert drafted(drafter, opened(drafter, prompt_ids=[2, 3, 4], tenant=b"new")).draft_ids == [5, 6, 7]
    assert not drafted(drafter, opened(drafter, prompt_ids=[9, 4], tenant=b"new")).draft_ids


def test_text_of_a_corpus_needs_a_tokenizer_on_a_draft_worker_without_a_model(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(FailedPreconditionError, match="--suffix-memory: corpus = .*: text needs a tokenizer"):
        drafter_of(f"corpus={tmp_path / 'a.txt'}")


@pytest.mark.parametrize(
    ("memory", "fault"),
    [
        ("max_bytes=9", "max_bytes = 9: must be an integer from 1048576"),
        ("max_bytes=1e9", "max_bytes = 1e9"),
        ("shared_tenants=yes", "shared_tenants = yes: must be 0 or 1"),
        ("file=a file=b", "'file=b': must be NAME=VALUE, each name once, of max_bytes, shared_tenants, file, corpus"),
        ("size=1", "'size=1': must be NAME=VALUE"),
        ("corpus=", "'corpus=': must be NAME=VALUE"),
        ("file='a", "No closing quotation"),
    ],
)
def test_a_bad_suffix_memory_is_rejected_by_name_at_start(memory, fault):
    with pytest.raises(ValueError, match=fault) as raised:
        DraftWorkerSettings(drafters=("suffix",), suffix_memory=memory)
    assert "suffix_memory" in str(raised.value)


def test_paths_of_a_suffix_memory_may_be_quoted():
    options = MemoryOptions.parse("file='/a b/c' corpus=x.txt,y.jsonl")
    assert str(options.file) == "/a b/c" and options.corpus == ("x.txt", "y.jsonl") and not options.shared_tenants
