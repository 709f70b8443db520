"""Made-up measurements for the tests of the drafter table."""

from collections.abc import Mapping
from dataclasses import replace

from betoken.bench.baseline import BASELINE_NAMES
from betoken.bench.drafters_store import PromptRun, SideRun, Task
from betoken.bench.identity_check import IdentityCount
from betoken.client import SpeculationPolicy, SpeculationStats
from betoken.v1 import generation_pb2 as pb

NUM_TOKENS = 100
STATS = replace(
    SpeculationStats.from_proto(pb.SpeculationStats()),
    num_drafts=20,
    num_draft_tokens=100,
    num_accepted_tokens=75,
    num_accepted_per_position=(20, 19, 18, 18),
    num_drafted_per_position=(25, 25, 25, 25),
    num_verify_forwards=25,
    num_emitted_tokens=100,
    num_rounds=25,
    num_draft_forwards=125,
    draft_forward_s=0.058,
    first_draft_forward_s=0.010,
    draft_queue_s=0.075,
    policy=SpeculationPolicy(
        "model", False, False, False, True, 1.9, "on: expected 1.9 of decoding without speculation"
    ),
)


def made_up_run(
    index: int,
    speeds: Mapping[str, float],
    prompts: str = "file.jsonl",
    category: str = "code",
    repeat: int = 0,
    identity: IdentityCount | None = None,
) -> PromptRun:
    """All sides at the given tokens per second; identical by default."""
    runs = {}
    for name, speed in speeds.items():
        has_stats = name != "none" and name not in BASELINE_NAMES.values()
        runs[name] = SideRun(NUM_TOKENS, NUM_TOKENS / speed, STATS if has_stats else None)
    identity = identity or IdentityCount(compared=len(speeds) - 1, identical=len(speeds) - 1)
    return PromptRun(Task(prompts, index, repeat), category, runs, identity, "abc123", 0.5)
