"""Thousands of damaged headers and settings, seeded: each is read or refused by name, in bounded memory."""

import copy
import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from betoken.common.gguf import GgufError, read_header
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights import gguf
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.quantized import select_loading
from betoken.engine.weights.tensor_files import read_header as read_tensors
from tests.engine import quantized_files as files
from tests.engine.gguf_files import tiny_model, write_gguf
from tests.engine.mixture_files import WAYS, save_both
from tests.engine.tiny import save_tiny

NUM_HEADERS, NUM_CONFIGS = 1000, 60
MAX_BYTES = 64 << 20
"""Far above what any of these files holds, far below what their lengths claim."""
VALUES: tuple[Any, ...] = (None, -1, 0, 1, 3, 2**31, 2**63, 1.5, True, "", "x", [], [[]], {}, {"a": 1}, [1, 2, 3])


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def damaged(content: bytes, draw: random.Random, end: int) -> bytes:
    """A byte changed, a number of eight bytes made huge, a stretch left out or doubled, or the file cut off."""
    place, kind = draw.randrange(end), draw.randrange(5)
    if kind == 0:
        return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]
    if kind == 1:
        number = draw.choice([2**64 - 1, 2**63, 2**40, 2**31, 0]).to_bytes(8, "little")
        return content[:place] + number + content[place + 8 :]
    stretch = draw.randrange(1, 64)
    if kind == 2:
        return content[:place] + content[place + stretch :]
    if kind == 3:
        return content[:place] + content[place : place + stretch] + content[place:]
    return content[:place]


def test_a_damaged_gguf_header_is_read_or_refused(tmp_path: Path) -> None:
    path = Path(write_gguf(tmp_path / "tiny.gguf", model=tiny_model(num_layers=1)))
    content, draw, num_refused = path.read_bytes(), random.Random(1), 0
    end = read_header(path).num_bytes
    with bounded():
        for _ in range(NUM_HEADERS):
            path.write_bytes(damaged(content, draw, end))
            try:
                gguf.read_config(read_header(path))
            except (GgufError, ModelRefusedError):
                num_refused += 1
    assert num_refused > NUM_HEADERS // 4


def test_a_damaged_safetensors_header_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"layers.{n}.weight": torch.ones(4, n + 1) for n in range(20)}, path, metadata={"format": "pt"})
    content, draw, num_refused = path.read_bytes(), random.Random(2), 0
    end = 8 + int.from_bytes(content[:8], "little")
    with bounded():
        for _ in range(NUM_HEADERS):
            path.write_bytes(damaged(content, draw, end))
            try:
                for tensor in read_tensors(path).values():
                    assert tensor.dtype not in ("F32",) or tensor.read().numel() <= len(content)
            except ModelRefusedError:
                num_refused += 1
    assert num_refused > NUM_HEADERS // 4


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a":' * 50_000, b"[]", b"{}x", b'{"a": 1}', b'{"a": {}}', b"\xff"]
)
def test_an_invalid_safetensors_table_is_rejected(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelRefusedError, match="is not a safetensors file"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}, "16 bytes are not"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 2**60]}, "is cut off: it lacks"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "is not a safetensors file: a"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "is not a safetensors file: a"),
        ({"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}, "is not a safetensors file: a"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}, "8 bytes are not"),
    ],
)
def test_an_impossible_tensor_entry_is_rejected(entry: dict[str, Any], reason: str, tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with bounded(), pytest.raises(ModelRefusedError, match=reason):
        read_tensors(path)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a tree of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return (
        [path, *(leaf for key, part in inner for leaf in leaves(part, (*path, key)))]
        if path
        else [leaf for key, part in inner for leaf in leaves(part, (key,))]
    )


def changed(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    found = copy.deepcopy(config)
    *lead, last = draw.choice(leaves(found))
    parent: Any = found
    for key in lead:
        parent = parent[key]
    if draw.randrange(4) == 0 and isinstance(parent, dict):
        del parent[last]
    else:
        parent[last] = draw.choice(VALUES)
    return found


INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False, "group_size": 32}
WRITTEN: dict[str, tuple[dict[str, Any], Any]] = {
    "compressed-tensors": (
        files.compressed_tensors_config("pack-quantized", **INTEGERS),
        files.store_compressed_tensors("pack-quantized", INTEGERS, torch.bfloat16),
    ),
    "gptq": (files.gptq_config(2, 32, desc_act=True), files.store_gptq(2, 32, less=1, is_ordered=True)),
    "awq": (files.awq_config(32), files.store_awq(32)),
    "fp8": (files.fp8_config((64, 64)), files.store_fp8((64, 64))),
    "bitsandbytes": (files.bitsandbytes_config("nf4", True), files.store_bitsandbytes("nf4", True)),
    "mxfp4": (WAYS[0][2] | {"modules_to_not_convert": ["lm_head"]}, None),
}


@pytest.mark.parametrize("method", WRITTEN)
def test_damaged_settings_of_a_quantization_are_taken_or_refused(method: str, tmp_path: Path) -> None:
    config, store = WRITTEN[method]
    directory = tmp_path
    if store is None:
        _, directory = save_both(*WAYS[0], tmp_path)
    else:
        save_tiny(tmp_path, "llama")
        files.write_quantized(tmp_path, config, store)
    model_config = AutoConfig.from_pretrained(directory)
    del model_config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    draw, num_taken = random.Random(3), 0
    options = EngineConfig(str(directory))
    with bounded():
        for _ in range(NUM_CONFIGS):
            model_config.quantization_config = changed(config, draw)
            try:
                select_loading(model_config, options, directory)
                for stored in getattr(model_config.quantization_config, "plan", dict)(model).values():
                    stored.weight()
                num_taken += 1
            except ModelRefusedError:
                pass
    assert 0 < num_taken < NUM_CONFIGS


@pytest.mark.parametrize("method", sorted(WRITTEN.keys() - {"mxfp4"}))
def test_a_model_file_damaged_anywhere_is_loaded_or_rejected(method: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    files.write_quantized(tmp_path, *WRITTEN[method])
    path = tmp_path / "model.safetensors"
    content, draw = path.read_bytes(), random.Random(4)
    for _ in range(15):
        path.write_bytes(damaged(content, draw, len(content)))
        try:
            load_model(EngineConfig(str(tmp_path), num_pages=8), lambda stage, fraction: None)
        except ModelRefusedError:
            continue
