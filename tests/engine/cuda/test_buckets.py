"""Which bucket a number of rows goes to."""

import pytest

from betoken.engine.cuda.buckets import bucket_sizes, choose_bucket, length_bounds


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (0, []),
        (1, [16]),
        (16, [16]),
        (17, [16, 32]),
        (64, [16, 32, 48, 64]),
        (65, [16, 32, 48, 64, 96]),
        (256, [16, 32, 48, 64, 96, 128, 192, 256]),
        (257, [16, 32, 48, 64, 96, 128, 192, 256, 384]),
    ],
)
def test_bucket_sizes_ascend_and_hold_the_largest_forward(max_rows: int, expected: list[int]) -> None:
    assert bucket_sizes(max_rows) == expected


def test_rows_go_to_the_smallest_bucket_that_holds_them() -> None:
    sizes = bucket_sizes(100)
    for num_rows in range(1, sizes[-1] + 1):
        chosen = choose_bucket(sizes, num_rows)
        assert chosen is not None and chosen >= num_rows
        assert all(size < num_rows for size in sizes if size < chosen)
    assert choose_bucket(sizes, sizes[-1] + 1) is None
    assert choose_bucket([], 1) is None


@pytest.mark.parametrize(
    ("max_context", "expected"),
    [
        (640, [640]),
        (1024, [1024]),
        (1025, [1024, 1025]),
        (8192, [1024, 4096, 8192]),
        (131072, [1024, 4096, 16384, 65536, 131072]),
    ],
)
def test_bucket_lengths_ascend_to_the_longest_sequence(max_context: int, expected: list[int]) -> None:
    assert length_bounds(max_context) == expected
