"""A model pair to run end to end: the embedded one, or else a tiny random one with its own tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parents[2] / "models"
VOCAB_SIZE = 384


@dataclass(frozen=True, slots=True)
class Pair:
    """Directories of a target and a draft model."""

    target: str
    draft: str


def find_or_make_pair(folder: Path) -> Pair:
    """The pair; a made one is written into `folder`."""
    if all((EMBEDDED / name / "config.json").exists() for name in ("target", "draft")):
        return Pair(str(EMBEDDED / "target"), str(EMBEDDED / "draft"))
    make_pair(folder)
    return Pair(str(folder / "target"), str(folder / "draft"))


def make_pair(folder: Path, config: Any = None) -> None:
    """Write a random model, a Llama by default, and as its draft the same weights with noise: they agree sometimes."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    text = [path.read_text() for path in Path(__file__).parents[2].glob("lab/betoken/bench/*.py")]
    tokenizer.train_from_iterator(text, vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>")
    config = config or LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config)
    draft = AutoModelForCausalLM.from_config(config)
    draft.load_state_dict(target.state_dict())
    for weight in draft.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    for name, model in (("target", target), ("draft", draft)):
        for weight in model.parameters():  # not buffers, which are constants
            weight.data = weight.data.to(torch.bfloat16)
        model.save_pretrained(folder / name)
        wrapped.save_pretrained(folder / name)
