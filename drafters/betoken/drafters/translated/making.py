"""Reads the target's tokenizer and decides how each model's drafts are translated to it."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from betoken.common.errors import FailedPreconditionError
from betoken.common.gguf import GgufError, fetch_hub_file
from betoken.common.model_path import path_fault, split_hub_file
from betoken.common.tokenizer_json import hash_tokenizer_json, tokenizer_text
from betoken.drafters.translated.translation import MIN_COVERAGE, Translation
from betoken.drafters.translated.vocabulary import TokenizerFaultError, Vocabulary

if TYPE_CHECKING:
    from betoken.engine.runner import ModelRunner

logger = logging.getLogger(__name__)
_FILE = "tokenizer.json"


class Translator:
    """Translations from the models of one worker to the target's tokenizer."""

    def __init__(self, source: str) -> None:
        """`source`: value of --target-tokenizer.

        Raises:
            FailedPreconditionError: the tokenizer cannot be read.
        """
        self._source = source
        self.tokenizer_json = _read(source)
        try:
            self.hash = hash_tokenizer_json(self.tokenizer_json)
        except Exception as error:  # whatever the text is instead of a tokenizer
            raise _refused(source, f"is not a tokenizer: {type(error).__name__}: {error}") from error

    def translate(self, runner: ModelRunner) -> tuple[ModelRunner, Translation | None]:
        """Return the runner that drafters use, and the translation of a model with another tokenizer.

        Raises:
            FailedPreconditionError: no translation is possible.
        """
        if not runner.info.tokenizer_hash or runner.info.tokenizer_hash == self.hash:
            return runner, None
        from betoken.drafters.translated.runner import TranslatedRunner

        translation = self._translation(runner)
        return TranslatedRunner(runner, translation), translation

    @cached_property
    def _target(self) -> Vocabulary:
        try:
            return Vocabulary(self.tokenizer_json)
        except TokenizerFaultError as error:
            raise _refused(self._source, f"is not a tokenizer: {error}") from error

    def _translation(self, runner: ModelRunner) -> Translation:
        model = runner.info.model_id
        target = self._target
        try:
            draft = Vocabulary(runner.info.tokenizer_text())
            translation = Translation(target, draft, runner.info.vocab_size)
            is_possible = translation.is_by_token or translation.reproduces_text
        except TokenizerFaultError as error:
            raise _refused(self._source, f"no translation from the tokenizer of {model}: {error}") from error
        share = f"{translation.coverage:.1%} of the target's tokens in a sample text"
        if not is_possible:
            limit = f"{model} has {share}, below {MIN_COVERAGE:.0%}, and the tokenizers do not reproduce the sample"
            raise _refused(self._source, f"no translation: {limit}")
        how = "token by token (TLI)" if translation.is_by_token else "as text (SLEM)"
        logger.info("drafts of %s are translated %s: it has %s", model, how, share)
        return translation


def _read(source: str) -> str:
    path = Path(source).expanduser()
    try:
        if path.suffix == ".json" and path.is_file():
            return path.read_text(encoding="utf-8")
        if fault := path_fault(source):
            raise _refused(source, fault)
        text = tokenizer_text(source if path.exists() else str(_fetch(source)))
    except FailedPreconditionError:
        raise
    except (GgufError, OSError, ValueError) as error:
        raise _refused(source, f"cannot be read: {error}") from error
    if text is None:
        raise _refused(source, f"has no {_FILE}")
    return text


def _fetch(source: str) -> Path:
    """Directory or file of a tokenizer of the hub, from the local cache or downloaded."""
    from huggingface_hub import snapshot_download

    try:
        if split_hub_file(source) is not None:
            return fetch_hub_file(source, None)
        return Path(snapshot_download(source, allow_patterns=[_FILE]))
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        raise _refused(source, f"cannot be fetched: {type(error).__name__}: {error}") from error


def _refused(source: str, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"--target-tokenizer = {source}: {' '.join(reason.split())[:500]}")
