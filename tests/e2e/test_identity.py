"""Eight prompts of the exactness matrix through real processes: against transformers, and between our own runs."""

import json
from pathlib import Path

import pytest

from betoken.bench.identity import main
from tests.products import slow

CELLS = [
    "float32-t0-none-k0-c1",
    "float32-t0-model-k4-c8",
    "float32-t0-ngram-k8-c1",
    "float32-t0-model_tree-k8-c8",
    "float32-t0.8-ngram_chain-k4-c8",
    "float32-t0.8-early_exit_tree-k4-c8",
    "float32-t0-staged-k4-c8",
    "float32-t0.8-suffix-k4-c8",
    "float32-t0-lookahead-k8-c8",
    "float32-t0.8-fused-kauto-c8",
    "bfloat16-t0.8-model_tree-k4-c8-preemption",
    "bfloat16-t0.8-ngram@attached-k4-c8-preemption",
]
"""On three sets of services: a dtype, few pages or many, a drafter attached or remote."""
FURTHER = [
    "float32-t0.8-model-k4-c8",
    "float32-t0.8-lookahead-k8-c1",
    "float32-t0.8-fused-k4-c8",
    "float32-t0-ngram-kauto-c8",
    "bfloat16-t0-ngram-k4-c8-preemption",
    "bfloat16-t0-ngram@attached-k4-c8-preemption",
    "float32-t0-ngram@attached-k8-c8",
    "float32-t0.8-ngram_chain@attached-k4-c1",
    "float32-t0.8-suffix_chain-k8-c8",
    "bfloat16-t0.8-suffix@attached-k4-c8-preemption",
    "bfloat16-t0-suffix_chain@attached-k8-c1",
]
"""Cells whose drafters, lengths, temperatures and services occur in other cells, too."""
PARALLEL = [
    "float32-t0-model_pard-k8-c1",
    "float32-t0-model_pard-k1-c8",
    "float32-t0.8-model_pard-k4-c8",
    "float32-t0.8-model_pard_tree-k8-c8",
    "bfloat16-t0.8-model_pard-k4-c8-preemption",
]
"""Cells of a PARD model, which was not trained as one."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cells", [CELLS, PARALLEL, *slow(FURTHER)], ids=["default", "parallel", "further"])
def test_eight_prompts_of_the_identity_matrix_have_equal_tokens(
    cells: list[str], pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", pair.target, "--draft", pair.draft, "--limit", "8", "--max-new-tokens", "24"]
    arguments += ["--few-pages", "24", "--compile", "off", "--out", str(tmp_path), "--cells", *cells]
    status = main(arguments)
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert status == 0, output
    assert summary["cells"] == len(cells)
    assert summary["compared"] == 8 * len(cells)
    assert summary["identical"] + summary["near_ties"] == summary["compared"]
    assert summary["are_pages_free"]
