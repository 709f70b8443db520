"""Identity of a checkpoint on disk, and of code: compared by two workers before one may replace the other."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import shard_paths
from betoken.engine.weights.tensor_files import StoredTensor, read_header

EDGE_BYTES = 64 * 1024
SAMPLE_BYTES = 4 * 1024
_HEADER_LENGTH_BYTES = 8
_SOURCES = (".c", ".cpp", ".h", ".py")


def hash_weights(directory: Path) -> str:
    """SHA-256 hex of config.json and of every weight file's name, size, header, first and last 64 KiB, and 4 KiB from
    the middle of each tensor. The middles count, since tuning may leave both ends of a file (embeddings and norms) as
    they were.

    Raises:
        FileNotFoundError: no config.json, or no weights in safetensors files.
        ModelRefusedError: a weight file has no header or is cut off, or their index is malformed.
    """
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text())
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(directory):
        size, tensors = path.stat().st_size, read_header(path)
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")))
            for start, end in [(0, EDGE_BYTES), (max(0, size - EDGE_BYTES), size), *_middles(tensors)]:
                file.seek(start)
                digest.update(file.read(end - start))
    return digest.hexdigest()


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name.

    Raises:
        FileNotFoundError: no weights in safetensors files.
        ModelRefusedError: a file has no header or is cut off, or the index of them is none.
    """
    return {name: tensor for path in weight_files(directory) for name, tensor in read_header(path).items()}


def weight_files(directory: Path) -> list[Path]:
    """Files that transformers loads, by name: other files depend on the origin of the directory."""
    whole, index = directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{directory} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except Exception as error:  # whatever its contents are taken for
        raise ModelRefusedError(f"{index} is not an index of weights: {type(error).__name__}: {error}") from error
    return shard_paths(index, names)


def _middles(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[int, int]]:
    """The middle of each tensor in the file, [start, end) in bytes, in the file's order."""
    for start, num_bytes in sorted((tensor.start, tensor.num_bytes) for tensor in tensors.values()):
        middle = start + num_bytes // 2
        yield max(start, middle - SAMPLE_BYTES // 2), min(start + num_bytes, middle + SAMPLE_BYTES // 2)


def hash_sources(*packages: ModuleType) -> str:
    """SHA-256 hex of the packages' sources, Python and C, wherever they are installed."""
    digest = hashlib.sha256()
    for package in packages:
        folders = [Path(folder) for folder in package.__path__]
        files = [(path.relative_to(folder).as_posix(), path) for folder in folders for path in folder.rglob("*")]
        for name, path in sorted(files):
            if path.suffix in _SOURCES:
                digest.update(f"\0{package.__name__}/{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def hash_tokenizer(directory: Path) -> str:
    """`hash_tokenizer_json` of the directory's tokenizer.json; empty when there is none.

    Raises:
        ModelRefusedError: the file is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        return hash_tokenizer_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # whatever its contents are taken for
        raise ModelRefusedError(f"{path} is not a tokenizer: {type(error).__name__}: {error}") from error
