"""Batches through buckets, with recordings that run their call again: the device is not needed for what is tested."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.attention import register_attention
from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.examine import _probe
from betoken.engine.cuda.buckets import bucket_sizes
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.kv_pool import KvPool
from betoken.engine.weights.layers import replace_linears
from tests.engine.cuda.harness import MAX_CONTEXT, NUM_PAGES, PAGE_SIZE, FakeRecorder, batches, load
from tests.engine.tiny import CONFIGS, save_tiny


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_buckets_give_the_reference_logits_and_the_eager_bits(family: str, tmp_path: Path) -> None:
    forward, reference, pool = load(tmp_path, family)
    expected = [reference(batch).logits.clone() for batch in batches()]
    eager = [forward(batch).logits.clone() for batch in batches()]
    recorder, reported = FakeRecorder(), []
    for cache in (*pool.keys.values(), *pool.values.values()):
        cache[:-1].fill_(1e4)  # what is not written anew shows
    forward.record(bucket_sizes(40), recorder, reported.append)
    assert reported == [0, 1 / 3, 2 / 3]
    recorded = [forward(batch).logits.clone() for batch in batches()]
    assert len(recorder.replayed) == len(recorded)
    for ours, unrecorded, theirs in zip(recorded, eager, expected, strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours, unrecorded)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_recorded_features_have_the_eager_bits_and_change_no_logit(family: str, tmp_path: Path) -> None:
    plain, _, _ = load(tmp_path, family)
    expected = [plain(batch).logits.clone() for batch in batches()]
    forward, reference, _ = load(tmp_path, family, (0, 1, 2))
    theirs = [reference(batch).features for batch in batches()]
    eager = [forward(batch).features for batch in batches()]
    forward.record(bucket_sizes(40), FakeRecorder(), lambda fraction: None)
    for batch, unrecorded, theirs_of, logits in zip(batches(), eager, theirs, expected, strict=True):
        output = forward(batch)
        assert output.features is not None and unrecorded is not None and theirs_of is not None
        assert output.features.shape == (batch.num_rows, 3, 64)
        assert torch.equal(output.features, unrecorded) and torch.equal(output.logits, logits)
        torch.testing.assert_close(output.features, theirs_of, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.inference_mode()
def test_recorded_logits_of_a_half_type_are_sums_and_not_rounded(family: str, only_last: bool, tmp_path: Path) -> None:
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        save_tiny(tmp_path, family), dtype="bfloat16", attn_implementation="betoken"
    ).eval()
    pool = KvPool(_probe(model, 640)[0], NUM_PAGES + 1, PAGE_SIZE, model.dtype, model.device)
    replace_linears(model, RowLinear, only_last=only_last)
    assert isinstance(model.get_output_embeddings(), RowLinear)
    forward = CudaForward(model, pool, MAX_CONTEXT, "fake", is_row_invariant=not only_last)
    forward.record([16], FakeRecorder(), lambda fraction: None)
    logits = forward(batches()[1]).logits
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())


@torch.inference_mode()
def test_a_batch_beyond_the_largest_bucket_runs_eagerly(tmp_path: Path) -> None:
    forward, reference, _ = load(tmp_path, "llama")
    recorder = FakeRecorder()
    forward.record([16], recorder, lambda fraction: None)
    batch = build_batch([Segment(list(range(10)), 0, list(range(1, 18)), 2)], PAGE_SIZE, 64)
    torch.testing.assert_close(forward(batch).logits, reference(batch).logits, rtol=0, atol=1e-5)
    assert recorder.replayed == []
    forward(build_batch([Segment([0], 0, [1], 1)], PAGE_SIZE, 64))
    assert recorder.replayed == [0]


@torch.inference_mode()
def test_sequences_that_share_a_long_prompts_pages_have_a_recording(tmp_path: Path) -> None:
    forward, reference, _ = load(tmp_path, "llama")
    recorder = FakeRecorder()
    forward.record([16], recorder, lambda fraction: None)
    pages = list(range(NUM_PAGES))  # of which the pool has hardly more: sixteen times as many ids
    batch = build_batch([Segment(pages, MAX_CONTEXT - 1, [7], 1)] * 16, PAGE_SIZE, 64)
    torch.testing.assert_close(forward(batch).logits, reference(batch).logits, rtol=0, atol=1e-5)
    assert recorder.replayed == [0]


@torch.inference_mode()
def test_the_longest_sequence_chooses_among_the_recordings_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("betoken.engine.cuda.buckets._FIRST_LENGTH", 8)
    forward, reference, _ = load(tmp_path, "llama")
    assert list(forward.lengths) == [8, 32, MAX_CONTEXT]
    recorder = FakeRecorder()
    forward.record([16, 32], recorder, lambda fraction: None)  # 0, 1, 2: 32 rows at 96, 32, 8; then 16 rows
    pages = list(range(NUM_PAGES))
    for start, num_rows, expected in ((0, 8, 5), (8, 1, 4), (9, 23, 1), (32, 15, 3), (47, 17, 0)):
        batch = build_batch([Segment(pages, start, [7] * num_rows, 1)], PAGE_SIZE, 64)
        torch.testing.assert_close(forward(batch).logits, reference(batch).logits, rtol=0, atol=1e-5)
        assert recorder.replayed.pop() == expected


@torch.inference_mode()
def test_another_pool_forgets_the_recordings(tmp_path: Path) -> None:
    forward, _, pool = load(tmp_path, "llama")
    recorder = FakeRecorder()
    forward.record([16], recorder, lambda fraction: None)
    forward.use_pool(pool)
    forward(build_batch([Segment([0], 0, [1], 1)], PAGE_SIZE, 64))
    assert recorder.replayed == []
