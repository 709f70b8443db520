"""The logarithm, the exponential and the noise of the torch references as Triton functions, with the same bits.

They hold only if the compiler fuses nothing: kernels that call them are launched with `EXACT`.
"""

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
"""Launch options without which a multiplication and an addition may round once instead of twice."""


@triton.jit
def log_f32(x):
    """`float_math.log`."""
    shifted = x.to(tl.int32, bitcast=True) + 0x004AFB0D
    exponent = ((shifted >> 23) - 127).to(tl.float32)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    square = f * f
    y = f * 7.0376836292e-2
    y = (y + -1.1514610310e-1) * f
    y = (y + 1.1676998740e-1) * f
    y = (y + -1.2420140846e-1) * f
    y = (y + 1.4249322787e-1) * f
    y = (y + -1.6668057665e-1) * f
    y = (y + 2.0000714765e-1) * f
    y = (y + -2.4999993993e-1) * f
    y = (y + 3.3333331174e-1) * f * square
    y = y + exponent * -2.12194440e-4
    y = y - square * 0.5
    return (f + y) + exponent * 0.693359375


@triton.jit
def exp_f32(x):
    """`float_math.exp`: x <= 0."""
    clamped = tl.maximum(x, -87.0)
    n = tl.floor(clamped * 1.44269504088896341 + 0.5)
    r = clamped - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = r * 1.9875691500e-4
    y = (y + 1.3981999507e-3) * r
    y = (y + 8.3334519073e-3) * r
    y = (y + 4.1665795894e-2) * r
    y = (y + 1.6666665459e-1) * r
    y = (y + 5.0000001201e-1) * (r * r) + r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, y * power)


@triton.jit
def gumbel_f32(word):
    """`noise.to_gumbel` of uint32 words."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33
    small = ((tl.div_rn(u, tl.full(u.shape, 3.0, tl.float32)) + 0.5) * u + 1.0) * u
    large = -log_f32(1.0 - tl.minimum(u, 0.99999994039535522))  # 1 - 2^-24
    return -log_f32(tl.where(u < 0.0078125, small, large))


@triton.jit
def noise_words(seed, position, stream, call):
    """Four uint32 words per call of Philox 4x32-10; word w of call c belongs to `token_id(c, w)`."""
    c0 = call.to(tl.uint32)
    zero = c0 * 0
    return tl.philox(seed, c0, zero + position.to(tl.uint32), zero + stream, zero)


@triton.jit
def token_id(call, word):
    """The vocabulary id that takes a word of a call: calls c and c + 1 of 256 adjacent ones stand for adjacent ids."""
    return call // 256 * 1024 + word * 256 + call % 256
