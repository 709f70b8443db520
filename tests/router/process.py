"""The router as a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from betoken.testing.fake_verify_worker import FakeVerifyWorker, verify_hello
from tests.router.harness import byte_tokenizer_json


async def start(*arguments: str, program: Sequence[str] = ("-m", "betoken.router")) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *program, *arguments, stdout=pipe, stderr=pipe)


@asynccontextmanager
async def serving(
    tmp_path: Path, tokenizer: Tokenizer, **options: Sequence[str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router over a fake verify worker, and its address."""
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    model = FakeModel(vocab_size=tokenizer.vocab_size)
    verifier = FakeVerifyWorker(model, verify_hello(model, tokenizer.hash), step_s=0.002)
    await verifier.start()
    ready_file = tmp_path / "ready"
    arguments = ["--verify", verifier.address, "--tokenizer", str(tmp_path), "--ready-file", str(ready_file)]
    process = await start(*arguments, "--port", "0", "--drain-grace-s", "600", **options)
    try:
        async with asyncio.timeout(60):
            while not ready_file.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield process, f"127.0.0.1:{json.loads(ready_file.read_text())['port']}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await verifier.kill()
    assert not verifier.violations
