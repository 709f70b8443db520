"""Writes models.md next to this file: model families, their tests, and refusals with their reasons.

Families come from the tests' tiny checkpoints. A reason is the error of loading such a checkpoint.
"""

import runpy
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("models.md")
HEAD = """# Models

`transformers`' causal language models whose layers are attention, recurrences or convolutions that the engine knows. A
checkpoint is checked at load: a ragged batch against the model's own forward, and every row against itself alone. This
page is made by `make docs` from the tests' tiny random checkpoints; a test compares it with them.

- **own**: logits of a ragged batch equal the logits of the model's own eager forward, in float32 and bf16.
- **rows**: a row has the same bits in any company and any chunks, eager and compiled.
- **drafts**: random drafts, trees, stale blocks and preemption give the tokens of plain decoding and of `generate()`.
- **matrix**: every drafter through real services, as target and as draft model (`tests/e2e`): all cells, or a choice of
  drafters, failures, temperatures and types.

Families whose checkpoints hold an MTP layer that drafts are listed [there](drafters.md#mtp).

| family | layers | own | rows | drafts | matrix |
|---|---|---|---|---|---|
"""
TEXTS = """
## Text of multimodal models

The language model of these is loaded alone. Towers for images, sound and video are neither made nor read. Positions
count tokens, in each part of the rotation alike. A prompt with a placeholder id of an image is rejected by its
position, and so is a part of a message that is not text. All of them are tested with random drafts, trees, stale blocks
and preemption, and give the tokens of `generate()` of transformers' class of the whole (of the text for Gemma 3n, whose
tower is another library's).

| family | language model | layers |
|---|---|---|
"""
STATES = """
## Positions

Attention within spans (Llama 4) and by distance (ALiBi of BLOOM and MPT) is computed from a row's own position, by all
kernels.

LongRoPE has two sets of factors. transformers selects it by the longest text of a batch, so a neighbour
would change a text. Here the operator's `max_context` decides for all texts: within the original length the short
factors, beyond it the long ones. Without that setting such a model is refused. With the long factors a prompt beyond
the original length has the tokens of `generate()`. A text that begins within it differs, since `generate()` begins it
with the short ones. PhiMoE also has a scale for each set, selected in the same way. Dynamic NTK changes nothing
within a model's own length, and longer texts are refused.

## Recurrent layers

Gated DeltaNet, Kimi's delta attention, Mamba-1 and -2, lightning attention and RG-LRU keep one state a sequence and
layer, in float32. It has seen the committed tokens alone. Inputs of drafted tokens wait next to it until verification;
the next forward applies the accepted ones. So a rejected draft costs nothing, and no state is copied. Prefill and
decoding use one arithmetic, row after row, so a recomputed sequence has the same bits. A prompt that begins like
another goes on from the last page that carries a snapshot of the states. On a GPU such models run eagerly, by the
Triton kernels.

## Refused

| family | reason |
|---|---|
"""
REST = """
## What else transformers counts among causal language models

{parts}

{others}

The check at load decides about these: encoders are refused, since their attention is not causal, and so is whatever
differs from the model's own forward.
"""


def render() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    from betoken.engine.families import REFUSED_MULTIMODAL

    tiny = runpy.run_path(str(ROOT / "tests/engine/tiny.py"))
    recurrent = runpy.run_path(str(ROOT / "tests/verify_worker/test_recurrent_targets.py"))
    variants = runpy.run_path(str(ROOT / "tests/verify_worker/test_variant_targets.py"))
    drafted = dict.fromkeys([*recurrent["FAMILIES"], *variants["FAMILIES"]], "yes")
    through_services = _through_services()
    rows = []
    served = tiny["CONFIGS"] | tiny["HYBRIDS"] | tiny["VARIANTS"] | tiny["POPULAR"]
    for family, make in sorted(served.items()):
        config = make()
        rows_hold = "eager alone" if family in variants["EAGER"] else "yes"
        matrix = "embedded pair" if family == "llama" else through_services.get(type(config), "–")
        rows.append(f"| {' | '.join([family, _layers(config), 'yes', rows_hold, drafted.get(family, '–'), matrix])} |")
    refused = [f"| {family} | {_reason(tiny, family)} |" for family in sorted(tiny["REFUSED"])]
    refused += [
        f"| {family} | not even its text is served: {why} |" for family, why in sorted(REFUSED_MULTIMODAL.items())
    ]
    rest = _rest({make().model_type for make in (served | tiny["REFUSED"]).values()})
    return HEAD + "\n".join(rows) + "\n" + TEXTS + _texts() + STATES + "\n".join(sorted(refused)) + "\n" + rest


def _through_services() -> dict[type, str]:
    """Class of a configuration -> cells of the exactness matrix."""
    hybrids = runpy.run_path(str(ROOT / "tests/e2e/hybrids.py"))
    num_chosen = sum(len(cells) for cells in hybrids["CELLS"].values())
    whole = {type(make()): "all" for make in hybrids["CONFIGS"].values()}
    return whole | {type(make()): f"{num_chosen} cells" for make in hybrids["WIDER"].values()}


def _rest(named: set[str]) -> str:
    """The types of transformers' causal language models that no table names."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from betoken.engine.errors import ModelRefusedError
    from betoken.engine.families import REFUSED_MULTIMODAL, SERVED_MULTIMODAL
    from betoken.engine.weights.language_model import check_whole

    parts, others = [], []
    named = named | SERVED_MULTIMODAL | set(REFUSED_MULTIMODAL)
    for name in sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING} - named):
        try:
            check_whole(name, CONFIG_MAPPING[name])
            others.append(name)
        except ModelRefusedError:
            parts.append(name)
    lines = ["Parts of other models, refused by their type: " + ", ".join(parts), "Untested: " + ", ".join(others)]
    parts_text, others_text = (textwrap.fill(f"{line}.", 120, break_on_hyphens=False) for line in lines)
    return REST.format(parts=parts_text, others=others_text)


def _texts() -> str:
    lines = []
    for family, make in sorted(runpy.run_path(str(ROOT / "tests/engine/tiny_multimodal.py"))["CONFIGS"].items()):
        text = make().get_text_config(decoder=True)
        lines.append(f"| {family} | {text.model_type} | {_layers(text)} |\n")
    return "".join(lines)


def _layers(config: Any) -> str:
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    names = [kind.replace("_", " ") for kind in dict.fromkeys(kinds)]
    if any(getattr(config, name, 0) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        names.append("experts")
    return ", ".join(names)


def _reason(tiny: dict[str, Any], family: str) -> str:
    from betoken.engine.bring_up.load import load_runner
    from betoken.engine.config import EngineConfig
    from betoken.engine.errors import ModelRefusedError

    with tempfile.TemporaryDirectory() as folder:
        directory = tiny["save_tiny"](Path(folder), family)
        try:
            load_runner(EngineConfig(directory, num_pages=64, compile="off"))
        except ModelRefusedError as error:
            return str(error).replace(directory, "…").replace("|", "/")
    raise AssertionError(f"{family} is served")


if __name__ == "__main__":
    PAGE.write_text(render())
