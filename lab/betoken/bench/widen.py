"""A checkpoint with a large model's shape that answers as a small one does: real steps, and drafts that are accepted.

    python -m betoken.bench.widen --model models/target --shape llama-3-8b --out DIR

Random weights of real size give a step its time but accept no draft. Here the small model's weights fill a corner of
the large one's, and hidden states keep to that corner. Further heads have values of zero, further MLP neurons gates of
zero, and further layers both. So they add nothing to the small model's results. All other weights are random. Up to
rounding the logits are the small model's; further ids never win. A step reads as many bytes and takes as many
operations as with any model of that shape.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from betoken.bench.command import exit_status
from betoken.bench.gpu.step_models import MODEL_NAMES, shape_config
from betoken.engine.weights.checkpoint import resolve_directory

PROGRAM = "python -m betoken.bench.widen"
_KEPT = ("max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "hidden_act")
"""Settings that are the small model's."""
_COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")
_NUM_RANDOM = 1 << 22
_MARK = 2.0**-8
"""Value of the first dimension beyond the corner in every state, over the embeddings' root mean square: too little
for a norm to see."""
_GAIN, _NEVER = 2.0**9, -(2.0**15)
"""Times a normed mark: the logit of an id that the small model does not have."""


class Widening:
    """Embedding of the weights of one Llama model in a larger one."""

    def __init__(self, small: Any, shape: Any) -> None:
        """`small`: a `LlamaForCausalLM`. `shape`: a `LlamaConfig`; its positions, end tokens and activation become the
        small one's.

        Raises:
            ValueError: the shape has no room for the small model.
        """
        if small.config.model_type != "llama":
            raise ValueError(f"the model is of type {small.config.model_type}: only Llama can be widened")
        self._weights: dict[str, Tensor] = small.state_dict()
        self._small: Any = small.config
        self._table: Tensor = small.get_input_embeddings().weight
        self.config: Any = LlamaConfig(**shape.to_dict() | {name: getattr(self._small, name) for name in _KEPT})
        self.config.rms_norm_eps = self._small.rms_norm_eps * self._small.hidden_size / shape.hidden_size
        self.config.dtype = small.dtype
        self._check()
        random = 0.02 * torch.randn(_NUM_RANDOM, generator=torch.Generator().manual_seed(0))
        self._random = random.to(small.dtype)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """The large model's tensors by name, a layer at a time."""
        for index in range(self.config.num_hidden_layers):
            yield self._layer(index)
        norm = self._norm("model.norm")
        norm[self._small.hidden_size] = _GAIN  # lets the mark through to the head
        rest = {"model.embed_tokens.weight": self._embeddings(), "model.norm.weight": norm}
        yield rest if self.config.tie_word_embeddings else rest | {"lm_head.weight": self._head()}

    def _check(self) -> None:
        """Raises ValueError."""
        small, large = self._small, self.config
        if small.attention_bias or small.mlp_bias:
            raise ValueError("the model has biases: only models without can be widened")
        if small.rope_parameters["rope_type"] != "default":
            raise ValueError(f"rope_type is {small.rope_parameters['rope_type']!r}: only `default` can be widened")
        if large.tie_word_embeddings and not small.tie_word_embeddings:
            raise ValueError("the shape ties its head to its embeddings, which the model does not")
        for name in ("num_hidden_layers", "intermediate_size", "vocab_size", "num_key_value_heads"):
            if getattr(large, name) < getattr(small, name):
                raise ValueError(f"{name}: the shape's {getattr(large, name)} is below {getattr(small, name)}")
        if large.hidden_size <= small.hidden_size:
            raise ValueError(f"hidden_size: the shape's {large.hidden_size} is not above {small.hidden_size}")
        if large.head_dim % small.head_dim:
            raise ValueError(f"head_dim: the shape's {large.head_dim} is not a multiple of {small.head_dim}")
        if _queries_per_key(large) < _queries_per_key(small):
            raise ValueError(f"the shape has {_queries_per_key(large)} heads per key, below {_queries_per_key(small)}")

    def _layer(self, index: int) -> dict[str, Tensor]:
        name, large = f"model.layers.{index}", self.config
        width, num_keys = large.hidden_size, large.num_key_value_heads * large.head_dim
        num_queries = num_keys * _queries_per_key(large)
        layer = {
            "self_attn.q_proj": self._fill(num_queries, width),
            "self_attn.k_proj": self._fill(num_keys, width),
            "self_attn.v_proj": torch.zeros(num_keys, width, dtype=self.config.dtype),
            "self_attn.o_proj": self._fill(width, num_queries),
            "mlp.gate_proj": torch.zeros(large.intermediate_size, width, dtype=self.config.dtype),
            "mlp.up_proj": self._fill(large.intermediate_size, width),
            "mlp.down_proj": self._fill(width, large.intermediate_size),
        }
        if index < self._small.num_hidden_layers:
            self._place(layer, {part: self._weights[f"{name}.{part}.weight"] for part in layer})
        for part in ("input_layernorm", "post_attention_layernorm"):
            layer[part] = self._norm(f"{name}.{part}")
        return {f"{name}.{part}.weight": tensor for part, tensor in layer.items()}

    def _place(self, layer: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """A layer of the small model into the corner."""
        small, large = self._small, self.config
        hidden, neurons = small.hidden_size, small.intermediate_size
        used_keys = small.num_key_value_heads * large.head_dim
        layer["self_attn.k_proj"][:used_keys] = 0.0  # dimensions of a head beyond the small one's add to no score
        layer["self_attn.o_proj"][:, : used_keys * _queries_per_key(large)] = 0.0  # further heads with its values
        layer["mlp.down_proj"][:, :neurons] = 0.0
        queries, keys = self._rows(_queries_per_key(small), _queries_per_key(large)), self._rows(1, 1)
        scale = math.sqrt(large.head_dim / small.head_dim)  # attention divides by the root of the larger
        layer["self_attn.q_proj"][self._rotated(queries), :hidden] = own["self_attn.q_proj"] * scale
        layer["self_attn.k_proj"][self._rotated(keys), :hidden] = own["self_attn.k_proj"]
        layer["self_attn.v_proj"][keys, :hidden] = own["self_attn.v_proj"]
        layer["self_attn.o_proj"][:hidden, queries] = own["self_attn.o_proj"]
        for part in ("mlp.gate_proj", "mlp.up_proj"):
            layer[part][:neurons, :hidden] = own[part]
        layer["mlp.down_proj"][:hidden, :neurons] = own["mlp.down_proj"]

    def _norm(self, name: str) -> Tensor:
        """Passes the corner and nothing else; of a layer that the small model lacks, everything."""
        small, large = self._small.hidden_size, self.config.hidden_size
        own = self._weights.get(f"{name}.weight")
        if own is None:
            return torch.ones(large, dtype=self.config.dtype)
        weight = torch.zeros(large, dtype=self.config.dtype)
        weight[:small] = own.float() * math.sqrt(small / large)  # the mean is over more dimensions
        return weight

    def _embeddings(self) -> Tensor:
        """[V, hidden]: the small model's with the mark next to them, repeated for further ids."""
        num_ids, hidden = self._table.shape
        table = torch.zeros(self.config.vocab_size, self.config.hidden_size, dtype=self.config.dtype)
        table[:, :hidden] = self._table[torch.arange(self.config.vocab_size) % num_ids]
        table[:, hidden] = _MARK * self._table.float().square().mean().sqrt()
        if self.config.tie_word_embeddings:
            table[num_ids:, : hidden + 1] = 0.0
            table[num_ids:, hidden] = _NEVER
        return table

    def _head(self) -> Tensor:
        """[V, hidden]."""
        small = self._table if self._small.tie_word_embeddings else self._weights["lm_head.weight"]
        num_ids, hidden = small.shape
        head = self._fill(self.config.vocab_size, self.config.hidden_size)
        head[:, : hidden + 1] = 0.0
        head[:num_ids, :hidden] = small
        head[num_ids:, hidden] = _NEVER
        return head

    def _fill(self, *shape: int) -> Tensor:
        """Random weights, repeated after some millions, which a product's time cannot distinguish from fresh ones."""
        num_values = math.prod(shape)
        return self._random.repeat(-(-num_values // _NUM_RANDOM))[:num_values].view(shape)

    def _rows(self, small_group: int, large_group: int) -> Tensor:
        """Rows of the small model's heads in the large model's matrices."""
        head_dim: int = self.config.head_dim
        heads = torch.arange(self._small.num_key_value_heads * small_group)
        heads = heads // small_group * large_group + heads % small_group
        return (heads[:, None] * head_dim + torch.arange(self._small.head_dim)).flatten()

    def _rotated(self, rows: Tensor) -> Tensor:
        """Place rows that RoPE rotates in pairs: each pair goes to the pair of the larger head with the same angle."""
        small: int = self._small.head_dim
        large: int = self.config.head_dim
        pairs = torch.arange(small // 2) * (large // small)
        places = torch.cat([pairs, pairs + large // 2])
        return (rows.view(-1, small)[:, :1] + places).flatten()


def _queries_per_key(config: Any) -> int:
    return int(config.num_attention_heads // config.num_key_value_heads)


def widen(directory: Path, shape: Any, out: Path) -> Any:
    """Write the checkpoint, with the small one's tokenizer, to `out`; returns its configuration, as `shape` is one.

    Raises:
        ValueError: the shape has no room for the model in `directory`, or the model is another than a plain Llama.
            OSError: a file cannot be read or written.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: what is there might be loaded instead")
    small = load(directory)
    widening = Widening(small, shape)
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    with torch.inference_mode():
        for number, tensors in enumerate(widening.shards()):
            file = f"model-{number:05}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            (out / file).chmod(0o644)  # readable by other users, regardless of the umask
            files |= dict.fromkeys(tensors, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    widening.config.architectures = ["LlamaForCausalLM"]
    widening.config.save_pretrained(out)
    for path in (path for pattern in _COPIED for path in directory.glob(pattern)):
        shutil.copy(path, out)
    return widening.config


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one checkpoint; 2 if that is impossible."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="the small Llama model: directory or hub id")
    add("--shape", required=True, choices=MODEL_NAMES, help="of the large one")
    add("--out", required=True, type=Path, help="folder of the large one")
    options = parser.parse_args(arguments)

    def body() -> int:
        widen(resolve_directory(options.model, None), shape_config(options.shape), options.out)
        return 0

    return exit_status("betoken.bench.widen", body)


if __name__ == "__main__":
    sys.exit(main())
