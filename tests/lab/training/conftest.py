import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaForCausalLM

from betoken.training.corpus import stdlib_root
from betoken.training.models import Shape, save_model
from betoken.training.tokenizer import save_tokenizer, train_tokenizer
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


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny `target/` and `draft/` of one tokenizer, `texts.jsonl` and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("pair")
    documents = [path.read_text() for path in sorted((stdlib_root() / "email").glob("*.py"))]
    tokenizer = train_tokenizer(documents, 512)
    shapes = {"target": Shape(32, 4, 2, 1, 48, 512, 128), "draft": Shape(16, 1, 2, 1, 24, 512, 128)}
    for seed, (name, shape) in enumerate(shapes.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape.config())
        model.model.embed_tokens.weight.data.mul_(20)  # it is the head, too: what it says is then not all alike
        save_model(model, folder / name)
        save_tokenizer(tokenizer, folder / name, 128)
    texts = [text[start : start + 400] for text in documents for start in range(0, 4000, 400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text[:80]}) + "\n" for text in texts if text))
    return folder
