"""Which weights are served can be settled beforehand: the first worker to come does not decide."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from betoken.router.settings import RouterSettings
from tests.router.harness import MakeCluster

HONEST, OTHER = "f" * 64, "e" * 64


@pytest.mark.parametrize("pin", [HONEST, HONEST[:16]])
async def test_workers_of_other_weights_than_the_pinned_never_serve(make_cluster: MakeCluster, pin: str) -> None:
    hellos = [{"weights_fingerprint": OTHER}, {"weights_fingerprint": HONEST}, {"weights_fingerprint": ""}]
    cluster = await make_cluster(num_drafters=0, verify_hellos=hellos, wait_ready=False, weights_fingerprint=pin)
    other, honest, nameless = (worker.link for worker in cluster.router.verify.workers)
    await cluster.until(lambda: (other.state, honest.state, nameless.state) == ("refused", "ready", "refused"))
    assert pin in other.detail and OTHER in other.detail
    assert (await cluster.generate(max_new_tokens=3, ignore_eos=True)).finish.usage.output_tokens == 3


async def test_other_weights_that_connected_first_do_not_exclude_workers(make_cluster: MakeCluster) -> None:
    hellos = [{"weights_fingerprint": OTHER}, {"weights_fingerprint": HONEST}]
    cluster = await make_cluster(num_drafters=0, verify_hellos=hellos, wait_ready=False, weights_fingerprint=HONEST)
    other, honest = cluster.router.verify.workers
    await cluster.until(lambda: other.link.state == "refused")
    await cluster.until(lambda: honest.is_ready)


@pytest.mark.parametrize(("allow_weights_change", "state"), [(False, "refused"), (True, "ready")])
async def test_a_rejected_verify_worker_takes_over_from_the_last_good_one_only_if_allowed(
    make_cluster: MakeCluster, allow_weights_change: bool, state: str
) -> None:
    cluster = await make_cluster(num_drafters=0, allow_weights_change=allow_weights_change)
    good, link = cluster.verifiers[0], cluster.router.verify.workers[0].link
    await good.kill()
    await cluster.until(lambda: not link.is_up)
    good.hello.weights_fingerprint = OTHER
    await good.start()
    await cluster.until(lambda: link.state == state)
    assert ("--allow-weights-change" in link.detail) == (state == "refused")


@pytest.mark.parametrize("value", ["f" * 15, "f" * 65, "F" * 64, "sha256:" + "f" * 64])
def test_an_invalid_fingerprint_is_rejected(value: str) -> None:
    with pytest.raises(ValidationError, match="weights_fingerprint"):
        RouterSettings(verify=("a:1",), tokenizer="x", weights_fingerprint=value)


async def test_verify_workers_of_different_numbers_of_ranks_are_one_fleet(make_cluster: MakeCluster) -> None:
    hellos = [{"tensor_parallel_degree": degree} for degree in (1, 2, 4)]
    cluster = await make_cluster(num_drafters=0, verify_hellos=hellos, wait_ready=False)
    await cluster.until(lambda: all(worker.is_ready for worker in cluster.router.verify.workers))
