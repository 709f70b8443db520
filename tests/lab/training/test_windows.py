import numpy as np
import pytest
import torch

from betoken.training.windows import Windows


@pytest.fixture
def windows() -> Windows:
    return Windows(np.arange(1000, dtype=np.uint16), block_tokens=16, blocks_per_batch=4, seed=3)


def test_targets_are_the_inputs_one_token_later(windows: Windows) -> None:
    inputs, targets = windows.batch(0, 16)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(targets, inputs + 1)


def test_a_batch_is_a_pure_function_of_seed_and_step(windows: Windows) -> None:
    last = windows.batch(7, 16)[0]
    assert torch.equal(windows.batch(7, 16)[0], last)
    assert not torch.equal(windows.batch(8, 16)[0], last)
    assert not torch.equal(Windows(windows.stream, 16, 4, seed=4).batch(7, 16)[0], last)


def test_short_windows_hold_the_tokens_of_long_ones(windows: Windows) -> None:
    short, long = windows.batch(5, 4)[0], windows.batch(5, 16)[0]
    assert short.shape == (16, 4)
    assert torch.equal(short.flatten(), long.flatten())


def test_an_epoch_visits_no_token_twice_and_the_next_one_differs(windows: Windows) -> None:
    epoch = [windows.batch(step, 16)[0] for step in range(windows.batches_per_epoch)]
    seen = torch.cat(epoch).flatten()
    assert len(seen.unique()) == len(seen) > 900
    assert not torch.equal(windows.batch(windows.batches_per_epoch, 16)[0], epoch[0])


def test_wrong_window_lengths_are_rejected(windows: Windows) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        windows.batch(0, 5)
    with pytest.raises(ValueError, match="too few"):
        Windows(windows.stream[:70], 16, 4, seed=0)
