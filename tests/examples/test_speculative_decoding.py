"""The algorithm's page produces the target's own tokens: equal to `generate()`, with and without drafts."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = ROOT / "models" / "target", ROOT / "models" / "draft"
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "speculative_decoding.py"))
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(path):", "class Stack:\n    def push(self, item):"]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def runners() -> tuple[ModelRunner, ModelRunner]:
    options = {"dtype": "float32", "compile": "off", "num_pages": 64, "max_num_batched_tokens": 16, "num_threads": 1}
    return tuple(load_runner(EngineConfig(str(path), **options)) for path in (TARGET, DRAFT))  # type: ignore[return-value, arg-type]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_output_is_that_of_generate(prompt, runners):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ids = tokenizer.encode(prompt, return_tensors="pt")
    expected = model.generate(ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
    params = SamplingParams(
        temperature=0.0,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_ids=(model.config.eos_token_id,),
    )
    output_ids, num_forwards = EXAMPLE["generate"](*runners, params, ids[0].tolist(), num_draft_tokens=4)
    assert output_ids == expected[0, ids.shape[1] :].tolist()
    assert num_forwards < NUM_TOKENS, "no draft was ever accepted"


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_drafts_change_no_sampled_token(num_draft_tokens, runners):
    prompt_ids = AutoTokenizer.from_pretrained(TARGET).encode(PROMPTS[0] * 6)  # longer than a forward
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_new_tokens=NUM_TOKENS)
    plain, num_plain = EXAMPLE["generate"](*runners, params, prompt_ids, num_draft_tokens=0)
    drafted, num_drafted = EXAMPLE["generate"](*runners, params, prompt_ids, num_draft_tokens)
    assert drafted == plain
    assert num_drafted < num_plain == NUM_TOKENS


def test_pages_are_free_afterwards(runners):
    EXAMPLE["generate"](*runners, SamplingParams(max_new_tokens=8), [5, 6, 7], num_draft_tokens=4)
    for runner in runners:
        assert runner.page_table.num_free == runner.page_table.num_pages
        runner.page_table.check_integrity([])
