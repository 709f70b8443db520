"""Runs the kernels that requests may need besides a forward once, so that none waits for their compilation.

A kernel is compiled for types, sizes and alignments, never for values: one small call of each kind stands for all. It
knows what engine calls there are, not which of them a worker makes.
"""

import torch

from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, perturbed_top
from betoken.engine.sampler.draft_probs import sample_drafts
from betoken.engine.sampler.verification import BlockGroup, VerificationMode, verify_blocks
from betoken.engine.sampling import SamplingParams
from betoken.engine.state_table import PageList
from betoken.engine.tree import KeptPath

_RAW = SamplingParams(temperature=0.8, num_logprobs=1)
_ADJUSTED = SamplingParams(temperature=0.8, logit_bias=((0, 1.0),))
"""Logits processors convert logits to float32, which then use other kernels."""


def warm_up(runner: ModelRunner) -> None:
    """Choose, verify in every mode, draft and compact; leaves the page table as it was."""
    page_ids = PageList()
    runner.page_table.extend(page_ids, 2)
    try:
        one_row = runner.forward([Segment(page_ids, 0, [0], 1)]).logits
        runner.compact([KeptPath(page_ids, 0, [1])])
    finally:
        runner.page_table.release(page_ids)
    for params in (_RAW, _ADJUSTED):
        block = SampleGroup(params, [0], [], [0])
        groups = [BlockGroup(block, mode) for mode in VerificationMode]
        verify_blocks(one_row.repeat(block.num_rows * len(groups), 1), groups)
        drafted = [SampleGroup(params, [0], [], [])]
        perturbed_top(one_row, drafted, num_top=1, scale=1.0)
        sample_drafts(one_row, drafted)
    if one_row.device.type == "cuda":
        torch.cuda.synchronize(one_row.device)  # a fault of a kernel shows here, not in a request
