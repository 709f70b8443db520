"""The header of a GGUF file: what the format's own package wrote, and what strangers may send."""

import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from betoken.common.gguf import GgufError, read_header
from betoken.common.gguf.header import MAX_LIST, TYPES

KEY, COUNT = struct.Struct("<Q"), struct.Struct("<Q")


def write(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u0120b", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("blocks", np.zeros((4, 40), np.uint8), raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str) -> bytes:
    return KEY.pack(len(value)) + value.encode()


def file_of(
    keys: bytes = b"", tensors: bytes = b"", num_keys: int = 0, num_tensors: int = 0, version: int = 3, rest: int = 64
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors + bytes(rest)


def tensor(name: str, dims: list[int], number: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def test_a_header_that_the_gguf_package_wrote_is_read(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "a.gguf"))
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == 3 and header.metadata["llama.rope.freq_base"] == 0.5
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "\u0120b", ""]
    plain, blocks = header.tensors
    assert (plain.name, plain.shape, plain.type, plain.num_bytes) == ("plain", (2, 3), "F32", 24)
    assert (blocks.shape, blocks.type, blocks.row_bytes) == ((4, 64), "Q4_1", 40)
    content = header.path.read_bytes()[plain.start : plain.start + plain.num_bytes]
    assert np.frombuffer(content, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_gguf_types_have_the_block_sizes_of_the_gguf_package() -> None:
    for number, (name, *sizes) in TYPES.items():
        known = GGMLQuantizationType(number)
        assert (known.name, GGML_QUANT_SIZES[known]) == (name, tuple(sizes))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"GG", "has 2 bytes"),
        (b"GGML" + bytes(60), "begins with b'GGML'"),
        (file_of(version=1), "version 1 is neither 2 nor 3"),
        (file_of(num_keys=2**63), "key count: 9223372036854775808 is more than"),
        (file_of(num_tensors=2**40), "tensor count: 1099511627776 is more than"),
        (file_of(KEY.pack(2**60), num_keys=1), "length of a key: 1152921504606846976 is more than"),
        (file_of(text("k") + struct.pack("<I", 8) + KEY.pack(2**50), num_keys=1), "length of k"),
        (file_of(text("k") + struct.pack("<I", 77), num_keys=1), "k has type 77"),
        (file_of(text("k") + struct.pack("<IIQ", 9, 9, 1), num_keys=1), "k is a list of type 9"),
        (file_of(text("k") + struct.pack("<IIQ", 9, 0, 2**40), num_keys=1), f"more than {MAX_LIST}"),
        (file_of(text("k") + struct.pack("<IIQ", 9, 8, 2**20), num_keys=1), "more than the header holds"),
        (file_of((text("k") + struct.pack("<II", 4, 1)) * 2, num_keys=2), "key 'k' comes twice"),
        (file_of(KEY.pack(1) + b"\xff" + struct.pack("<II", 4, 1), num_keys=1), "is not UTF-8"),
        (file_of(text("general.alignment") + struct.pack("<II", 4, 7), num_keys=1), "general.alignment = 7"),
        (file_of(tensors=tensor("t", [1] * 5, 0), num_tensors=1), "dimensions of 't': 5 is more than 4"),
        (file_of(tensors=tensor("t", [2**40, 2**40], 0), num_tensors=1), "is cut off: tensor 't'"),
        (file_of(tensors=tensor("t", [4], 0, 1 << 40), num_tensors=1), "is cut off: tensor 't'"),
        (file_of(tensors=tensor("t", [4], 0, 4), num_tensors=1), "begins at 4"),
        (file_of(tensors=tensor("t", [33], 3), num_tensors=1), r"Q4_1, has shape \[33\]: not whole blocks"),
        (file_of(tensors=tensor("t", [0], 0), num_tensors=1), "not whole blocks"),
        (file_of(tensors=tensor("t", [256], 15), num_tensors=1), r"type Q8_K \(15\), none of F32"),
        (file_of(tensors=tensor("t", [256], 999), num_tensors=1), r"type unknown \(999\)"),
        (file_of(tensors=tensor("t", [4], 0) * 2, num_tensors=2), "tensors of one name"),
    ],
)
def test_a_header_beyond_a_limit_is_rejected_by_name(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=complaint):
        read_header(path)


def test_a_truncated_gguf_file_is_rejected_at_any_length(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    used = read_header(tmp_path / "a.gguf").tensors[-1]
    for length in range(0, used.start + used.num_bytes, 7):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_header(tmp_path / "cut.gguf")


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_randomly_changed_headers_are_read_or_rejected_in_bounded_time_and_memory(count: int, tmp_path: Path) -> None:
    """A change may hit a name or a number that may be anything: then there is nothing to refuse."""
    content = write(tmp_path / "a.gguf").read_bytes()
    drawn, path, refused = random.Random(7), tmp_path / "changed.gguf", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(drawn.choice((1, 2, 8))):
            at = drawn.randrange(400)
            changed[at : at + drawn.choice((1, 8))] = drawn.randbytes(1) * drawn.choice((1, 8))
        path.write_bytes(changed)
        try:
            read_header(path)
        except GgufError:
            refused += 1
    assert count / 2 < refused < count
    assert time.process_time() - start < count / 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_a_missing_text_key_of_a_header_is_named(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "a.gguf"))
    value: Any = header.metadata.get("general.name")
    assert value is None
    with pytest.raises(GgufError, match="general.name = None is not text"):
        header.text("general.name")
