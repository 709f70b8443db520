"""`betoken quantize SRC DST`: rounds the linear layers of a dense checkpoint and writes it as compressed-tensors.

Tensor by tensor, so that no more than one file of the result is in memory. Its output is read by `--model`, by
transformers and by vLLM.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.language_model import model_class_of
from betoken.engine.weights.loading import check_type
from betoken.engine.weights.memory import give_back
from betoken.engine.weights.plausible import check_sizes
from betoken.engine.weights.rounding import GROUPS, rounded
from betoken.engine.weights.sources import DirectorySource, open_source
from betoken.engine.weights.tensor_files import StoredTensor
from betoken.engine.whole_folder import whole_folder
from betoken.kernels.linear_grouped import Grouped

Kind = Literal["int8", "int4"]
FILE_BYTES = 1 << 30
"""Size of a file of weights, from which on another one is begun."""
_BITS: Mapping[Kind, int] = {"int8": 8, "int4": 4}
_NOT_COPIED = (".safetensors", ".index.json", ".gguf", ".bin", ".pth")


def quantize(source: str, target: Path, kind: Kind, progress: Callable[[float], None] = lambda fraction: None) -> int:
    """Write the rounded checkpoint; returns how many layers were rounded.

    Args:
        source: a directory in Hugging Face format or a hub id.
        target: a directory, created here: complete, or absent if this raises.
        progress: called with the fraction of tensors done.

    Raises:
        ModelRefusedError: the source is not a dense checkpoint, or the target exists.
    """
    opened = open_source(source, None)
    if not isinstance(opened, DirectorySource):
        raise ModelRefusedError(f"{source} is a GGUF file, which has its own types")
    if target.exists():
        raise ModelRefusedError(f"{target} exists already")
    try:
        described = opened.config_dict()
        check_type(described)
        check_sizes(described)
        if described.get("quantization_config") is not None:
            raise ModelRefusedError(f"{source} is quantized already")
        config, files = opened.config(), read_headers(opened.path)
        layers, ignored = _layers(config, files, GROUPS[kind])
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever the files' contents make transformers raise
        raise ModelRefusedError(f"{source}: {type(error).__name__}: {error}") from error
    with whole_folder(target) as folder:
        _write(files, layers, kind, folder, progress)
        for path in sorted(opened.path.iterdir()):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        own = json.loads((opened.path / "config.json").read_text()) | {"quantization_config": _config(kind, ignored)}
        (folder / "config.json").write_text(json.dumps(own, indent=2) + "\n")
    return len(layers)


def _layers(config: PreTrainedConfig, files: Mapping[str, StoredTensor], group: int) -> tuple[set[str], list[str]]:
    """Paths of the linear layers to round, and of the layers that stay dense."""
    with torch.device("meta"):
        model = model_class_of(config)(config)
    head, found, ignored = model.get_output_embeddings(), set(), []
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear:
            continue
        if layer is head or layer.in_features % group:
            ignored.append(path)
        elif f"{path}.weight" in files:
            found.add(path)
        else:
            raise ModelRefusedError(f"{path}.weight is in the checkpoint under another name: load it with --quantize")
    if not found:
        raise ModelRefusedError(f"{type(model).__name__} has no linear layer of a multiple of {group} inputs")
    return found, ignored


def _write(
    files: Mapping[str, StoredTensor],
    layers: set[str],
    kind: Kind,
    target: Path,
    progress: Callable[[float], None],
) -> None:
    kept: dict[str, Tensor] = {}
    places: dict[str, int] = {}
    num_files = 0

    def save() -> None:
        nonlocal num_files
        save_file(kept, target / f"{num_files}.part", metadata={"format": "pt"})
        places.update(dict.fromkeys(kept, num_files))
        kept.clear()
        num_files += 1

    for number, (name, tensor) in enumerate(files.items()):
        progress(number / len(files))
        kept.update(_stored(name, tensor, layers, kind))
        give_back()
        if sum(part.nbytes for part in kept.values()) >= FILE_BYTES:
            save()
    if kept or not num_files:
        save()
    progress(1.0)
    names = [f"model-{index + 1:05}-of-{num_files:05}.safetensors" for index in range(num_files)]
    names = ["model.safetensors"] if num_files == 1 else names
    for index, name in enumerate(names):
        (target / f"{index}.part").rename(target / name)
    if num_files > 1:
        index_file = {"metadata": {}, "weight_map": {key: names[place] for key, place in places.items()}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index_file))


def _stored(name: str, tensor: StoredTensor, layers: set[str], kind: Kind) -> Iterator[tuple[str, Tensor]]:
    path = name.removesuffix(".weight")
    weight = tensor.read()
    if path == name or path not in layers:
        yield name, weight
        return
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        raise ModelRefusedError(f"{name} holds a value that is not finite")
    grouped = rounded(kind, weight)
    yield f"{path}.weight_packed", _words(grouped)
    yield f"{path}.weight_scale", grouped.scales
    yield f"{path}.weight_shape", torch.tensor(grouped.shape)


def _words(weight: Grouped) -> Tensor:
    """Codes from 0 on, lowest bits first, int32 [N, words]."""
    packed = weight.values.view(torch.uint8)
    packed = packed ^ 128 if weight.kind == "int8" else packed
    return torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def _config(kind: Kind, ignored: list[str]) -> dict[str, Any]:
    weights = {
        **{"num_bits": _BITS[kind], "type": "int", "symmetric": True, "strategy": "group"},
        **{"group_size": GROUPS[kind], "dynamic": False, "actorder": None, "block_structure": None},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its status is 1 if the checkpoint is rejected."""
    parser = argparse.ArgumentParser(prog="betoken quantize", description=__doc__.partition("\n")[0])
    parser.add_argument("source", metavar="SRC", help="a directory in Hugging Face format, or a hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="the directory to write")
    parser.add_argument("--quantize", choices=list(_BITS), default="int8", help="bits of a weight (default: int8)")
    options = parser.parse_args(arguments)

    def show(fraction: float) -> None:
        end = "\n" if fraction == 1 else ""
        sys.stderr.write(f"\rrounding to {options.quantize}: {fraction:4.0%}{end}")

    try:
        num_layers = quantize(options.source, options.target, options.quantize, show)
    except (ModelRefusedError, OSError, ValueError) as error:
        sys.stderr.write(f"betoken quantize: {error}\n")
        return 1
    sys.stdout.write(f"{options.target}: {num_layers} layers rounded to {options.quantize}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
