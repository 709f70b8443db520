"""Reference of the convolution over rings in torch: one row and one term after another."""

import torch
from torch import Tensor

from betoken.kernels.state_rows import HostRows, StateRows


def state_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: StateRows) -> Tensor:
    """See `betoken.kernels.state_conv.state_conv`."""
    host, num_taps = HostRows(rows), len(weight)
    out = torch.empty_like(x)
    for row, (position, segment) in enumerate(zip(host.positions, host.row_segments, strict=True)):
        total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        for tap in range(num_taps):
            before = position - (num_taps - 1) + tap
            if before < 0:
                continue
            slot = host.slot_at(row, before)
            own = host.row_at(segment, slot)
            seen = x[own] if own is not None else ring[host.states[segment], slot % ring.shape[1]]
            total = total + seen.float() * weight[tap].float()
        out[row] = (total if bias is None else total + bias.float()).to(x.dtype)
    for segment, state in enumerate(host.states):
        begin, end = host.row_starts[segment], host.row_starts[segment + 1]
        for row in range(max(begin, end - ring.shape[1]), end):
            ring[state, (host.first_slots[segment] + row - begin) % ring.shape[1]] = x[row]
    return out
