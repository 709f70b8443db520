"""Our forward and the reference, batches for both, and a recorder without a device."""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM

from betoken.engine.attention import register_attention
from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.bring_up.examine import _probe
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.families.replacement import replace_mixers
from betoken.engine.features import Features
from betoken.engine.kv_pool import KvPool
from betoken.engine.reference.forward import ReferenceForward
from betoken.engine.weights.layers import replace_linears
from tests.engine.tiny import MIXTURES, save_tiny

NUM_PAGES = 24


PAGE_SIZE = 4


MAX_CONTEXT = NUM_PAGES * PAGE_SIZE


class FakeRecorder:
    """Runs the call again instead of a device's replay."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []
        """The numbers of the recordings that were replayed."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        number = self.num_recorded
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(number)
            call()

        return replay


def load(
    directory: Path, family: str, feature_layers: Sequence[int] = ()
) -> tuple[CudaForward, ReferenceForward, KvPool]:
    """Our forward, the reference's over a separate pool and model, and our pool."""
    register_attention()
    saved = save_tiny(directory, family)
    models = [
        AutoModelForCausalLM.from_pretrained(saved, dtype="float32", attn_implementation="betoken").eval()
        for _ in range(2)
    ]
    for model in models:
        replace_mixers(model)
    pools = [KvPool(_probe(model, 640)[0], NUM_PAGES + 1, PAGE_SIZE, model.dtype, model.device) for model in models]
    replace_linears(models[0], RowLinear)
    assert use_row_experts(models[0]) == (family in MIXTURES)
    forward = CudaForward(models[0], pools[0], MAX_CONTEXT, "fake", True, Features(tuple(feature_layers)))
    return forward, ReferenceForward(models[1], pools[1], NUM_PAGES, Features(tuple(feature_layers))), pools[0]


def batches() -> list[Batch]:
    """Prefill of two sequences, a draft with a decode step, a tree, a forward without logits, and the one after it."""
    first, second = [3, 1, 4, 15, 2, 9], [7, 11]
    plan = [
        [Segment(first, 0, list(range(1, 12)), 0), Segment(second, 0, [5, 6, 7], 1)],
        [Segment(first, 11, [20, 21, 22, 23], 4), Segment(second, 3, [8], 1)],
        [Segment(first, 13, [30, 31, 32, 33], 4, parents=[-1, -1, 0, 2])],
        [Segment(first, 13, [40], 0)],
        [Segment(first, 14, [41], 1)],
    ]
    return [build_batch(segments, PAGE_SIZE, 64) for segments in plan]
