"""Tiny GGUF files, written by ggml's own package from a transformers model, as llama.cpp's converter would."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig

from betoken.bench.near_tie import is_near_tie
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig

PROMPT, NUM_NEW = [5, 17, 40, 8, 90, 33, 12, 61, 7, 22, 70, 3], 12
TOKENS = ["<|end|>", "<|turn|>", *(chr(code) for code in range(33, 127)), "\u0120", "in", "\u0120i", "\u0120in"]
MERGES = ["i n", "\u0120 i", "\u0120 in"]
NUMPY_QUANTIZES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}",
}
_BLOCKS: dict[str, tuple[int, tuple[int, ...], float]] = {
    **{"Q2_K": (84, (80, 82), 12.5), "Q3_K": (110, (108,), 43), "Q4_K": (144, (0, 2), 320)},
    **{"Q5_K": (176, (0, 2), 650), "Q6_K": (210, (208,), 1370)},
    **{"IQ1_S": (50, (0,), 7.5), "IQ1_M": (56, (), 7.5), "IQ2_XXS": (66, (0,), 50), "IQ2_XS": (74, (0,), 50)},
    **{"IQ2_S": (82, (0,), 50), "IQ3_XXS": (98, (0,), 150), "IQ3_S": (110, (0,), 160)},
    **{"IQ4_NL": (18, (0,), 69), "IQ4_XS": (136, (0,), 1280)},
}
"""By type: bytes of a block, offsets of its float16 units, root mean square of random weights with units of 1."""
SCALES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}
"""Offset of a block's scale by type, unless it is at 0."""
_WEIGHT_SIZE = 0.1
"""Root mean square of weights, the `initializer_range` of `tiny_model`. Larger weights make attention so sharp that
rounding, which differs with a math library's threads and instructions, changes logits by 1e-3."""


def config_of(path: str, dtype: Any = "float32", **others: Any) -> EngineConfig:
    """A small engine without compilation."""
    return EngineConfig(path, dtype=dtype, **({"num_pages": 32, "compile": "off", "self_check": False} | others))


def of_transformers(path: str) -> Any:
    """Weights as read by transformers, in float32."""
    source = {"pretrained_model_name_or_path": Path(path).parent, "gguf_file": Path(path).name}
    return AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def of_package(path: str) -> Any:
    """The model of the numbers that ggml's own package gives the weights, in float32."""
    reader, plain = GGUFReader(path), Path(path).with_suffix("") / "plain.gguf"
    plain.parent.mkdir(exist_ok=True)
    writer = GGUFWriter(plain, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            add_key(writer, key, field.contents())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    close(writer)
    return of_transformers(str(plain))


def check_tokens(runner: Any, theirs: Any) -> None:
    """Greedy tokens equal theirs, except near-ties in both."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        ids = theirs.generate(torch.tensor([PROMPT]), **options)[0].tolist()
        ours, logits = forward_together(runner, [ids])[0], theirs(torch.tensor([ids])).logits[0]
    assert (ours - logits).abs().max() < 1e-3 * logits.abs().max()
    for place in range(len(PROMPT) - 1, len(ids) - 1):
        if ours[place].argmax() != ids[place + 1]:
            gaps = [float(one.topk(2).values.diff().abs()) for one in (ours[place], logits[place])]
            assert is_near_tie(*gaps), place
            break


def tiny_model(num_layers: int = 2, is_tied: bool = False) -> Any:
    """A random Llama whose layers are whole blocks of every type."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config)


def write_gguf(
    path: Path,
    type_name: str = "Q4_1",
    model: Any = None,
    changes: dict[str, Any] | None = None,
    max_tensors: int = 0,
    **extra: np.ndarray,
) -> str:
    """Write a model, `changes` to its metadata (None leaves a key out) and `extra` tensors; returns the path.

    Args:
        max_tensors: of a part, whose names follow from the path; 0 writes one file.
    """
    path.parent.mkdir(exist_ok=True)
    model = model or tiny_model()
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = GGUFWriter(path, "llama", split_max_tensors=max_tensors)
    fields: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.head_dim,
    } | TOKENIZER
    for key, value in (fields | (changes or {})).items():
        if value is not None and key != "general.architecture":
            add_key(writer, key, value)
    if changes and "general.architecture" in changes:
        writer.kv_data[0]["general.architecture"].value = changes["general.architecture"]
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name.removesuffix(".weight"))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(known.split(".")[-1])
        write_tensor(
            writer, f"{known}.weight", permuted(weight, heads).numpy(), type_name if weight.dim() == 2 else "F32"
        )
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    close(writer)
    return str(path)


def close(writer: GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter) -> None:
    """The vocabulary of the tests."""
    for key, value in TOKENIZER.items():
        add_key(writer, key, value)


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """Metadata of the value's own type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def permuted(weight: torch.Tensor, num_heads: int | None) -> torch.Tensor:
    """As llama.cpp orders the rows of queries and keys for its rotary embedding."""
    if num_heads is None:
        return weight
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()


def write_tensor(writer: GGUFWriter, name: str, numbers: np.ndarray, type_name: str) -> None:
    """Numbers as blocks of a type."""
    if type_name == "F32":
        writer.add_tensor(name, numbers)
    elif type_name in NUMPY_QUANTIZES:
        writer.add_tensor(name, gguf.quants.quantize(numbers, Type[type_name]), raw_dtype=Type[type_name])
    else:
        writer.add_tensor(name, random_blocks(type_name, *numbers.shape), raw_dtype=Type[type_name])


def random_blocks(type_name: str, num_rows: int, num_inputs: int) -> np.ndarray:
    """Blocks of random codes and scales with weights of `_WEIGHT_SIZE`: the package writes none of these types."""
    generator = np.random.default_rng(num_rows * num_inputs)
    block_bytes, places, size = _BLOCKS[type_name]
    block_size, _ = gguf.GGML_QUANT_SIZES[Type[type_name]]
    blocks = generator.integers(0, 256, (num_rows, num_inputs // block_size, block_bytes), dtype=np.uint8)

    def halves() -> np.ndarray:
        return (generator.standard_normal(blocks.shape[:2]) * _WEIGHT_SIZE / size).astype(np.float16)[..., None]

    for at in places:
        blocks[..., at : at + 2] = halves().view(np.uint8)
    if type_name == "IQ1_M":
        put_scattered(blocks, halves())
    return blocks.reshape(num_rows, -1)


def put_scattered(blocks: np.ndarray, halves: np.ndarray) -> None:
    """Put float16 units [..., 1] into blocks of IQ1_M: 4 bits into each of the last four words."""
    words = halves.view(np.uint16) >> np.array([0, 4, 8, 12], dtype=np.uint16) & 15
    blocks[..., 49::2] = blocks[..., 49::2] & 15 | words << 4
