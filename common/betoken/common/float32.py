"""Float32 fields as the decimals their senders wrote. Knows no messages."""

import struct
from functools import lru_cache

_FLOAT32 = struct.Struct("<f")


@lru_cache(maxsize=4096)
def shortest(value: float) -> float:
    """The double with the fewest decimal digits that rounds to the same float32 as `value`.

    A float field holds 0.95 as 0.949999988...; this gives 0.95 back, so that limits mean what they say and rules use
    the number the caller gave. A pure function: every process derives the same double.
    """
    if value == 0:
        return 0.0  # without the sign
    try:
        packed = _FLOAT32.pack(value)
    except OverflowError:
        return value
    for digits in range(6, 9):
        candidate = float(f"{value:.{digits}g}")
        if _FLOAT32.pack(candidate) == packed:
            return candidate
    return value
