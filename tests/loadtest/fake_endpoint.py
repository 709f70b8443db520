"""An endpoint with OpenAI's protocol in threads of this process: its answers are lists of events with pauses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 6.0
"""
REPORTED = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.75,
    "acceptance_histogram": [0, 1, 1],
    "acceptance_histogram_by_draft_length": {"2": [0, 1, 1]},
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 4,
    "num_spec_tokens": 2,
}


class FakeEndpoint:
    """Its answers, and the requests it received."""

    def __init__(self) -> None:
        self.pauses_s = [0.02, 0.01, 0.01]
        """Pause before each chunk of an answer."""
        self.tokens_per_chunk = 2
        self.metrics: dict[str, Any] | None = None
        """`metrics` of the last event."""
        self.counters: list[str] = []
        """Pages of `/metrics`, in order; the last is kept."""
        self.owner = "vllm"
        self.status = 200
        self.is_cut_off = False
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.num_connections = 0
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()
        self.url = ""

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        is_chat = path.endswith("/chat/completions")
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for pause_s in self.pauses_s:
            time.sleep(pause_s)
            yield {"choices": [{"index": 0, **({"delta": {"content": "a "}} if is_chat else {"text": "a "})}]}
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.pauses_s) * self.tokens_per_chunk}
        yield {"choices": [], "usage": usage} | ({"metrics": self.metrics} if self.metrics is not None else {})


@contextmanager
def serving(fake: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """`fake` at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            fake.num_connections += 1
            super().setup()

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:  # noqa: N802
            if self.path == "/v1/models":
                self._whole(200, json.dumps({"data": [{"id": "m", "owned_by": fake.owner}]}))
            elif self.path == "/metrics" and fake.counters:
                self._whole(200, fake.counters.pop(0) if len(fake.counters) > 1 else fake.counters[0])
            else:
                self._whole(404, json.dumps({"error": {"message": "no such path"}}))

        def do_POST(self) -> None:  # noqa: N802
            fake.bodies.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            if fake.status != 200:
                self._whole(fake.status, json.dumps({"error": {"message": "not today"}}))
                return
            with fake.lock:
                fake.num_running += 1
                fake.most_running = max(fake.most_running, fake.num_running)
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in fake.events(self.path):
                self._chunk(f"data: {json.dumps(event)}\n\n".encode())
            if not fake.is_cut_off:
                self._chunk(b"data: [DONE]\n\n")
            with fake.lock:
                fake.num_running -= 1
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def _whole(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
