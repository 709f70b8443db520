"""Synthetic workers end to end: the same tokens however drafted, and labels in every output."""

import asyncio
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from betoken.cli.report import as_json
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.e2e.in_process import running, save_pair, until_all_pages_are_free

DRAFT = {"drafters": ("synthetic",), "synthetic": "step_ms=0.1"}
VERIFY = {"synthetic": "step_ms=1:0.2,8:0.4"}


async def test_synthetic_answers_are_exact_and_labelled(tmp_path, caplog) -> None:
    save_pair(tmp_path)
    caplog.set_level("INFO", "betoken")
    async with running(tmp_path, DRAFT, VERIFY, {"overlap": "on"}) as services:
        client = services.client

        async def answers(settings: dict[str, str] | None, **how) -> list:
            fields = {"max_new_tokens": 60, "ignore_eos": True, "drafter_settings": settings} | how
            requests = [client.complete([5, 6, seed], seed=seed, temperature=0.8, **fields) for seed in range(4)]
            return await asyncio.gather(*requests)

        expected = await answers(None, off=True)
        for settings in ({"acceptance": "0.9,0.5", "hit_rate": "0.5"}, {"acceptance": "1"}, {"acceptance": "0"}):
            given = await answers(settings, drafter="synthetic", num_draft_tokens=4)
            assert [one.output_ids for one in given] == [one.output_ids for one in expected]
        for one in (*expected, *given):
            assert one.model == "synthetic:target" and as_json(one, 1.0)["speculation"]["is_synthetic"]
        info = await client.model_info()
        assert info.model == "synthetic:target"
        assert all(asdict(worker)["is_synthetic"] for worker in (*info.verify_workers, *info.draft_workers))
        await until_all_pages_are_free(client)
    logged = [record.getMessage() for record in caplog.records]
    assert sum("is synthetic: its tokens and times are made up" in text for text in logged) == 2


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        (VerifyWorkerSettings, {"synthetic": "step_ms=fast"}, "synthetic\n.*step_ms"),
        (VerifyWorkerSettings, {"synthetic": "link_ms=1"}, "synthetic\n.*step_ms: must be given"),
        (VerifyWorkerSettings, {"synthetic": "step_ms=1 link_ms=-1"}, "link_ms = -1"),
        (VerifyWorkerSettings, {"synthetic": "step_ms=1 speed=2"}, "'speed=2': must be NAME=VALUE"),
        (VerifyWorkerSettings, {"synthetic": "step_ms=1 acceptance=1"}, "--synthetic: acceptance"),
        (VerifyWorkerSettings, VERIFY | {"attached_drafters": ("medusa",), "medusa": "m"}, "--attached-drafters"),
        (DraftWorkerSettings, {"drafters": ("synthetic",)}, "--synthetic: must be given"),
        (DraftWorkerSettings, DRAFT | {"drafters": ("ngram",)}, "--drafters"),
        (DraftWorkerSettings, {"synthetic": "step_ms=1 acceptance=1.5"}, "acceptance: 1.5: must be 0 to 1"),
        (DraftWorkerSettings, {"synthetic": "step_ms=1 hit_rate=0.5,0.6"}, "hit_rate: .*must be one number"),
    ],
)
def test_bad_options_of_synthetic_workers_are_named(settings, fields, message) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**{"model": "m"} | fields)


def test_a_synthetic_draft_worker_hosts_its_drafter_by_default() -> None:
    assert DraftWorkerSettings(synthetic="step_ms=1").hosted_drafters == ("synthetic",)
