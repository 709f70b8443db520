"""The comparison with other engines: all sides get the same prompts, and speeds need equal answers."""

import http.server
import json
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status
from betoken.bench.rivals import __main__ as rivals
from betoken.bench.rivals.__main__ import PLAIN, Rivals, markdown
from betoken.bench.rivals.servers import Answer, Load, Side, ask, llama_side
from betoken.loadtest.endpoint import Endpoint, RequestFailedError

LOAD = Load(Path("t.gguf"), Path("d.gguf"), 2, 16, 1, 128, is_chat=False)


def constant(text: str, per_forward: float | None = None, predicted: float | None = None) -> Side:
    return lambda prompt: Answer(f"{prompt} {text}", 4, per_forward, predicted)


def measured(**sides: Side) -> Rivals:
    bench = Rivals({name.replace("_", " "): side for name, side in sides.items()})
    bench.measure(["a"])
    bench.measure(["b"])
    return bench


def test_a_report_compares_speeds_with_both_engines_without_speculation() -> None:
    sides = {PLAIN: constant("x", 1.0), "betoken ngram": constant("x", 2.5, 1.8), "llama.cpp none": constant("y")}
    bench = Rivals(sides)
    bench.measure(["a"])
    bench.speeds = {PLAIN: [2.0], "betoken ngram": [4.0], "llama.cpp none": [1.0]}
    rows = bench.report()
    assert [row["side"] for row in rows] == ["betoken ngram", PLAIN, "llama.cpp none"]
    assert rows[0][f"by {PLAIN}"][0] == 2.0 and rows[0]["by llama.cpp none"][0] == 4.0
    assert "| betoken ngram | 4.0 | 2.5 | 2.00 [2.00, 2.00] | 4.00 [4.00, 4.00] | 1.8 | 1 of 1 |" in markdown(rows)


def test_our_answer_that_differs_with_a_drafter_is_reported() -> None:
    bench = measured(betoken_none=constant("x"), betoken_model=constant("y"), betoken_ngram=constant("x"))
    assert bench.differing() == ["betoken model"]


def test_an_answer_of_another_engine_that_differs_is_counted_and_no_fault() -> None:
    sides = {PLAIN: constant("x"), "llama.cpp none": constant("y"), "llama.cpp draft": constant("z")}
    bench = Rivals(sides)
    bench.measure(["a"])
    assert not bench.differing()
    assert bench.num_equal("llama.cpp draft") == 0 and bench.num_equal("llama.cpp none") == 1


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"] == "refused":
            self.send_error(400)
            return
        choice = {
            "text": "ab",
            "betoken": {"speculation": {"block_efficiency": 1.5, "policy": {"expected_speedup": 1.4}}},
        }
        events = [{"choices": [choice]}, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


def test_an_answer_has_the_text_and_the_usage_of_its_stream(endpoint: Endpoint) -> None:
    assert ask(endpoint, LOAD, "hi", {}) == Answer("ab", 16, 1.5, 1.4)
    with pytest.raises(RequestFailedError, match="400"):
        ask(endpoint, LOAD, "refused", {})


def test_a_llama_server_that_ends_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(f"#!{sys.executable}\nraise SystemExit(7)\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)

    def start() -> int:
        with llama_side(LOAD, binary, "draft"):
            return 0

    assert exit_status("betoken.bench.rivals", start) == EXIT_NOTHING_MEASURED
    assert "llama.cpp draft ended with status 7" in capsys.readouterr().err


def test_a_side_of_ours_is_named_for_its_drafter() -> None:
    options = rivals.parse_options(["--target", "t", "--draft", "d", "--drafters", "none", "fused"])
    assert options.drafters == ["none", "fused"] and set(options.drafters) <= set(rivals.OURS)
