"""SideForward against a literal computation: a block that sees itself, and keys of the target's cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from betoken.engine.attention import Scoring
from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.kv_pool import LayerShape
from betoken.engine.side.forward import SideForward, TargetKeys
from tests.engine.cuda.harness import FakeRecorder
from tests.engine.tiny import save_tiny

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 4
SCORING = Scoring(SIZE**-0.5, 0, 0.0, None)


class Attention(nn.Module):
    """One layer of attention with positions added to its queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(64, heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = torch.sin(positions[:, None, None].float() * torch.arange(1, SIZE + 1, device=positions.device))
        query, key, value = (layer(hidden).unflatten(-1, (-1, SIZE)) for layer in (self.query, self.key, self.value))
        return query + angles.to(query.dtype), key + angles.to(query.dtype), value


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = save_tiny(tmp_path_factory.mktemp("target"), "llama")
    return load_runner(EngineConfig(path, dtype="float32", num_pages=64, page_size=PAGE, compile="off"))


def literal(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention [R, Hq * D] of rows [R, Hq, D] over keys [T, H, D]; visible [R, T]."""
    key, value = (rows.repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (key, value))
    scores = torch.einsum("rhd,thd->rht", query, key) * SIZE**-0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rht,thd->rhd", weights, value).flatten(1)


def make_inputs(num_rows: int) -> tuple[Tensor]:
    return (torch.zeros(num_rows, 64),)


def side_of(target: Any, layer: Attention) -> SideForward:
    def run(hidden: Tensor, token_ids: Tensor, positions: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        query, key, value = layer.project(hidden, positions)
        return (side.attend(0, query, key, value, SCORING).flatten(1)[rows],)

    side = SideForward(run, layer, {0: LayerShape(KV_HEADS, SIZE, SIZE)}, target.parts, 8, PAGE)
    return side


@pytest.mark.parametrize("mode", ["eager", "compiled", "references", "recorded"])
def test_rows_of_a_mutual_block_see_each_other_and_no_later_block(
    target: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode in ("references", "recorded"):
        monkeypatch.setattr("betoken.engine.side.forward.load_cpu_kernels", lambda cache_dir: None)
    recorder = FakeRecorder()
    layer, hidden = Attention(), torch.randn(2, 11, 64, generator=torch.Generator().manual_seed(3))
    visible = torch.arange(11)[None, :] <= torch.tensor([0, 1, 2, 3, 4, 8, 8, 8, 8, 10, 10])[:, None]
    expected = [literal(*layer.project(rows, torch.arange(11)), visible) for rows in hidden]
    side = side_of(target, layer)
    if mode == "compiled":
        side.compile(make_inputs, tmp_path)
    if mode == "recorded":
        side.record(make_inputs, 16, 32, recorder)
    assert side.is_compiled == (mode == "compiled")
    pages, found = ([5, 1, 3], [0, 2, 4]), []
    for start, end, num_mutual in ((0, 5, 0), (5, 9, 4), (9, 11, 2)):
        ids = [0] * (end - start)
        segments = [Segment(own, start, ids, len(ids), num_mutual=num_mutual) for own in pages]
        (out,) = side(build_batch(segments, PAGE, 64), hidden[:, start:end].flatten(0, 1))
        found.append(out.clone().unflatten(0, (2, -1)))
    torch.testing.assert_close(torch.cat(found, dim=1), torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert recorder.replayed == [0, 0, 0] * (mode == "recorded")


def test_recorded_forwards_have_the_eager_bits_and_longer_batches_run_eagerly(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("betoken.engine.side.forward.load_cpu_kernels", lambda cache_dir: None)
    layer, recorder, hidden = Attention(), FakeRecorder(), torch.randn(40, 64)
    eager, recorded = side_of(target, layer), side_of(target, layer)
    recorded.record(make_inputs, 32, 16, recorder)
    segments = [Segment([5, 1, 3, 0], 0, [0] * 9, 2), Segment([2, 4], 0, [0] * 3, 1), Segment([7, 6], 0, [0] * 4, 4)]
    for batch in (build_batch(segments, PAGE, 64), build_batch([Segment([*range(8)], 0, [0] * 20, 1)], PAGE, 64)):
        (expected,), (out,) = (side(batch, hidden[: batch.num_rows]) for side in (eager, recorded))
        assert torch.equal(out, expected)
    assert recorder.replayed == [1]  # 32 rows, then 16; 20 tokens are more than were recorded


@pytest.mark.gpu
def test_a_graph_of_a_draft_layer_has_the_eager_bits(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama")
    target = load_runner(EngineConfig(path, device="cuda", num_pages=64, page_size=PAGE, compile="off"))
    eager, recorded = side_of(target, layer := Attention()), side_of(target, layer)
    hidden = torch.randn(7, 64, dtype=torch.bfloat16, device="cuda")
    recorded.record(lambda num_rows: (torch.zeros_like(hidden[:1]).repeat(num_rows, 1),), 16, 16)
    batch = build_batch([Segment([2, 4], 0, [0] * 3, 1), Segment([7, 6], 0, [0] * 4, 4)], PAGE, 64)
    (expected,), (out,) = eager(batch, hidden), recorded(batch, hidden)
    assert recorded._recorded is not None and torch.equal(out, expected)


def test_layers_that_cannot_be_recorded_run_eagerly(
    target: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("betoken.engine.side.forward.load_cpu_kernels", lambda cache_dir: None)

    class Failing:
        def record(self, call: object) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    side, hidden = side_of(target, Attention()), torch.randn(3, 64)
    side.record(make_inputs, 16, 32, Failing())
    assert "not recorded as graphs" in caplog.text and "not permitted" in caplog.text
    (out,) = side(build_batch([Segment([0], 0, [0] * 3, 3)], PAGE, 8), hidden)
    assert out.shape == (3, HEADS * SIZE)


def test_a_mutual_block_has_the_bits_of_the_same_block_alone(target: Any) -> None:
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    block = Segment([2, 5], 0, [0] * 6, 6, num_mutual=4)
    (alone,) = side_of(target, Attention())(build_batch([block], PAGE, 64), hidden)
    chain = Segment([1], 0, [0] * 3, 3)
    (together,) = side_of(target, Attention())(build_batch([chain, block], PAGE, 64), torch.cat([hidden[:3], hidden]))
    assert torch.equal(together[3:], alone)


def test_a_mutual_block_is_no_tree_and_no_longer_than_its_tokens() -> None:
    for segment in (Segment([0], 0, [1, 2], 0, num_mutual=3), Segment([0], 0, [1, 2], 0, [-1, 0], num_mutual=2)):
        with pytest.raises(ValueError, match="num_mutual"):
            build_batch([segment], PAGE, 8)


def test_layers_read_the_keys_of_the_target_and_write_none(target: Any) -> None:
    ids = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
    pages = [target.page_table.allocate(own)[0] for own in ids]
    target.forward([Segment(own, 0, text, 1) for own, text in zip(pages, ids, strict=True)])
    pool = target.parts.pool
    before = pool.keys[1].clone()
    num_heads = pool.keys[1].shape[2]
    query = torch.randn(3, 2 * num_heads, pool.keys[1].shape[3], generator=torch.Generator().manual_seed(5))

    def run(rows: Tensor, token_ids: Tensor, positions: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        return (side.attend_target(1, rows, Scoring(0.5, 0, 0.0, None))[kept],)

    side = SideForward(run, nn.Module(), {}, target.parts, 2, PAGE)
    batch = build_batch([Segment([0], 0, [8, 9], 2), Segment([1], 0, [7], 1)], PAGE, 8)
    lengths = [len(text) for text in ids]
    keys = [TargetKeys(own, length) for own, length in zip(pages, lengths, strict=True)]
    (out,) = side(batch, query, target=keys)
    for row, segment in enumerate((0, 0, 1)):
        slots = [(pages[segment][slot // PAGE], slot % PAGE) for slot in range(lengths[segment])]
        key, value = (torch.stack([cache[slot] for slot in slots]) for cache in (pool.keys[1], pool.values[1]))
        key, value = (rows.repeat_interleave(2, dim=1) for rows in (key, value))
        weights = (torch.einsum("hd,thd->ht", query[row], key) * 0.5).softmax(-1)
        torch.testing.assert_close(out[row], torch.einsum("ht,thd->hd", weights, value), rtol=1e-4, atol=1e-5)
    assert torch.equal(pool.keys[1], before)
