"""Targets of the exactness matrix with low-bit weights, and their dequantised counterparts.

`generate()` runs on the dense numbers, in float32. It knows checkpoints, not services.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from betoken.common.gguf import read_header
from betoken.engine.config import EngineConfig
from betoken.engine.weights.checkpoint import resolve_directory
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.layers import GroupedLinear
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.quantize import quantize
from betoken.engine.whole_folder import whole_folder

GGUF_Q4_1 = "gguf-q4_1"
_BLOCK = 128
_PASSED_ON = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


class StoredTarget(NamedTuple):
    """A target, and what `generate()` is given in its place."""

    target: str
    dequantised: str


def make_stored(name: str, source: str, folder: Path) -> StoredTarget:
    """The target of a name in `STORED`, made of a dense checkpoint unless the folder holds it.

    Raises:
        ValueError: `gguf-q4_1` of anything but a GGUF file that holds such blocks.
    """
    if name == GGUF_Q4_1:
        if not source.endswith(".gguf") or all(one.type != "Q4_1" for one in read_header(Path(source)).tensors):
            raise ValueError(f"{name} takes a GGUF file with blocks of Q4_1 as --target: {source} is none")
        return StoredTarget(source, source)  # transformers dequantises it itself
    target, dequantised = folder / name, folder / f"{name}-dequantised"
    directory = resolve_directory(source, None)
    if not target.exists():
        _WRITERS[name](directory, target)
    if not dequantised.exists():
        _dequantise(directory, target, dequantised)
    return StoredTarget(str(target), str(dequantised))


def _write_w4a16(source: Path, target: Path) -> None:
    quantize(str(source), target, "int4")


def _write_fp8(source: Path, target: Path) -> None:
    """In blocks of 128 by 128, as DeepSeek's checkpoints are."""
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(AutoConfig.from_pretrained(source))
    head = model.get_output_embeddings()
    linears = {path for path, layer in model.named_modules() if type(layer) is torch.nn.Linear and layer is not head}
    stored: dict[str, Tensor] = {}
    for name, tensor in read_headers(source).items():
        is_linear = name.removesuffix(".weight") in linears and name.endswith(".weight")
        stored.update(_in_blocks(name, tensor.read()) if is_linear else [(name, tensor.read())])
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
    described = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    with whole_folder(target) as folder:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(described))
        _pass_on(source, folder)


def _in_blocks(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    height, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % _BLOCK, 0, -height % _BLOCK))
    blocks = padded.reshape(-(-height // _BLOCK), _BLOCK, -(-width // _BLOCK), _BLOCK)
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    codes = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:height, :width]
    yield name, codes.to(torch.float8_e4m3fn).contiguous()
    yield f"{name}_scale_inv", scales


def _dequantise(source: Path, target: Path, dequantised: Path) -> None:
    loaded, _ = load_model(EngineConfig(str(target), dtype="float32"), lambda stage, fraction: None)
    plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for path, layer in loaded.named_modules():
        if isinstance(layer, GroupedLinear):
            plain.get_submodule(path).weight.data = layer.grouped.dequantised()
    with whole_folder(dequantised) as folder:
        plain.save_pretrained(folder)
        _pass_on(source, folder)


def _pass_on(source: Path, target: Path) -> None:
    for pattern in _PASSED_ON:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


_WRITERS: Mapping[str, Callable[[Path, Path], None]] = {"w4a16": _write_w4a16, "fp8-block": _write_fp8}
STORED = (GGUF_Q4_1, *_WRITERS)
"""The ways to store a target that the matrix names."""
