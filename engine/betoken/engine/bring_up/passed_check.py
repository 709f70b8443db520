"""The check at load as it passed before, so that equal starts need not repeat it.

The kept result is a hash of the logits that were compared, for each way to run the model. A runner of other logits has
not passed, whatever the key says.
"""

import hashlib
from collections.abc import Sequence

import torch

from betoken.engine.bring_up.kept import KeptResult, machine_key
from betoken.engine.bring_up.self_check import digest_of_logits, each_together
from betoken.engine.config import EngineConfig
from betoken.engine.cpu.kept_code import KeptCode
from betoken.engine.errors import EngineError
from betoken.engine.model_info import ModelInfo
from betoken.engine.runner import ModelRunner
from betoken.kernels.code_folder import user_cache_dir


class OtherLogitsError(EngineError):
    """The logits differ from the checked logits: the check has to be repeated with a model loaded anew."""


class PassedCheck:
    """Checks that passed at an earlier start or pass now."""

    def __init__(self, kept: KeptResult | None, code: KeptCode | None = None) -> None:
        """`kept`: where results are kept; None = nowhere. `code`: file of the compiled forward."""
        self._kept, self._code = kept, code
        self._before: dict[str, str] = (kept.read() if kept is not None else None) or {}
        self._now: dict[str, str] = {}

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo, feature_layers: Sequence[int]) -> "PassedCheck":
        """The check of this model with these settings."""
        is_kept = config.reuse_self_check and config.self_check and info.weights_fingerprint
        if not is_kept or config.device != "cpu" or config.reads_step:
            return cls(None)
        options = [config.compile != "off", config.batch_invariant, config.max_num_batched_tokens, config.page_size]
        key = [info.weights_fingerprint, info.dtype, config.activations, info.max_context, *options]
        key.append(list(feature_layers))
        kept, code = KeptResult(config.cache_dir, "self-check", *key), None
        if config.ranks is None:
            code = KeptCode(config.cache_dir or user_cache_dir(), machine_key("forward", torch.get_num_threads(), *key))
        return cls(kept, code)

    @property
    def is_known(self) -> bool:
        """Whether it passed before."""
        return bool(self._before)

    def code(self) -> KeptCode | None:
        """File of the compiled forward; None = not kept. It is only read if the check of its logits is known."""
        if self._code is not None:
            self._code.is_readable = self.is_known
        return self._code

    def compare(self, runner: ModelRunner, sequences: list[list[int]]) -> None:
        """Compare the runner's logits with the checked logits.

        Raises:
            OtherLogitsError: they differ; the result is no longer kept.
        """
        if self._before.get(_way(runner)) != _digest(runner, sequences):
            if self._kept is not None:
                self._kept.forget()
            raise OtherLogitsError(f"the {_way(runner)} model no longer gives the checked logits")

    def passed(self, runner: ModelRunner, sequences: list[list[int]]) -> None:
        """Note that the runner, as it runs now, has passed."""
        if self._kept is not None:
            self._now[_way(runner)] = _digest(runner, sequences)

    def logits_digest(self, runner: ModelRunner) -> str:
        """See `digest_of_logits`; of the earlier start if the check is known."""
        name = f"{_way(runner)} digest"
        if name in self._before:
            return self._before[name]
        digest = digest_of_logits(runner)
        if self._now:
            self._now[name] = digest
        return digest

    def keep(self) -> None:
        """Keep what has passed, once all of the check has."""
        if self._kept is not None and self._now:
            self._kept.write(self._now)


def _way(runner: ModelRunner) -> str:
    return "compiled" if runner.is_compiled else "eager"


def _digest(runner: ModelRunner, sequences: list[list[int]]) -> str:
    digest = hashlib.sha256()
    for logits in each_together(runner, sequences):
        digest.update(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
