"""`betoken info`: the model and its workers as the router reports them."""

import json
from io import StringIO

import pytest
from rich.console import Console

from betoken.cli.info import _console, _worker_table
from betoken.client import (
    InternalError,
    WorkerStatus,
)
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2
from tests.client.command import run


def test_texts_of_routers_and_workers_move_no_cursor(router) -> None:
    evil = "a\x1b[2J\r\nb"
    hello = types_pb2.WorkerHello(role="verify", model_id=evil, dtype=evil)
    worker = pb.WorkerInfo(address="a:1", state="refused", detail=evil, hello=hello)
    router.will(pb.GetModelInfoResponse(model=evil, drafters=[evil], verify_workers=[worker]))
    router.will(InternalError(evil))
    router.has_chat_template = None
    reported = [run("info", "--address", router.address) for _ in range(2)]
    assert "a:1 is refused: a\\x1b[2J\\r\\nb\n" in reported[0].stdout
    assert reported[1].stderr.startswith("betoken: INTERNAL: a\\x1b[2J\\r\\nb (")
    assert not {"\x1b", "\r"} & set(reported[0].stdout + reported[1].stderr)


def test_info_shows_workers_at_once_while_none_is_ready(router) -> None:
    worker = pb.WorkerInfo(address="a:1", state="connecting", detail="no handshake within 5.0 s")
    answer = pb.GetModelInfoResponse(verify_workers=[worker], version="1.2.3")
    router.will(answer)
    result = run("info", "--address", router.address)
    assert router.requests[0].at_once
    assert result.exit_code == 0 and "no verify worker has been met yet" in result.stdout
    assert "a:1 is connecting: no handshake within 5.0 s\n" in result.stdout and "1.2.3" in result.stdout
    router.will(answer)
    reported = json.loads(run("info", "--json", "--address", router.address).stdout)
    assert (reported["model"], reported["verify_workers"][0]["state"]) == ("", "connecting")


def test_info_shows_the_model_and_its_workers(router) -> None:
    hello = types_pb2.WorkerHello(role="verify", model_id="tiny", step_costs=[{"rows": 1, "context": 512, "ns": 10**6}])
    hello.drafters.append("ngram")
    workers = [
        pb.WorkerInfo(address="a:1", state="ready", hello=hello, load={"free_pages": 3, "total_pages": 9}),
        pb.WorkerInfo(address="[fd00::5]:2", state="refused", detail="tokenizers [differ]"),
    ]
    answer = pb.GetModelInfoResponse(
        model="tiny",
        drafters=["model", "ngram"],
        default_drafter="model",
        verify_workers=workers,
        num_overlap_outcomes=3,
    )
    router.will(answer)
    result = run("info", "--address", router.address)
    assert result.exit_code == 0 and "tiny" in result.stdout and "model, ngram (attached)" in result.stdout
    assert "draft ahead for 3 outcomes" in result.stdout
    assert "[fd00::5]:2 is refused: tokenizers [differ]\n" in result.stdout
    assert result.stdout.count("[fd00::5]:2") == 2
    router.will(answer)
    info = json.loads(run("info", "--json", "--address", router.address).stdout)
    assert info["model"] == "tiny" and info["verify_workers"][0]["free_pages"] == 3


def test_info_shows_names_that_look_like_markup_literally(router) -> None:
    hello = types_pb2.WorkerHello(role="verify", model_id="llama[fp16]")
    workers = [pb.WorkerInfo(address="a:1", state="ready", hello=hello)]
    router.will(pb.GetModelInfoResponse(model="models/[old]/llama[fp16]", verify_workers=workers))
    result = run("info", "--address", router.address)
    assert result.exit_code == 0 and "models/[old]/llama[fp16]" in result.stdout
    assert result.stdout.count("llama[fp16]") == 2


def test_info_shows_the_memory_of_workers_by_kind(router) -> None:
    memory = {"weight_bytes": 986_000_000, "kv_bytes": 1_073_741_824, "other_bytes": 512_300_000}
    hello = types_pb2.WorkerHello(role="verify", model_id="m", **memory)
    workers = [pb.WorkerInfo(address="a:1", state="ready", hello=hello)]
    router.will(pb.GetModelInfoResponse(model="m", verify_workers=workers))
    shown = run("info", "--address", router.address).stdout
    assert "weights 986.0 MB, KV pages 1073.7 MB, other 512.3 MB" in shown


@pytest.mark.parametrize("mask_token_id", [0, 151665])
def test_info_shows_the_mask_token_of_a_parallel_drafter(router, mask_token_id: int) -> None:
    hello = types_pb2.WorkerHello(role="draft", drafters=["model"], mask_token_id=mask_token_id)
    other = pb.WorkerInfo(address="a:2", state="ready", hello=types_pb2.WorkerHello(role="draft", drafters=["ngram"]))
    workers = [pb.WorkerInfo(address="a:1", state="ready", hello=hello), other]
    answer = pb.GetModelInfoResponse(model="m", draft_workers=workers)
    router.will(answer)
    shown = run("info", "--address", router.address).stdout
    assert f"PARD, one forward per draft, mask token {mask_token_id}\n" in shown
    router.will(answer)
    reported = json.loads(run("info", "--json", "--address", router.address).stdout)["draft_workers"]
    assert [worker["mask_token_id"] for worker in reported] == [mask_token_id, None]


@pytest.mark.parametrize(("is_by_token", "how"), [(True, "token by token (TLI)"), (False, "as text (SLEM)")])
def test_info_shows_the_translation_of_drafts(router, is_by_token: bool, how: str) -> None:
    translation = types_pb2.DraftTranslation(is_by_token=is_by_token, coverage=0.875)
    hello = types_pb2.WorkerHello(role="draft", drafters=["model"], translation=translation)
    answer = pb.GetModelInfoResponse(
        model="m", draft_workers=[pb.WorkerInfo(address="a:1", state="ready", hello=hello)]
    )
    router.will(answer)
    assert f"{how}, 88% of the target's tokens are common" in run("info", "--address", router.address).stdout
    router.will(answer)
    (worker,) = json.loads(run("info", "--json", "--address", router.address).stdout)["draft_workers"]
    assert worker["translation"] == {"is_by_token": is_by_token, "coverage": 0.875}


def test_info_shows_the_progress_of_a_loading_worker(router) -> None:
    worker = pb.WorkerInfo(address="a:1", state="loading", detail="packing weights", loading_fraction=0.43)
    router.will(pb.GetModelInfoResponse(verify_workers=[worker]))
    shown = run("info", "--address", router.address).stdout
    assert "the model is loading: packing weights (43%)" in shown
    assert "a:1 is loading: packing weights (43%)" in shown


@pytest.mark.parametrize("width", [90, 80, 76, 60, 20])
def test_info_shows_whole_numbers_in_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [
        WorkerStatus.from_proto(
            pb.WorkerInfo(
                address=f"unix:/srv/betoken-abcdefgh/{role}.sock",
                state="ready",
                hello=types_pb2.WorkerHello(
                    role=role,
                    model_id="models/target",
                    dtype="bfloat16",
                    step_costs=[{"rows": 1, "ns": 25_300_000}, {"rows": 8, "ns": 121_900_000}],
                ),
                load={"running": 128, "free_pages": 16384, "total_pages": 16384},
            ),
            role,
        )
        for role in ("verify", "draft")
    ]
    workers.append(WorkerStatus.from_proto(pb.WorkerInfo(address="127.0.0.1:50052", state="connecting"), "draft"))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console = Console(file=StringIO(), width=_console().width)
    console.print(_worker_table(workers))
    output = console.file.getvalue()
    for whole in ("16384/16384", "25.3, 121.9", " 128 ", "verify ", "connecting "):
        assert whole in output, output


def test_info_reports_a_router_that_cannot_be_reached() -> None:
    result = run("info", "--address", "127.0.0.1:1", "--timeout-s", "1")
    assert result.exit_code == 1 and result.stderr.startswith("betoken: ")
