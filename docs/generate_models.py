"""Writes models.md beside this file: families of models, how each is tried, and what is refused and why.

Families are those of the tests' tiny checkpoints. A reason is what loading such a checkpoint says.
"""

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("models.md")
HEAD = """# Models

`transformers`' causal language models whose layers are attention, recurrences or convolutions that the engine knows. A
checkpoint is checked at load: a ragged batch against the model's own forward, and every row against itself alone. This
page is made by `make docs` from the tests' tiny random checkpoints; a test compares it with them.

- **own**: logits of a ragged batch equal those of the model's own eager forward, in float32 and bf16.
- **rows**: a row has the same bits in any company and any chunks, eager and compiled.
- **drafts**: random drafts, trees, stale blocks and preemption give plain decoding's tokens, and those of `generate()`.
- **matrix**: every drafter through real services, as target and as draft model (`tests/e2e`).

| family | layers | own | rows | drafts | matrix |
|---|---|---|---|---|---|
"""
STATES = """
## Recurrent layers

Gated DeltaNet, Kimi's delta attention, Mamba-1 and -2, lightning attention and RG-LRU keep one state a sequence and
layer, in float32. It has seen the committed tokens alone. Inputs of drafted tokens wait beside it until the verdict;
the next forward applies the accepted ones. So a rejected draft costs nothing, and no state is copied. Prefill and
decoding use one arithmetic, row after row, so a recomputed sequence has the same bits. Pages of such models are not
shared between sequences yet: a prompt that begins like another is computed anew. On a GPU they run eagerly, by the
Triton kernels.

## Refused

| family | reason |
|---|---|
"""
_MATRIX = {"llama": "embedded pair", "lfm2": "yes", "qwen3_5": "yes", "granitemoehybrid": "yes"}


def render() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    tiny = runpy.run_path(str(ROOT / "tests/engine/tiny.py"))
    recurrent = runpy.run_path(str(ROOT / "tests/verify_worker/test_recurrent_targets.py"))
    drafted = dict.fromkeys(["llama", *recurrent["FAMILIES"]], "yes")
    rows = []
    for family, make in sorted((tiny["CONFIGS"] | tiny["HYBRIDS"]).items()):
        cells = [family, _layers(make()), "yes", "yes", drafted.get(family, "–"), _MATRIX.get(family, "–")]
        rows.append(f"| {' | '.join(cells)} |")
    refused = [f"| {family} | {_reason(tiny, family)} |" for family in sorted(tiny["REFUSED"])]
    return HEAD + "\n".join(rows) + "\n" + STATES + "\n".join(refused) + "\n"


def _layers(config: Any) -> str:
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    names = [kind.replace("_", " ") for kind in dict.fromkeys(kinds)]
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
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
