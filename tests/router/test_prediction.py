"""A prediction reaches whoever drafts from it, is counted, and changes no token."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.testing.fake_verify_worker import FakeVerifyWorker
from tests.router.harness import Cluster, MakeCluster, byte_ids

PROMPT = [5, 6, 7]
NUM_TOKENS = 40
PREDICTING: list[dict[str, Any]] = [{"predicting_drafters": ["ngram"]}]


async def refused(cluster: Cluster, **fields: Any) -> InvalidArgumentError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(prompt_ids=PROMPT, **fields)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError), error
    return error


def expecting(ids: list[int]) -> dict[str, Any]:
    return {"ids": {"ids": ids}}


@pytest.mark.parametrize("wrong_at", [None, 20])
async def test_a_prediction_is_drafted_from_and_counted(make_cluster: MakeCluster, wrong_at: int | None) -> None:
    cluster = await make_cluster(draft_hellos=PREDICTING)
    expected = cluster.target_ids(NUM_TOKENS, PROMPT)
    predicted = [*expected]
    if wrong_at is not None:
        predicted[wrong_at] += 1
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    reply = await cluster.generate(**fields, prediction=expecting(predicted), num_draft_tokens=4)
    stats = reply.finish.speculation
    assert reply.ids == expected and reply.start.drafter == "ngram", "the default if the request names none"
    assert stats.num_accepted_prediction_tokens == stats.num_accepted_tokens > NUM_TOKENS / 2
    assert stats.num_rejected_prediction_tokens == stats.num_draft_tokens - stats.num_accepted_tokens
    assert (stats.num_rejected_prediction_tokens > 0) == (wrong_at is not None)
    assert [token.source for token in reply.tokens].count("prediction") == stats.num_accepted_prediction_tokens
    plain = await cluster.generate(**fields)
    assert plain.ids == expected and plain.finish.speculation.num_accepted_prediction_tokens == 0
    await cluster.until_idle()


async def test_text_of_a_prediction_is_tokenized_without_special_tokens(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=PREDICTING)
    await cluster.generate(prompt_ids=PROMPT, max_new_tokens=4, prediction={"text": "xyz"}, num_draft_tokens=3)
    assert list(cluster.drafters[0].opened[-1].predicted_ids) == byte_ids(cluster.tokenizer, b"xyz")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prediction": {}}, "prediction"),
        ({"prediction": expecting([10**6])}, "prediction.ids.ids"),
        ({"prediction": expecting([1] * 5000)}, "prediction.ids.ids"),
        ({"prediction": {"text": "a" * 5000}}, "prediction.text"),
        ({"prediction": {"text": "a"}, "off": True}, "prediction"),
        ({"prediction": {"text": "a"}, "drafter": "model"}, "prediction"),
    ],
    ids=str,
)
async def test_an_unusable_prediction_is_rejected_by_name(
    make_cluster: MakeCluster, fields: dict[str, Any], field: str
) -> None:
    cluster = await make_cluster(draft_hellos=PREDICTING)
    error = await refused(cluster, **fields)
    assert error.field.partition("[")[0] == field, error
    nobody = await make_cluster()
    assert (await refused(nobody, prediction={"text": "a"})).field == "prediction"


async def test_a_resumed_answer_continues_without_the_drafter_of_its_prediction(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    expected = cluster.target_ids(20, PROMPT)
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 20, "ignore_eos": True, "drafter": "ngram"}
    reply = await cluster.generate(**fields, prediction=expecting(expected), resume_ids=expected[:5])
    assert reply.ids == expected[5:]


async def test_a_verify_worker_gets_the_prediction_for_an_attached_drafter_only(make_cluster: MakeCluster) -> None:
    def opened(worker: FakeVerifyWorker) -> list[int]:
        return [len(entry.predicted_ids) for entry in worker.opened]

    cluster = await make_cluster(draft_hellos=PREDICTING)
    await cluster.generate(prompt_ids=PROMPT, max_new_tokens=8, prediction=expecting([5, 6]), ignore_eos=True)
    assert set(opened(cluster.verifiers[0])) == {0}
