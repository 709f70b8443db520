"""Vectors added to embeddings give the bits of a model with other embeddings, in any batch and kind of forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.cuda.buckets import bucket_sizes
from betoken.engine.cuda.row_invariance import RowInvariance
from betoken.engine.runner import ModelRunner
from betoken.engine.step import StepContext, added_vectors
from tests.engine.cuda.harness import PAGE_SIZE, FakeRecorder, load
from tests.engine.tiny import save_tiny

VECTOR = 0.25
TEXTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1]]


def runner_of(directory: str, compile: Any, dtype: str, **options: Any) -> ModelRunner:
    return load_runner(EngineConfig(directory, dtype=dtype, num_pages=32, compile=compile, **options))


def save_shifted(folder: Path) -> tuple[str, str]:
    """A model, and the same model with embeddings of which `VECTOR` was added to each number."""
    model, shifted = Path(save_tiny(folder / "model", "llama")), folder / "shifted"
    shifted.mkdir()
    for path in model.iterdir():
        (shifted / path.name).write_bytes(path.read_bytes())
    tensors = load_file(shifted / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + VECTOR
    save_file(tensors, shifted / "model.safetensors", {"format": "pt"})
    return str(model), str(shifted)


def segments(runner: ModelRunner, vectors: list[Tensor | None]) -> list[Segment]:
    pages = [runner.page_table.allocate(ids)[0] for ids in TEXTS]
    return [Segment(own, 0, ids, 2, added=one) for own, ids, one in zip(pages, TEXTS, vectors, strict=True)]


@pytest.mark.parametrize(
    ("mode", "dtype"), [("off", "float32"), ("on", "float32"), ("references", "float32"), ("off", "bfloat16")]
)
def test_added_vectors_have_the_bits_of_other_embeddings_in_any_batch(
    mode: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "references":
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    compile = "on" if mode == "on" else "off"
    model, shifted = save_shifted(tmp_path)
    adding = runner_of(model, compile, dtype, adds_to_embeddings=True)
    assert adding.is_compiled == (mode == "on")
    others = [runner_of(directory, compile, dtype) for directory in (model, shifted)]
    expected = [other.forward(segments(other, [None] * 3)).logits.clone().split(2) for other in others]
    vectors = [torch.full((len(ids), 64), VECTOR, dtype=adding.parts.dtype) for ids in TEXTS]
    for chosen in ([1, 1, 1], [0, 1, 0], [0, 0, 0]):
        given = [vector if choice else None for choice, vector in zip(chosen, vectors, strict=True)]
        together = adding.forward(segments(adding, given)).logits.clone().split(2)
        if dtype == "float32":  # in a half type the sum in the checkpoint is rounded twice
            wanted = [expected[choice][place] for place, choice in enumerate(chosen)]
            assert all(map(torch.equal, together, wanted))
        for one, logits in zip(segments(adding, given), together, strict=True):
            assert torch.equal(adding.forward([one]).logits, logits)
            (page_ids, _), length = adding.page_table.allocate(one.ids), len(one.ids) - 2
            first, last = (None, None) if one.added is None else one.added.split([length, 2])
            adding.forward([Segment(page_ids, 0, one.ids[:length], 0, added=first)])
            again = adding.forward([Segment(page_ids, length, one.ids[length:], 2, added=last)])
            assert torch.equal(again.logits, logits)


@torch.inference_mode()
def test_a_recorded_forward_adds_the_vectors_of_its_last_batch(tmp_path: Path) -> None:
    forward, reference, _ = load(tmp_path, "llama")
    for one in (forward, reference):
        one.step.add_to_embeddings(one._model)
    ids, vectors = [20, 21, 22], torch.randn(3, 64)

    def batch(added: Tensor | None) -> Any:
        own = [Segment([3], 0, ids, 2, added=added), Segment([7], 0, [5, 6], 1)]
        built = build_batch(own, PAGE_SIZE, 64)
        built.added = added_vectors(own)
        return built

    batches = [batch(vectors), batch(None), batch(2.0 * vectors)]
    eager = [forward(one).logits.clone() for one in batches]
    assert not torch.equal(eager[0], eager[1]) and torch.equal(eager[0][2], eager[1][2])
    recorder = FakeRecorder()
    forward.record(bucket_sizes(16), recorder, lambda fraction: None)
    for one, unrecorded in zip(batches, eager, strict=True):
        assert torch.equal(forward(one).logits, unrecorded)
        torch.testing.assert_close(unrecorded, reference(one).logits, rtol=0, atol=1e-5)
    assert len(recorder.replayed) == len(batches)


def test_row_invariance_takes_what_reads_the_step() -> None:
    step, batch = StepContext(), build_batch([Segment([0], 0, [1, 2], 1, adapter=3)], 4, 8)
    batch.added = torch.ones(2, 2)
    step.begin(batch)
    with RowInvariance():
        assert step.token_adapters(torch.zeros(2, 4)).tolist() == [3, 3]
        total = torch.ops.betoken_step.add_vectors(torch.zeros(1, 3, 2), step._number)
    assert total.tolist() == [[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]]


def test_vectors_that_cannot_be_added_are_rejected(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    adding = runner_of(directory, "off", "float32", adds_to_embeddings=True)
    narrow = segments(adding, [torch.zeros(6, 64), torch.zeros(3, 63), None])
    with pytest.raises(ValueError, match=r"segments\[1\].added: \[3, 63\]: must be \[3, 64\]"):
        adding.forward(narrow)
    with pytest.raises(ValueError, match=r"segments\[0\].added: \[5, 64\]: must be \[6, 64\]"):
        adding.forward(segments(adding, [torch.zeros(5, 64), None, None]))
    plain = runner_of(directory, "off", "float32")
    with pytest.raises(ValueError, match="EngineConfig.adds_to_embeddings"):
        plain.forward(segments(plain, [torch.zeros(6, 64), None, None]))
