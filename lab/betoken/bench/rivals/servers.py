"""Servers of the comparison: Betoken, llama.cpp, and OpenVINO GenAI in a separate process.

A side answers one prompt at a time. A Betoken server has a side for each drafter.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.loadtest.endpoint import Endpoint

START_TIMEOUT_S = 900.0
POLL_S = 0.2
LLAMA_KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "draft": ("--spec-type", "draft-simple"),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "draft+ngram": ("--spec-type", "ngram-map-k,draft-simple"),
}
"""Options of llama-server by the name of its side."""
OPENVINO_KINDS = ("none", "lookup")


@dataclass(frozen=True, slots=True)
class Load:
    """Models and requests of a comparison."""

    target: Path
    draft: Path
    threads: int
    max_tokens: int
    num_streams: int
    """Most requests at once."""
    context: int
    """Tokens of a request, its answer among them."""
    is_chat: bool
    """Whether prompts are messages of a user to the model's chat template."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    text: str
    num_tokens: int
    tokens_per_forward: float | None = None
    """Output tokens per forward of the target; None = not reported."""
    predicted: float | None = None
    """Speed over the speed without speculation as the router's policy expected it; None = not reported."""


Side = Callable[[str], Answer]


def request(load: Load, prompt: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy streamed request of OpenAI's protocol."""
    body: dict[str, Any] = {"max_tokens": load.max_tokens, "temperature": 0, "stream": True, **options}
    body["stream_options"] = {"include_usage": True}
    if load.is_chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", body | {"prompt": prompt}


def ask(endpoint: Endpoint, load: Load, prompt: str, options: Mapping[str, Any]) -> Answer:
    """The answer of a server of OpenAI's protocol.

    Raises:
        RequestFailedError: it failed, or reports no usage.
    """
    text, num_tokens, per_forward, predicted = "", 0, None, None
    for _, event in endpoint.stream(*request(load, prompt, options)):
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            statistics = (choice.get("betoken") or {}).get("speculation") or {}
            per_forward = statistics.get("block_efficiency", per_forward)
            predicted = (statistics.get("policy") or {}).get("expected_speedup") or predicted
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return Answer(text, num_tokens, per_forward, predicted)


@dataclass(frozen=True, slots=True)
class OurConfig:
    """Options of our services."""

    verify_threads: int
    draft_threads: int
    verify_options: Sequence[str] = ()
    """Further command-line options of the verify worker."""
    router_options: Sequence[str] = ()
    """Further command-line options of the router."""


@contextmanager
def our_sides(load: Load, drafters: Mapping[str, Any], ours: OurConfig) -> Iterator[dict[str, Side]]:
    """Sides of one local deployment, by drafter name."""
    config = LocalServicesConfig(
        target=str(load.target),
        draft=str(load.draft),
        attached_drafters=["ngram"],
        verify_threads=ours.verify_threads,
        draft_threads=ours.draft_threads,
        prefix_caching=False,  # every side is asked the same prompts
        http_port=0,
        verify_options=ours.verify_options,
        router_options=ours.router_options,
    )
    with LocalServices(config) as services:
        endpoint = Endpoint(f"http://{services.services['gateway'].address}")

        def side(fields: dict[str, Any]) -> Side:
            return lambda prompt: ask(endpoint, load, prompt, {"betoken": fields} if fields else {})

        yield {f"betoken {name}": side(fields) for name, fields in drafters.items()}


@contextmanager
def llama_side(load: Load, binary: Path, kind: str) -> Iterator[Side]:
    """A llama-server with one kind of speculation of `LLAMA_KINDS`.

    Raises:
        ValueError: it ended, or did not start in time.
    """
    port = free_port()
    command = [str(binary), "-m", str(load.target), "--host", "127.0.0.1", "--port", str(port), "--no-webui", "--jinja"]
    command += ["-t", str(load.threads), "-tb", str(load.threads), "-np", str(load.num_streams)]
    command += ["-c", str(load.num_streams * load.context), *LLAMA_KINDS[kind]]
    if "draft" in kind:
        command += ["-md", str(load.draft), "-td", str(load.threads)]
    with _process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _wait_for(f"http://127.0.0.1:{port}/health", process, f"llama.cpp {kind}")
        endpoint = Endpoint(f"http://127.0.0.1:{port}")
        yield lambda prompt: ask(endpoint, load, prompt, {"cache_prompt": False, "top_k": 1})


_OPENVINO = """
import json, sys
import openvino_genai as genai
model, kind, threads = sys.argv[1:4]
scheduler = genai.SchedulerConfig()
scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
options = {"prompt_lookup": True} if kind == "lookup" else {}
pipe = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=int(threads), **options)
print("ready", flush=True)
for line in sys.stdin:
    prompt, max_tokens, is_chat = json.loads(line)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = max_tokens, False, is_chat
    if kind == "lookup":
        config.num_assistant_tokens, config.max_ngram_size = 5, 3
    result = pipe.generate([prompt], config)
    print(json.dumps([result.texts[0], result.perf_metrics.get_num_generated_tokens()]), flush=True)
"""


@contextmanager
def openvino_side(load: Load, python: Path, kind: str) -> Iterator[Side]:
    """OpenVINO GenAI in another Python, one request at a time.

    Raises:
        ValueError: it cannot load the file.
    """
    command = [str(python), "-c", _OPENVINO, str(load.target), kind, str(load.threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with _process(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        lines, stdin = iter(process.stdout.readline, ""), process.stdin
        if not any(line.strip() == "ready" for line in lines):
            raise ValueError(f"OpenVINO GenAI cannot load {load.target}")

        def answer(prompt: str) -> Answer:
            stdin.write(json.dumps([prompt, load.max_tokens, load.is_chat]) + "\n")
            stdin.flush()
            return Answer(*json.loads(next(lines)))

        yield answer


def free_port() -> int:
    """A TCP port of the loopback device that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[Any], name: str) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise ValueError(f"{name} ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=POLL_S * 10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise ValueError(f"{name} did not start within {START_TIMEOUT_S:g} s")
