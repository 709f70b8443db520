"""Accepts or rejects workers by their handshake: tokenizer, weights, model id.

Knows no links and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from betoken.common.errors import FailedPreconditionError
from betoken.router.request.worker_identity import ServedModel
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1.types_pb2 import WorkerHello


@dataclass(frozen=True, slots=True)
class Handshakes:
    """Requirements of one router on the handshakes of its workers."""

    tokenizer: Tokenizer
    tokenizer_source: str
    """Value of --tokenizer."""
    model_id: str = ""
    """Model id that verify workers must announce; empty = any."""
    weights_fingerprint: str = ""
    """Leading digits of the weights fingerprint that verify workers must announce; empty = any."""

    def check_verify(self, hello: WorkerHello) -> ServedModel:
        """Return the model that a verify worker serves.

        Raises:
            FailedPreconditionError: other weights, another tokenizer or another model.
        """
        if not hello.weights_fingerprint.startswith(self.weights_fingerprint):
            raise FailedPreconditionError(
                f"--weights-fingerprint is {self.weights_fingerprint}, the verify worker has "
                f"{hello.weights_fingerprint or 'none'}"
            )
        if hello.tokenizer_hash != self.tokenizer.hash:
            raise self._tokenizers_differ(hello)
        if self.model_id and hello.model_id != self.model_id:
            raise FailedPreconditionError(f"this router serves {self.model_id}, the verify worker has {hello.model_id}")
        return ServedModel.of(hello, self.tokenizer.fingerprint, self.tokenizer.chat_eos_id)

    def check_draft(self, hello: WorkerHello) -> None:
        """Raises:
        FailedPreconditionError: drafts have ids of another tokenizer. A worker without a model (n-grams) names none,
            and a worker that translates drafts names the target's.
        """
        if hello.tokenizer_hash and hello.tokenizer_hash != self.tokenizer.hash:
            raise self._tokenizers_differ(hello, "; --target-tokenizer of the draft worker translates its drafts")

    def _tokenizers_differ(self, hello: WorkerHello, remedy: str = "") -> FailedPreconditionError:
        own = f"{self.tokenizer_source} has {self.tokenizer.hash} of {self.tokenizer.vocab_size} ids"
        other = f"the {hello.role} worker's {hello.model_id or 'model'} has {hello.tokenizer_hash or 'none'}"
        return FailedPreconditionError(f"tokenizers differ: {own}, {other}, its model {hello.vocab_size} rows{remedy}")
