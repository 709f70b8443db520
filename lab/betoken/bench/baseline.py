"""Handle of the `transformers` process: starts it, asks it, finds each method's best number of threads.

Imports no framework itself, so that the process that times the services stays light.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from betoken.bench.machine import num_cores

PLAIN, ASSISTED, PROMPT_LOOKUP = "plain", "assisted", "prompt_lookup"
BASELINE_NAMES = {
    PLAIN: "transformers_generate",
    ASSISTED: "transformers_assisted",
    PROMPT_LOOKUP: "transformers_prompt_lookup",
}
"""Method to its name in reports."""
SERVICE_ONLY_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")
"""Environment of services that share cores; a timed baseline has all cores."""


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """One `generate()` call: ids without the prompt's, and the seconds it took."""

    prompt_ids: list[int]
    ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class BaselineSampling:
    """Sampling of the baseline; temperature 0 is greedy, then top_p is not used."""

    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False
    """EOS does not end the answer."""


class BaselineError(RuntimeError):
    """The transformers process failed or answered with an error."""


class Baseline:
    """`transformers` in a separate process; a context manager, not safe for concurrent use."""

    def __init__(
        self,
        target: str,
        draft: str | None,
        dtype: str,
        sampling: BaselineSampling,
        device: str = "cpu",
        is_timed: bool = True,
    ) -> None:
        """`is_timed`: its seconds are wanted, so it runs alone; otherwise other work may want the cores meanwhile."""
        self._sampling = sampling
        self._is_on_cpu = device == "cpu"
        self.num_threads: dict[str, int] = {}
        environment = {k: v for k, v in os.environ.items() if k not in SERVICE_ONLY_VARIABLES}
        if not is_timed:  # spinning threads block the threads they wait for: 46 s instead of 2 on a loaded machine
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "betoken.bench.transformers_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal reaches the benchmark only, which ends this
            env={**environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        self._ask({"target": target, "draft": draft, "dtype": dtype, "device": device})

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is at: it keeps nothing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def generate(
        self, method: str, prompt: str, max_new_tokens: int, seed: int = 0, num_threads: int | None = None
    ) -> BaselineRun:
        """Run one `generate()`; threads default to the best found, else to all cores.

        Raises:
            BaselineError: `generate()` raised or the process is gone.
        """
        reply = self._ask(
            {
                "op": "generate",
                "method": method,
                "prompt": prompt,
                "max_new_tokens": max_new_tokens,
                "seed": seed,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "ignore_eos": self._sampling.ignore_eos,
                "num_threads": num_threads or self.num_threads.get(method, num_cores()),
            }
        )
        return BaselineRun(reply["prompt_ids"], reply["ids"], reply["seconds"])

    def gap(self, prompt: str, position: int) -> float:
        """Top-2 logit gap of greedy decoding at output position `position` (0-based)."""
        request = {"op": "gap", "prompt": prompt, "position": position, "ignore_eos": self._sampling.ignore_eos}
        return float(self._ask(request)["gap"])

    def choose_num_threads(self, methods: Sequence[str], prompt: str, max_new_tokens: int) -> dict[str, int]:
        """Time each method on one prompt with 1, 2, 4, ... threads up to all cores; keep and return the fastest.

        On a GPU there is nothing to choose: all cores."""
        powers = range(num_cores().bit_length() + 1) if self._is_on_cpu else ()
        candidates = sorted({num_cores(), *(min(2**power, num_cores()) for power in powers)})
        for method in methods:
            self.generate(method, prompt, max_new_tokens, num_threads=candidates[-1])
            seconds = {
                n: min(self.generate(method, prompt, max_new_tokens, num_threads=n).seconds for _ in range(2))
                for n in candidates
            }
            self.num_threads[method] = min(seconds, key=lambda n: seconds[n])
        return dict(self.num_threads)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BaselineError(f"the transformers process ended with status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BaselineError(reply["error"])
        return reply
