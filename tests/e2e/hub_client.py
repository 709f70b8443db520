"""Loads models or tokenizers from whatever hub HF_ENDPOINT names, as services do.

Standard input is a JSON list of [kind, id, revision]; a line of JSON for each reports the result or the error.
"""

import json
import sys
import time
from dataclasses import asdict
from typing import Any

time.sleep = lambda seconds: None  # the hub client's pauses between its tries


def tokenizer(name: str, revision: str | None) -> dict[str, Any]:
    """A router's view of its model."""
    from betoken.router.text.chat import Chat
    from betoken.router.text.tokenizer import Tokenizer, TokenizerError

    try:
        loaded = Tokenizer.load(name, revision)
    except TokenizerError as error:
        return {"refusal": str(error)}
    messages = [{"role": "user", "content": "hi"}]
    ids = loaded.encode(loaded.render(Chat(messages)), add_special_tokens=False) if loaded.chat_template else []
    return {"hash": loaded.hash, "fingerprint": loaded.fingerprint, "text": loaded.decode(ids)}


def target(name: str, revision: str | None) -> dict[str, Any]:
    """A verify worker's report of its model."""
    from betoken.engine.config import EngineConfig
    from betoken.engine.errors import ModelRefusedError
    from betoken.engine.weights.loading import load_model

    reported = dict.fromkeys(["downloading"], 0.0)
    try:
        _, info = load_model(EngineConfig(name, revision, dtype="auto"), lambda *now: reported.update([now]))
    except ModelRefusedError as error:
        return {"refusal": str(error)}
    return _reported(info) | {"downloaded": reported["downloading"]}


def draft(name: str, revision: str | None) -> dict[str, Any]:
    """A draft worker's report of its model, whose first layer is a separate drafter."""
    from betoken.common.errors import FailedPreconditionError
    from betoken.draft_worker.hosting import load_drafters
    from betoken.draft_worker.settings import DraftWorkerSettings

    exit_early = {"early_exit_model": name, "early_exit_layers": 1}
    options: dict[str, Any] = {"model": name, "revision": revision, "compile": "off", "num_pages": 8} | exit_early
    try:
        hosted = load_drafters(DraftWorkerSettings(drafters=("model", "early_exit"), **options), lambda *reported: None)
    except FailedPreconditionError as error:
        return {"refusal": str(error)}
    return _reported(hosted.runners[0].info)


def _reported(info: Any) -> dict[str, Any]:
    """The description without what only the process that loaded can call."""
    return {name: value for name, value in asdict(info).items() if not callable(value)}


KINDS = {"tokenizer": tokenizer, "target": target, "draft": draft}

if __name__ == "__main__":
    for kind, name, revision in json.load(sys.stdin):
        sys.stdout.write(json.dumps(KINDS[kind](name, revision), default=str) + "\n")
