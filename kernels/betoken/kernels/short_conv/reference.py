"""Reference of the short convolution in torch: one term after another, for all rows at once."""

import torch
from torch import Tensor

from betoken.kernels.rows import PagedRows


def short_conv_reference(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: PagedRows) -> Tensor:
    """See `betoken.kernels.short_conv.short_conv`."""
    page_size = inputs.shape[1]
    first_pages = rows.page_starts[rows.row_segments.long()]
    total = torch.zeros(len(rows.positions), inputs.shape[2], dtype=torch.float32, device=inputs.device)
    for distance in range(len(weight) - 1, -1, -1):
        positions = rows.positions - distance
        slots = rows.slots_at(positions.clamp_min(0))
        pages = rows.page_ids[(first_pages + slots // page_size).long()].long()
        seen = inputs[pages, (slots % page_size).long()].float()
        seen = seen.masked_fill((positions < 0)[:, None], 0.0)
        total = total + seen * weight[len(weight) - 1 - distance].float()
    if bias is not None:
        total = total + bias.float()
    return total.to(inputs.dtype)
