"""Natural logarithm and exponential in float32, from +, -, * and integer operations only.

Library versions differ in the last bit between vector and scalar code, between processors, and between CPU and GPU.
These round every step as IEEE 754 says, without fused multiply-add. Every implementation, in any language and for any
number of elements, gives the same bits. Below 1 ulp off the true value in the ranges used.
"""

from __future__ import annotations

import torch

# Source: Cephes single precision logf and expf (Moshier); the polynomials are the published minimax fits.
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
LOG2_E = 1.44269504088896341
EXP_UNDERFLOW = -87.0
_SQRT_HALF_BITS = 0x3F3504F3
_ONE_BITS = 0x3F800000


def log(x: torch.Tensor) -> torch.Tensor:
    """log(x) of normal positive float32 values; same shape and dtype."""
    # x = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)).
    bits = x.view(torch.int32) + (_ONE_BITS - _SQRT_HALF_BITS)
    exponent = ((bits >> 23) - 127).to(torch.float32)
    f = ((bits & 0x007FFFFF) + _SQRT_HALF_BITS).view(torch.float32) - 1.0
    square = f * f
    y = f * LOG_COEFFICIENTS[0]
    for coefficient in LOG_COEFFICIENTS[1:-1]:
        y.add_(coefficient).mul_(f)
    y.add_(LOG_COEFFICIENTS[-1]).mul_(f).mul_(square)
    y.add_(exponent * LN2_LOW)
    y.sub_(square.mul_(0.5))
    f.add_(y)
    return f.add_(exponent.mul_(LN2_HIGH))


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) of float32 values in [-inf, 0], 0 below -87; same shape and dtype."""
    clamped = x.clamp_min(EXP_UNDERFLOW)
    n = torch.floor(clamped * LOG2_E + 0.5)
    r = clamped - n * LN2_HIGH
    r.sub_(n * LN2_LOW)
    y = r * EXP_COEFFICIENTS[0]
    for coefficient in EXP_COEFFICIENTS[1:-1]:
        y.add_(coefficient).mul_(r)
    y.add_(EXP_COEFFICIENTS[-1]).mul_(r * r).add_(r).add_(1.0)
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_UNDERFLOW, 0.0, y * power)
