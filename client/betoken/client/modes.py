"""The verification modes' names in the protocol."""

from __future__ import annotations

from collections.abc import Mapping

from betoken.client.config import VerificationMode
from betoken.v1 import types_pb2

TO_PROTO: Mapping[VerificationMode, types_pb2.VerificationMode] = {
    VerificationMode.COUPLED: types_pb2.VERIFICATION_MODE_COUPLED,
    VerificationMode.REJECTION: types_pb2.VERIFICATION_MODE_REJECTION,
    VerificationMode.TYPICAL: types_pb2.VERIFICATION_MODE_TYPICAL,
}
FROM_PROTO: Mapping[int, VerificationMode] = {number: mode for mode, number in TO_PROTO.items()}
