"""DFlash 2's convolution over the tokens of a block: each channel mixes a token with the ones before it.

A tap is the sum of a trained constant per channel and a dynamic part per group of channels, projected from the token.
Source: z-lab's DFlash 2; written from its definition.
"""

import torch
from torch import Tensor, nn

from betoken.drafters.dflash.shape import BlockShape


class GroupedConvolution(nn.Module):
    """Two sides, one before and one after a sublayer, whose taps come from one projection."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self._num_taps, self._group_size = shape.conv_kernel_size, shape.conv_group_size
        num_groups = shape.hidden_size // shape.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self._num_taps, shape.hidden_size))
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * self._num_taps * num_groups, bias=False)

    def taps(self, x: Tensor) -> Tensor:
        """Dynamic parts [L, 2, K, G] for the sublayer's input [L, H]."""
        dynamic: Tensor = self.kernel_projection(x)
        return dynamic.view(x.shape[0], 2, self._num_taps, -1)

    def apply_side(self, side: int, x: Tensor, taps: Tensor, offsets: Tensor) -> Tensor:
        """[L, H] -> [L, H]. `offsets`: [L] index of each token in its block, whose first tokens see zeros before."""
        index = torch.arange(x.shape[0], device=x.device)
        size = (x.shape[0], -1, self._group_size)
        out = torch.zeros_like(x).view(size)
        for tap in range(self._num_taps):
            earlier = x.index_select(0, (index - tap).clamp_min(0)) if tap else x
            earlier = torch.where(offsets[:, None] >= tap, earlier, 0.0).view(size)
            constant = self.base_kernel[side, tap].view(-1, self._group_size)
            out = out + constant * earlier + taps[:, side, tap, :, None] * earlier
        return out.flatten(-2)
