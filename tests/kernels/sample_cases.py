"""Arguments of `sample` for the tests of every path."""

import numpy as np
import torch

SIZES = [1, 63, 1000, 4096]


def as_columns(num_rows: int, settings: dict[str, float | list]) -> dict[str, torch.Tensor]:
    """Arguments of `sample` besides the logits; every setting is one value for all rows or a list."""
    values = {
        "seeds": 0,
        "positions": list(range(num_rows)),
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    values.update(settings)
    dtypes = {"seeds": torch.int64, "positions": torch.int64, "top_k": torch.int32}
    return {
        name: torch.tensor(
            value if isinstance(value, list) else [value] * num_rows, dtype=dtypes.get(name, torch.float32)
        )
        for name, value in values.items()
    }


def random_case(index: int, vocab_size: int, num_rows: int = 7) -> tuple[torch.Tensor, dict[str, list]]:
    """Logits of all dtypes and spreads, with ties, masked ids and both zeros; settings on and off."""
    rng = np.random.default_rng(index)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)) * rng.choice([0.0, 0.5, 4.0, 30.0]))
    logits[:, rng.integers(0, vocab_size, 3)] = -0.0
    if vocab_size > 1:
        logits[:, rng.permutation(vocab_size)[: vocab_size // 3]] = -torch.inf
    settings = {
        "seeds": [int(seed) for seed in rng.integers(-(2**63), 2**63, num_rows)],
        "positions": rng.integers(0, 2**31, num_rows).tolist(),
        "temperature": (rng.choice([0.0, 0.01, 0.5, 1.0, 3.0], num_rows)).tolist(),
        "top_k": rng.choice([0, 1, 2, 50, 5000], num_rows).tolist(),
        "top_p": rng.choice([1.0, 0.999999, 0.95, 0.5, 1e-6], num_rows).tolist(),
        "min_p": rng.choice([0.0, 0.0, 0.05, 1.0], num_rows).tolist(),
    }
    return logits.to(dtype), settings


UNSOUND = {"nan": torch.nan, "-nan": -torch.nan, "inf": torch.inf}
SETTINGS = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.1, "temperature": 0.01},
]
"""Every way through a sampler."""


def unsound_case(vocab_size: int) -> tuple[torch.Tensor, list[int]]:
    """Invalid rows among valid ones, and their indices: one bad number anywhere, or no number at all.

    Sound are also rows with masked ids, by -inf or by the lowest finite number, though it fills whole blocks of ids.
    """
    sound = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(5))
    sound[1, 1:] = -torch.inf
    sound[2, : vocab_size - 1] = sound[4, 1:] = torch.finfo(torch.float32).min
    rows, unsound = [*sound], []
    for place in sorted({0, vocab_size // 2, vocab_size - 1}):
        for value in UNSOUND.values():
            bad = sound[0].clone()
            bad[place] = value
            unsound.append(len(rows))
            rows += [bad, sound[3]]
    unsound += [len(rows), len(rows) + 1]
    rows += [torch.full((vocab_size,), -torch.inf), torch.full((vocab_size,), torch.nan)]
    return torch.stack(rows), unsound
