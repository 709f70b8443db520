import numpy as np
import numpy.typing as npt
import pytest

from betoken.training.models import Shape
from betoken.training.windows import Windows

VOCAB_SIZE = 64


@pytest.fixture
def shape() -> Shape:
    return Shape(32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=48, vocab_size=VOCAB_SIZE, max_positions=32)


@pytest.fixture
def stream() -> npt.NDArray[np.uint16]:
    """A cycle with some noise: easy to learn, not free."""
    rng = np.random.default_rng(0)
    clean = np.arange(4000) * 5 % VOCAB_SIZE
    return np.where(rng.random(4000) < 0.1, rng.integers(0, VOCAB_SIZE, 4000), clean).astype(np.uint16)


@pytest.fixture
def windows(stream: npt.NDArray[np.uint16]) -> Windows:
    return Windows(stream, block_tokens=32, blocks_per_batch=4, seed=0)
