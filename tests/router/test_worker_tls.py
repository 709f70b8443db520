"""The router's links to workers that speak TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from betoken.common.errors import BetokenError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from betoken.common.tls import ServerTls
from betoken.router.__main__ import run
from betoken.router.core import Router
from betoken.router.settings import RouterSettings
from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from betoken.testing.fake_verify_worker import FakeVerifyWorker, verify_hello
from tests.certificates import make_certificate


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """worker.{pem,key} and router.{pem,key}, for these names; each signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("worker", "router"):
        make_certificate(folder, name, name)
    return folder


async def test_links_speak_tls_and_show_a_certificate(files: Path, tokenizer: Tokenizer) -> None:
    model = FakeModel(vocab_size=tokenizer.vocab_size)
    worker = FakeVerifyWorker(model, verify_hello(model, tokenizer.hash))
    worker.credentials = ServerTls(files / "worker.pem", files / "worker.key", files / "router.pem").credentials()
    await worker.start()

    async def connect(**options: Any) -> str:
        router = Router(RouterSettings(verify=(worker.address,), tokenizer="test", **options), tokenizer)
        link = router.verify.workers[0].link
        try:
            return (await link.connect_once()).worker_id
        finally:
            await link.close()

    named = {"worker_tls_ca_file": files / "worker.pem", "worker_tls_server_name": "worker"}
    own = {"worker_tls_cert_file": files / "router.pem", "worker_tls_key_file": files / "router.key"}
    try:
        assert await connect(**named, **own) == worker.hello.worker_id
        for options in ({}, named):
            with pytest.raises(UnavailableError):
                await connect(**options)
    finally:
        await worker.kill()


@pytest.mark.parametrize("name", ["worker_tls_cert_file", "worker_tls_key_file", "worker_tls_server_name"])
def test_incomplete_tls_options_of_workers_are_rejected(files: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="--worker-tls"):
        RouterSettings(verify=("a:1",), tokenizer="test", **{name: str(files / "router.pem")})


def test_a_missing_worker_tls_file_is_named_at_the_start(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RouterSettings.parse(["--verify", "a:1", "--tokenizer", "t", "--worker-tls-ca-file", str(files / "none.pem")])
    assert "--worker-tls-ca-file" in (told := capsys.readouterr().err) and "none.pem" in told


async def refusal(**files: Path) -> BetokenError:
    with pytest.raises(BetokenError) as caught:
        options: dict[str, Any] = {f"worker_tls_{name}": file for name, file in files.items()}
        await run(RouterSettings(verify=("a:1",), tokenizer="nowhere", **options))
    return caught.value


async def test_invalid_worker_tls_files_are_rejected_at_the_start(files: Path, tmp_path: Path) -> None:
    ca_file, empty, gone = files / "worker.pem", tmp_path / "empty.pem", tmp_path / "gone.pem"
    empty.touch()
    refused = await refusal(ca_file=empty)
    assert isinstance(refused, InvalidArgumentError) and str(empty) in str(refused)
    refused = await refusal(ca_file=ca_file, cert_file=ca_file, key_file=files / "router.key")
    assert isinstance(refused, InvalidArgumentError) and str(ca_file) in str(refused)
    gone.touch()
    settings = RouterSettings(verify=("a:1",), tokenizer="nowhere", worker_tls_ca_file=gone)
    gone.unlink()
    with pytest.raises(FailedPreconditionError, match="gone.pem"):
        await run(settings)
