"""What the router counts: requests by the gRPC status they ended with, never by the name of an exception."""

import asyncio
from unittest.mock import Mock

import pytest

from foretoken.router.metrics import RequestMetrics
from foretoken.rpc.errors import ResourceExhaustedError
from foretoken.rpc.names import RPC_RESPONSE_STATUS_CODE


@pytest.mark.parametrize(
    ("error", "time_remaining_s", "status"),
    [
        (None, None, "OK"),
        (ResourceExhaustedError("full"), None, "RESOURCE_EXHAUSTED"),
        (asyncio.CancelledError(), None, "CANCELLED"),
        (asyncio.CancelledError(), 3.0, "CANCELLED"),
        (asyncio.CancelledError(), 0.0, "DEADLINE_EXCEEDED"),
        (ValueError("a bug"), None, "INTERNAL"),
    ],
)
def test_a_request_is_counted_by_its_status(
    error: BaseException | None, time_remaining_s: float | None, status: str
) -> None:
    metrics = RequestMetrics(Mock())
    metrics._requests = Mock()
    try:
        with metrics.counted(lambda: time_remaining_s):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    metrics._requests.add.assert_called_once_with(1, {RPC_RESPONSE_STATUS_CODE: status})
