"""Columns packed for one copy come out as they went in."""

import numpy as np
import pytest
import torch

from betoken.engine.staging import pack, to_device, unpack

COLUMNS = [
    np.array([1, -2, 2**40], dtype=np.int64),
    np.array([0.5], dtype=np.float32),
    np.array([], dtype=np.int32),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([7, 8, 9], dtype=np.int64),
]


def check(tensors: list[torch.Tensor]) -> None:
    for tensor, column in zip(tensors, COLUMNS, strict=True):
        assert tensor.dtype == torch.from_numpy(column).dtype and tensor.is_contiguous()
        assert np.array_equal(tensor.cpu().numpy(), column)


def test_packed_columns_come_out_as_they_went_in() -> None:
    tensors = unpack(pack(COLUMNS, is_pinned=False), COLUMNS)
    check(tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_packed_columns_on_a_cpu_are_the_arrays_themselves() -> None:
    tensors = to_device(COLUMNS, torch.device("cpu"))
    check(tensors)
    assert tensors[0].data_ptr() == COLUMNS[0].ctypes.data


@pytest.mark.gpu
def test_packed_columns_are_copied_to_a_gpu() -> None:
    check(to_device(COLUMNS, torch.device("cuda")))
