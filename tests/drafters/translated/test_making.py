"""A draft worker translates to the tokenizer it is given, or ends with one line that names the option."""

import json

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.draft_worker.handler import DraftResults
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.service import _load
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.translated import translation
from betoken.drafters.translated.drafter import Translated
from betoken.v1.types_pb2 import WorkerHello
from tests.drafters.translated.pairs import MODELS, TARGET_JSON, save_translated_pair
from tests.router.harness import byte_tokenizer_json


def settings(target_tokenizer, model=MODELS / "draft", **options):
    fixed = {"drafters": ("model",), "num_pages": 40, "compile": "off", "threads": 1}
    return DraftWorkerSettings(model=str(model), target_tokenizer=str(target_tokenizer), **fixed | options)


def load(target_tokenizer, model=MODELS / "draft", **options):
    return load_drafters(settings(target_tokenizer, model, **options), lambda stage, fraction: None)


def lower_cased(tokenizer_json):
    """The tokenizer with a normalizer that does not keep the text."""
    return json.dumps(json.loads(tokenizer_json) | {"normalizer": {"type": "Lowercase"}})


def test_a_model_with_the_targets_tokenizer_is_not_translated():
    hosted = load(MODELS / "target" / "tokenizer.json", drafters=("model", "staged", "fused"))
    assert hosted.maker.translation is None and hosted.tokenizer_hash == hash_tokenizer_json(TARGET_JSON)
    assert not any(isinstance(drafter, Translated) for drafter in hosted.drafters.values())


def test_the_handshake_names_the_targets_tokenizer_and_the_translation(tmp_path):
    save_translated_pair(tmp_path, "text")
    hello = WorkerHello()
    _load(settings(tmp_path / "target", tmp_path / "draft"), DraftResults(), hello, grammar_of := [])
    assert hello.tokenizer_hash == hash_tokenizer_json(TARGET_JSON) and len(grammar_of) == 1
    assert (
        hello.HasField("translation") and not hello.translation.is_by_token and 0.8 < hello.translation.coverage < 0.9
    )


def test_drafters_that_cannot_translate_are_rejected_by_name(tmp_path):
    save_translated_pair(tmp_path, "tokens")
    with pytest.raises(FailedPreconditionError, match="--model = .*draft: `lookahead` needs a model with the target's"):
        load(tmp_path / "target", tmp_path / "draft", drafters=("model", "lookahead"))


def test_a_tokenizer_that_changes_the_text_is_not_translated_to(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "MIN_COVERAGE", 1.5)
    path = tmp_path / "tokenizer.json"
    path.write_text(lower_cased(byte_tokenizer_json()))
    with pytest.raises(
        FailedPreconditionError, match="no translation: draft has .* do not reproduce the sample"
    ) as caught:
        load(path)
    assert str(caught.value).startswith(f"--target-tokenizer = {path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file or directory"),
        (b"", "is not a tokenizer: "),
        (b"\xff\xfe", "cannot be read: "),
        (b"{}", "is not a tokenizer: KeyError"),
        (b'{"model": {"vocab": {"a": {}}}}', "is not a tokenizer: "),
        (b'{"model": {"vocab": {"a": 1}}}', "is not a tokenizer: "),
        (b"[" * 100_000, "is not a tokenizer: "),
        (b'{"model": {"vocab": {"a": 1}},\n"normalizer": {"type":\n"No such thing"}}', "is not a tokenizer: "),
    ],
)
def test_a_hostile_tokenizer_file_ends_in_one_line(tmp_path, content, reason):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FailedPreconditionError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"--target-tokenizer = {path}: {reason}") and "\n" not in text and len(text) < 700


def test_a_directory_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(FailedPreconditionError, match=r"--target-tokenizer = .*: has no tokenizer.json"):
        load(tmp_path)


def test_a_reload_translates_the_new_weights(tmp_path):
    save_translated_pair(tmp_path, "tokens")
    hosted = load(tmp_path / "target", tmp_path / "draft", drafters=("model", "staged", "ngram"))
    again = hosted.maker.make_again(["model"])
    assert again.keys() == {"model", "staged"} and all(isinstance(each, Translated) for each in again.values())
    assert all(again[name] is not hosted.drafters[name] for name in again)
