"""Tiny models for each drafter with weights, in one folder, and the options of the workers that run them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.drafters.dflash.tiny import save_block
from tests.drafters.dflash.tiny import tiny_shape as block_shape
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.drafters.gemma4_assistant.tiny import config_of, save_assistant, save_target
from tests.drafters.mtp.tiny import add_layer
from tests.drafters.mtp.tiny import save_target as save_mtp_target
from tests.drafters.pard2 import add_projection
from tests.drafters.translated.pairs import save_translated_pair
from tests.e2e.in_process import VOCAB_SIZE, save_pair, save_pard_pair
from tests.router.harness import byte_tokenizer_json

SIZES = {"hidden_size": 32, "target_hidden_size": 32, "vocab_size": VOCAB_SIZE}
"""Sizes of a layer for the tiny target."""


def save_peagle(folder: Path) -> dict[str, Any]:
    """The tiny pair and a P-EAGLE layer."""
    save_pair(folder)
    shape = tiny_shape(
        **SIZES, draft_vocab_size=200, state_layers=(0, 1, 1), num_layers=2, mask_token_id=VOCAB_SIZE - 1
    )
    save_layer(folder / "eagle3", tiny_layer(shape, spread=0.4), "speculators")
    return {"eagle3": str(folder / "eagle3")}


def save_dflash(folder: Path, variant: str = "dflash", **fields: Any) -> dict[str, Any]:
    """The tiny pair and a block drafter."""
    save_pair(folder)
    return save_block_drafter(folder, variant, **fields)


def save_block_drafter(folder: Path, variant: str = "dflash", **fields: Any) -> dict[str, Any]:
    """A block drafter for the tiny pair."""
    sizes = SIZES | {"state_layers": (0, 1), "mask_token_id": VOCAB_SIZE - 1}
    save_block(folder / "block", block_shape(variant, **sizes | fields))
    return {"dflash": str(folder / "block")}


def save_pard(folder: Path) -> dict[str, Any]:
    """The tiny pair, whose draft model is a PARD model."""
    save_pard_pair(folder)
    return {"pard": str(folder / "draft")}


def save_pard2(folder: Path) -> dict[str, Any]:
    """As `save_pard`; the model reads hidden states of the target."""
    options = save_pard(folder)
    add_projection(options["pard"], [-1, 0], 32, 32)
    return options


def save_mtp(folder: Path) -> dict[str, Any]:
    """A hybrid pair, whose target has an MTP layer."""
    save_pair(folder, "qwen3_5")
    add_layer(folder / "target", spread=0.4)
    return {}


def save_several_mtp(folder: Path) -> dict[str, Any]:
    """A target with two MTP layers."""
    save_mtp_target(folder / "target", "deepseek_v3", VOCAB_SIZE, num_layers=2)
    (folder / "target" / "tokenizer.json").write_text(byte_tokenizer_json())
    return {}


def save_gemma4(folder: Path, num_centroids: int = 0) -> dict[str, Any]:
    """A Gemma-4 target and an assistant."""
    save_target(folder / "target", vocab_size=VOCAB_SIZE, spread=0.1)
    (folder / "target" / "tokenizer.json").write_text(byte_tokenizer_json())
    config = config_of(vocab_size=VOCAB_SIZE, num_centroids=num_centroids)
    save_assistant(folder / "assistant", config, spread=0.1)
    return {"gemma4_assistant": str(folder / "assistant")}


def save_remote(save: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    """A pair without weights of attached drafters."""
    save(folder)
    return {}


@dataclass(frozen=True)
class Setup:
    """A drafter, and what its workers need."""

    drafter: str
    save: Callable[[Path], Mapping[str, Any]]
    """Writes the models; the options of the verify worker that name weights."""
    can_branch: bool = False
    is_attached: bool = True
    draft: Mapping[str, Any] = field(default_factory=lambda: {"drafters": ("ngram",)})
    """Options of the draft worker."""

    def draft_options(self, folder: Path) -> dict[str, Any]:
        """`draft`, with the folder's target for translated drafts."""
        is_translated = "target_tokenizer" in self.draft
        return {**self.draft} | ({"target_tokenizer": str(folder / "target")} if is_translated else {})


def remote(name: str, save: Callable[[Path], object], draft: Mapping[str, Any]) -> Setup:
    """A drafter of a draft worker with these options."""
    return Setup(name, partial(save_remote, save), can_branch=True, is_attached=False, draft=draft)


MODEL = {"drafters": ("model",)}
TRANSLATED = MODEL | {"target_tokenizer": ""}
SETUPS = {
    "peagle": Setup("eagle3", save_peagle),
    "dflash": Setup("dflash", save_dflash),
    "dflash2": Setup("dflash", partial(save_dflash, variant="dflash2")),
    "dspark": Setup("dflash", partial(save_dflash, variant="dspark")),
    "mtp": Setup("mtp", save_mtp, can_branch=True),
    "mtp-layers": Setup("mtp", save_several_mtp),
    "gemma4": Setup("gemma4_assistant", partial(save_gemma4, num_centroids=34)),
    "pard": Setup("pard", save_pard, can_branch=True),
    "pard2": Setup("pard", save_pard2, can_branch=True),
    "suffix": Setup("suffix", partial(save_remote, save_pair), can_branch=True),
    "remote-suffix": remote("suffix", save_pair, {"drafters": ("suffix",)}),
    "remote-pard": remote("model", save_pard_pair, MODEL),
    "translated": remote("model", partial(save_translated_pair, kind="text"), TRANSLATED),
}
