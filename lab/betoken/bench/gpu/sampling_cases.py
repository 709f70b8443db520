"""Cases of the ops over logits and ids: logits_adjust, sample; and who the field would use.

Logits are peaked as a language model's are: normal with deviation 2, and 20 random ids a row at 16, 15.5, ... 6.5.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from betoken.bench.gpu.case import Arguments, Case, Side, lazily_compiled, reference_sides
from betoken.kernels.logits_adjust import logits_adjust
from betoken.kernels.logits_adjust import reference as adjust_reference
from betoken.kernels.sample import reference, sample

VOCAB_SIZE = 128256
TEMPERATURE = 0.8
_NUM_PEAKS = 20


def peaked_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R, V], as the module says."""
    logits = torch.randn(num_rows, vocab_size, device=device) * 2
    num_peaks = min(_NUM_PEAKS, vocab_size)
    peaks = torch.rand(num_rows, vocab_size, device=device).topk(num_peaks).indices
    heights = 16 - torch.arange(num_peaks, device=device) / 2
    return logits.scatter_(1, peaks, heights.expand(num_rows, -1)).to(dtype)


def sampling_cases(
    device: torch.device, vocab_size: int = VOCAB_SIZE, row_counts: Sequence[int] = (6, 192)
) -> Iterator[Case]:
    """Every case of this file."""
    for num_rows in row_counts:
        yield _sample_case(device, num_rows, vocab_size, top_k=0, top_p=0.95)
        yield _sample_case(device, num_rows, vocab_size, top_k=50, top_p=1.0)
        yield _sample_case(device, num_rows, vocab_size, top_k=0, top_p=1.0)
    yield _adjust_case(device, num_rows=row_counts[-1], vocab_size=vocab_size, entries_per_row=512)


def _sample_case(device: torch.device, num_rows: int, vocab_size: int, top_k: int, top_p: float) -> Case:
    def fresh() -> Arguments:
        logits = peaked_logits(num_rows, vocab_size, torch.bfloat16, device)
        seeds = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
        positions = torch.randint(0, 8192, (num_rows,), device=device)
        numbers = ((TEMPERATURE, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (0.0, torch.float32))
        columns = [torch.full((num_rows,), value, dtype=dtype, device=device) for value, dtype in numbers]
        return (logits, seeds, positions, *columns)

    others = [
        Side("torch eager", _eager_sample, is_recordable=False),
        Side("compiled reference", lazily_compiled(reference.sample), is_recordable=False),
    ]
    if find_spec("flashinfer") is not None:
        others.append(Side("flashinfer", _flashinfer_sample(vocab_size)))
    return Case(
        op="sample",
        shape=f"R={num_rows} V={vocab_size} bfloat16 T={TEMPERATURE} top_k={top_k} top_p={top_p}",
        num_bytes=num_rows * (vocab_size * 2 + 8),
        fresh=fresh,
        run=lambda *arguments: (sample(*arguments),),
        others=others,
    )


def _eager_sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The textbook: sort, cumulate, mask, draw. Uses independent noise."""
    probabilities, ids = torch.softmax(logits.float() / temperature[:, None], dim=1).sort(dim=1, descending=True)
    above = probabilities.cumsum(dim=1) - probabilities
    ranks = torch.arange(logits.shape[1], device=logits.device)
    is_dropped = (above >= top_p[:, None]) | ((ranks >= top_k[:, None]) & (top_k[:, None] > 0))
    drawn = torch.multinomial(probabilities.masked_fill(is_dropped, 0.0), 1)
    return ids.gather(1, drawn)


def _flashinfer_sample(vocab_size: int) -> Callable[..., Any]:
    def call(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, *filters: Tensor) -> Any:
        sampling = import_module("flashinfer.sampling")
        scaled = logits.float() / temperature[:, None]
        top_k = torch.where(filters[0] > 0, filters[0], vocab_size)
        return sampling.top_k_top_p_sampling_from_logits(scaled, top_k, filters[1])

    return call


def _adjust_case(device: torch.device, num_rows: int, vocab_size: int, entries_per_row: int) -> Case:
    num_entries = num_rows * entries_per_row

    def fresh() -> Arguments:
        logits = torch.randn(num_rows, vocab_size, device=device)
        offsets = torch.arange(0, num_entries + 1, entries_per_row, device=device)
        ids = torch.rand(num_rows, vocab_size, device=device).topk(entries_per_row).indices.sort().values.flatten()
        bias, scale, penalty = (torch.rand(num_entries, device=device) + shift for shift in (-0.5, 0.7, 0.0))
        return (logits, offsets, ids, bias, scale, penalty)

    def run(
        logits: Tensor, offsets: Tensor, ids: Tensor, bias: Tensor, scale: Tensor, penalty: Tensor
    ) -> tuple[Tensor]:
        logits_adjust(logits, offsets, ids, bias, scale, penalty)
        return (logits,)

    return Case(
        op="logits_adjust",
        shape=f"R={num_rows} V={vocab_size} {entries_per_row} entries a row",
        num_bytes=num_entries * (8 + 3 * 4 + 2 * 4),
        fresh=fresh,
        run=run,
        others=reference_sides(run, _reference_adjust),
    )


def _reference_adjust(
    logits: Tensor, offsets: Tensor, ids: Tensor, bias: Tensor, scale: Tensor, penalty: Tensor
) -> None:
    adjust_reference.logits_adjust(logits, offsets, ids, bias, scale, penalty, None)
