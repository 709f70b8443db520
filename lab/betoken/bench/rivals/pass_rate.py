"""Problems of HumanEval that a model solves, served by us and by llama.cpp from the same file.

    python -m betoken.bench.rivals.pass_rate --target T.gguf --draft D.gguf --prompts HumanEval.jsonl.gz \
        --llama-server PATH --results FILE

Every problem is a message to the model's chat template, answered greedily. The code of the answer runs with the
problem's tests in a subprocess with limits of time and memory: use a container that is made for it. Finished
answers are kept in `--results`, so that a run that was interrupted goes on. The last stdout line is one JSON object.
Source: Chen et al., arXiv:2107.03374 (pass@1 with one answer).
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions, num_cores
from betoken.bench.rivals.servers import Load, OurConfig, Side, llama_side, our_sides

INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block and nothing else.\n\n"
TEST_TIMEOUT_S = 20.0
_LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
"""Lines before a program: it may take 1 GiB."""
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
Problem = dict[str, Any]


def load_problems(path: Path, limit: int) -> list[Problem]:
    """Read problems with `task_id`, `prompt`, `test` and `entry_point`; at most `limit`, evenly over the file.

    Raises:
        ValueError: one lacks a field.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    for problem in problems:
        if missing := {"task_id", "prompt", "test", "entry_point"} - problem.keys():
            raise ValueError(f"--prompts {path.name}: a problem has no {min(missing)}")
    return problems[:: max(1, len(problems) // limit)][:limit]


def program(problem: Problem, answer: str) -> str:
    """Return the answer's code, after the problem's imports, and its tests."""
    block = _BLOCK.search(answer)
    imports = problem["prompt"].split("def ")[0]
    code = block.group(1) if block else answer
    return f"{imports}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def passes(source: str) -> bool:
    """Return whether a program ends without an error, in time and memory."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _LIMIT + source],
                cwd=directory,
                capture_output=True,
                timeout=TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def solve(
    name: str, side: Side, problems: Sequence[Problem], results: Path, num_streams: int = 1
) -> list[dict[str, Any]]:
    """Return a row for each problem, from the file of results or by asking the side, `num_streams` at once."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    known = {row["task_id"]: row for row in rows if row["side"] == name}
    missing = [problem for problem in problems if problem["task_id"] not in known]
    pool = ThreadPoolExecutor(num_streams)
    try:
        asked = {pool.submit(side, INSTRUCTION + problem["prompt"]): problem for problem in missing}
        for future in as_completed(asked):
            problem, answer = asked[future], future.result()
            row = {"side": name, "task_id": problem["task_id"], "passes": passes(program(problem, answer.text))}
            row |= {"num_tokens": answer.num_tokens, "text": answer.text}
            known[problem["task_id"]] = row
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}: {len(known)} of {len(problems)}", file=sys.stderr)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failed request the rest is not asked
    return [known[problem["task_id"]] for problem in problems]


def measure(options: argparse.Namespace) -> int:
    """Ask both servers, one after the other, and print how many problems each solves."""
    problems = load_problems(options.prompts, options.limit)
    streams = options.streams
    load = Load(options.target, options.draft, options.threads, options.max_new_tokens, streams, 2048, is_chat=True)
    sides: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        ours = OurConfig(options.threads, options.threads)
        side = stack.enter_context(our_sides(load, {"default": {}}, ours))["betoken default"]
        sides["betoken"] = solve("betoken", side, problems, options.results, streams)
    with llama_side(load, options.llama_server, "none") as side:
        sides["llama.cpp"] = solve("llama.cpp", side, problems, options.results, streams)
    counts = {name: sum(row["passes"] for row in rows) for name, rows in sides.items()}
    pairs = list(zip(*sides.values(), strict=True))
    num_equal = sum(one["text"] == other["text"] for one, other in pairs)
    num_same = sum(one["passes"] == other["passes"] for one, other in pairs)
    print(f"{len(problems)} problems: {counts}; equal texts {num_equal}, same verdict {num_same}")
    about = {"hardware": describe_hardware(), "versions": describe_versions(), "target": options.target.name}
    found = {"num_problems": len(problems), "passed": counts, "equal_texts": num_equal, "same_verdicts": num_same}
    print(json.dumps({"bench": "rivals.pass_rate"} | about | found))
    return 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.rivals.pass_rate", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="GGUF file of the target model")
    add("--draft", type=Path, required=True, help="GGUF file of the draft model")
    add("--prompts", type=Path, required=True, help="HumanEval's .jsonl or .jsonl.gz")
    add("--llama-server", type=Path, required=True, help="llama.cpp's server")
    add("--results", type=Path, required=True, help="JSONL file of finished answers")
    add("--limit", type=positive, default=164, help="number of problems")
    add("--max-new-tokens", type=positive, default=512, help="tokens of an answer")
    add("--streams", type=positive, default=1, help="problems at once")
    add("--threads", type=positive, default=num_cores(), help="CPU threads of each engine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.rivals.pass_rate", lambda: measure(parse_options())))
