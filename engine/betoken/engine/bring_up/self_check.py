"""The check at load: a ragged batch compared with the model's own eager forward, and row by row with itself.

It knows the runner's public interface and nothing of how the runner computes.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from betoken.engine.attention import ATTENTION_NAME, select_attention
from betoken.engine.batch import Segment
from betoken.engine.errors import ModelRefusedError
from betoken.engine.forward import StepOutput
from betoken.engine.runner import ModelRunner

_ATEN: Any = torch.ops.aten
_PRODUCTS = {_ATEN.addmm.default, _ATEN.linear.default, _ATEN.matmul.default, _ATEN.mm.default}
_LOG = logging.getLogger(__name__)

_LENGTHS = (19, 1, 15)
"""More than 32 rows together: if each row has one number (a gate), torch's vectors take 32 of them, scalar code what
is left. Four pages of 16 slots hold them."""
_DIGEST_ROWS = 12
"""Rows of a forward whose logits are in memory at a time."""
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Mean difference of a logit, as a part of the mean size of a logit."""
_HELD = 0.6
"""Part of a mixture's rows that must hold it in a half type: one rounding may send a token to another expert, which is
no fault (a sixth of the rows, seen with 32 random experts). Two sequences of three that are wrong are more."""


def digest_of_logits(runner: ModelRunner) -> str:
    """12 hex digits of SHA-256 over the bits of the logits after some fixed ids. They differ where arithmetic differs
    beyond all versions, as with a math library that takes other code on another processor."""
    length = min(sum(_LENGTHS), runner.info.max_context)
    ids = _sample_ids(0, length, runner.info.vocab_size)
    digest = hashlib.sha256()
    for logits in chunks(runner, ids, min(runner.max_num_batched_tokens, _DIGEST_ROWS)):
        digest.update(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def sample_sequences(vocab_size: int, max_context: int, max_rows: int) -> list[list[int]]:
    """Three sequences of distinct lengths with ids spread over the vocabulary; fewer or shorter in a small forward."""
    lengths: list[int] = []
    for length in _LENGTHS:
        shortened = max(1, min(length, max_context, length * max_rows // sum(_LENGTHS)))
        lengths.append(min(shortened, max_rows - sum(lengths)))
    return [_sample_ids(index, length, vocab_size) for index, length in enumerate(lengths) if length]


def _sample_ids(index: int, length: int, vocab_size: int) -> list[int]:
    return [(7919 * (index + 1) + 104729 * position) % vocab_size for position in range(length)]


@torch.inference_mode()
def eager_logits(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """The model's own eager logits [n, V], one sequence a forward."""
    select_attention(model, "eager")
    try:
        return [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0] for ids in sequences
        ]
    finally:
        select_attention(model, ATTENTION_NAME)


def check_against_eager(
    runner: ModelRunner,
    sequences: list[list[int]],
    expected: list[Tensor],
    is_mixture: bool,
    rounding: Sequence[float] = (),
) -> None:
    """Run the sequences together and compare each; `is_mixture`: the model sends tokens to experts.

    Args:
        rounding: mean distance of each sequence's logits that rounded activations explain: one code that is rounded
            the other way changes codes of all later layers.

    Raises:
        ModelRefusedError: a logit differs by more than its type's rounding explains.
    """
    tolerance = _TOLERANCES[getattr(torch, runner.info.dtype)]  # a model may widen its logits, which rounds no less
    pairs = zip(each_together(runner, sequences), expected, strict=True)
    compared = [(_row_distances(ours, theirs), _row_sizes(theirs)) for ours, theirs in pairs]
    more = rounding or [0.0] * len(sequences)
    may_stray = is_mixture and tolerance > _TOLERANCES[torch.float32]
    if may_stray:
        compared = [(torch.cat([rows for rows, _ in compared]), torch.cat([sizes for _, sizes in compared]))]
        more = [max(more)]
    for (rows, sizes), explained in zip(compared, more, strict=True):
        limit = tolerance * sizes.mean().item() + 1e-6 + explained
        difference = (rows.quantile(_HELD) if may_stray else rows.mean()).item()
        if not difference <= limit:
            raise ModelRefusedError(
                f"a ragged batch gives logits {difference:.3g} from the model's own eager forward on average"
                f" (limit {limit:.3g})"
            )


def distances(runner: ModelRunner, sequences: list[list[int]], expected: list[Tensor]) -> list[float]:
    """Mean distance of each sequence's logits from the expected ones."""
    pairs = zip(each_together(runner, sequences), expected, strict=True)
    return [_row_distances(ours, theirs).mean().item() for ours, theirs in pairs]


def _row_distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean distance of the logits of each row [n], one row after the other, which takes little memory."""
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([(one.float() - other.float()).abs().mean() for one, other in pairs])


def _row_sizes(logits: Tensor) -> Tensor:
    """Mean size of the logits of each row [n]."""
    return torch.stack([row.float().abs().mean() for row in logits])


def find_row_dependence(runner: ModelRunner, sequences: list[list[int]]) -> str | None:
    """A sentence about the first row whose bits, features included, depend on the rest of the forward, or None."""
    together = each_together(runner, sequences, _all_bits)
    for index, (ids, whole) in enumerate(zip(sequences, together, strict=True)):
        for chunk_rows in (1, 3, 6):
            parts = zip(torch.split(whole, chunk_rows), chunks(runner, ids, chunk_rows, _all_bits), strict=True)
            if not all([torch.equal(ours, theirs) for ours, theirs in parts]):
                return f"logits of sequence {index} change between chunks of {chunk_rows} and a batch of three"
        if not torch.equal(whole[-1:], forward_last(runner, ids, _all_bits)):
            return f"the last logits of sequence {index} change when the rows before it yield none"
    return None


def find_stock_product(runner: ModelRunner, sequences: list[list[int]]) -> str | None:
    """A sentence about a product of rows and a matrix that torch's own code makes in an eager forward, or None.

    Its rows depend on their number, which rounding may hide from the few that are compared.
    """
    products = _StockProducts()
    with products:
        forward_together(runner, sequences)
    return products.last


class _StockProducts(TorchDispatchMode):
    """Notes the products of rows and a matrix."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            rows, matrix = args[1:3] if func is _ATEN.addmm.default else args[:2]
            if matrix.dim() == 2:
                self.last = f"{func} of {tuple(rows.shape)} and {tuple(matrix.shape)} is torch's own product"
        return func(*args, **(kwargs or {}))


def logits_of(output: StepOutput) -> Tensor:
    """Logits [L, V] of a forward, a copy."""
    return output.logits.clone()


def features_of(output: StepOutput) -> Tensor:
    """Features [R, num_layers, H] of a forward, a copy."""
    assert output.features is not None, "the runner was made without features"
    return output.features.clone()


def _all_bits(output: StepOutput) -> Tensor:
    """[L, V + num_layers * H] of a forward whose rows with logits are its last."""
    if output.features is None:
        return output.logits.clone()
    features = output.features[output.features.shape[0] - output.logits.shape[0] :]
    return torch.cat([output.logits, features.flatten(1).float()], dim=1)


ReadOutput = Callable[[StepOutput], Tensor]
"""The compared part of a forward: a copy [L or R, ...]."""


def forward_together(runner: ModelRunner, sequences: list[list[int]], read: ReadOutput = logits_of) -> list[Tensor]:
    """Logits [n, V] of each sequence, or what else is to be read, all in one forward."""
    pages = [runner.page_table.allocate(ids)[0] for ids in sequences]
    try:
        segments = [Segment(page_ids, 0, ids, len(ids)) for page_ids, ids in zip(pages, sequences, strict=True)]
        return list(torch.split(read(runner.forward(segments)), [len(ids) for ids in sequences]))
    finally:
        for page_ids in pages:
            runner.page_table.release(page_ids)


def each_together(runner: ModelRunner, sequences: list[list[int]], read: ReadOutput = logits_of) -> Iterator[Tensor]:
    """Logits [n, V] of each sequence, or what else is to be read, of a forward of all of them. It comes last there and
    the others yield none, so that the logits of one sequence are in memory at a time."""
    for index in range(len(sequences)):
        order = [*sequences[:index], *sequences[index + 1 :], sequences[index]]
        pages = [runner.page_table.allocate(ids)[0] for ids in order]
        try:
            segments = [Segment(page_ids, 0, ids, 0) for page_ids, ids in zip(pages, order, strict=True)]
            segments[-1] = Segment(pages[-1], 0, order[-1], len(order[-1]))
            output = read(runner.forward(segments))
        finally:
            for page_ids in pages:
                runner.page_table.release(page_ids)
        yield output


def forward_in_chunks(runner: ModelRunner, ids: list[int], chunk_rows: int, read: ReadOutput = logits_of) -> Tensor:
    """Logits [n, V] of one sequence, or what else is to be read, alone, `chunk_rows` tokens a forward."""
    return torch.cat(list(chunks(runner, ids, chunk_rows, read)))


def chunks(runner: ModelRunner, ids: list[int], chunk_rows: int, read: ReadOutput = logits_of) -> Iterator[Tensor]:
    """The parts of `forward_in_chunks`."""
    page_ids, _ = runner.page_table.allocate(ids)
    try:
        for start in range(0, len(ids), chunk_rows):
            chunk = ids[start : start + chunk_rows]
            yield read(runner.forward([Segment(page_ids, start, chunk, len(chunk))]))
    finally:
        runner.page_table.release(page_ids)


def forward_last(runner: ModelRunner, ids: list[int], read: ReadOutput = logits_of) -> Tensor:
    """Logits [1, V] of the last token, or what else is to be read, after a prefill chunk that yields none."""
    page_ids, _ = runner.page_table.allocate(ids)
    num_first = len(ids) // 2
    try:
        if num_first:
            runner.forward([Segment(page_ids, 0, ids[:num_first], 0)])
        output = runner.forward([Segment(page_ids, num_first, ids[num_first:], 1)])
        return read(output)
    finally:
        runner.page_table.release(page_ids)
