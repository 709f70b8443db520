"""Memory of a worker's weights: little more than the file's tensors, not much more while loading."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from betoken.common.gguf import read_header
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.quantize import quantize
from tests.engine.gguf_files import tiny_model, write_gguf
from tests.engine.tiny import save_tiny
from tests.products import slow

CHILD = Path(__file__).with_name("memory_child.py")
RESIDENT, PEAK = 1.1, 1.3
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint, and one of 280 MB, both in bfloat16."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_model().to(torch.bfloat16).save_pretrained(folder / "tiny")
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=11, max_position_embeddings=64, **WIDE)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "wide")
    return folder / "tiny", folder / "wide"


def checkpoints(kind: Any, whole: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """A tiny checkpoint of this kind, and a large one: the whole ones, or these rounded."""
    if kind == "bfloat16":
        return whole
    if kind != "gguf":
        for source in whole:
            quantize(str(source), folder / source.name, kind)
        return folder / "tiny", folder / "wide"
    write_gguf(folder / "tiny.gguf", "Q8_0")
    config = LlamaConfig(vocab_size=100, num_hidden_layers=11, max_position_embeddings=64, head_dim=64, **WIDE)
    write_gguf(folder / "wide.gguf", "Q8_0", AutoModelForCausalLM.from_config(config))
    return folder / "tiny.gguf", folder / "wide.gguf"


def tensor_bytes(path: Path) -> int:
    tensors: Any = read_header(path).tensors if path.suffix == ".gguf" else read_headers(path).values()
    return sum(tensor.num_bytes for tensor in tensors)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["bfloat16", "int4", "gguf", *slow("int8")])
def test_weights_take_little_more_than_their_file(kind: str, whole: tuple[Path, Path], tmp_path: Path) -> None:
    warm_up, measured = checkpoints(kind, whole, tmp_path)
    command = [sys.executable, str(CHILD), str(warm_up), str(measured)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found, in_file = json.loads(done.stdout.splitlines()[-1]), tensor_bytes(measured)
    assert found["resident"] <= RESIDENT * in_file, (found, in_file)
    assert found["peak"] <= PEAK * in_file, (found, in_file)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # a separate output layer, and a tied one
def test_the_bytes_of_weights_are_reported(family: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, family)
    runner = load_runner(EngineConfig(directory, dtype="float32", num_pages=64, compile="off"))
    (file,) = Path(directory).glob("*.safetensors")
    assert file.stat().st_size * 0.9 < runner.weight_bytes < file.stat().st_size * 1.3  # kernels pad small ones
