"""The benchmarks' own prompts, and the reader of prompt files they share with `betoken bench`."""

from pathlib import Path

from betoken.loadtest.prompts import Prompt, fingerprint, load_prompts

__all__ = ["OWN_PROMPTS", "Prompt", "fingerprint", "load_prompts"]

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
