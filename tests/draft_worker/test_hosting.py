"""A draft worker hosts the requested drafters; one that cannot be hosted stops it, by name."""

import json
import os
import pickle
import subprocess
import sys
from types import ModuleType

import pytest
from pydantic import ValidationError

from betoken.common.errors import FailedPreconditionError
from betoken.common.release import how_to_install
from betoken.draft_worker import model_hosting
from betoken.draft_worker.commands import Open
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.handler import DraftResults
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.service import _load
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.engine.model_thread import ModelThread
from betoken.engine.sampling import SamplingParams
from betoken.engine.weights import checkpoint
from betoken.rpc.link.commands import CloseLink
from betoken.v1.types_pb2 import WorkerHello
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.draft_worker.harness import RecordingSink, request
from tests.drafters.parallel import MASK, save_pard
from tests.engine.tiny import save_tiny
from tests.router.harness import byte_tokenizer_json

ALL = ("model", "ngram", "lookahead", "early_exit", "staged", "fused")


def no_progress(stage, fraction):
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model's directory; it is draft model and target here."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def settings(tiny, tmp_path, **options):
    defaults = {"model": tiny, "early_exit_model": tiny, "early_exit_layers": 1, "num_pages": 40}
    return DraftWorkerSettings(**defaults | {"compile": "off", "threads": 1} | options)


def test_all_drafters_are_hosted_together(tiny, tmp_path):
    hosted = load_drafters(settings(tiny, tmp_path, drafters=ALL), no_progress)
    assert tuple(hosted.drafters) == ALL
    sink = RecordingSink()
    core = DraftCore(hosted.drafters, [runner.page_table for runner in hosted.runners], sink, 16)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for index, name in enumerate(ALL):
        core.apply(Open((1, index), params, (5, 6, 7, 8, 5, 6), (), 100, name))
        core.apply(request(core, index, 4, 0))
    while core.has_work:
        core.step()
        core.check_integrity()
    answers = {ALL[answer.key[1]]: answer.drafted for answer in sink.answers}
    assert sorted(answers) == sorted(ALL) and not sink.failures
    assert answers["staged"].draft_ids == answers["model"].draft_ids
    assert answers["ngram"].draft_ids == [7, 8, 5, 6]
    assert set(answers["early_exit"].sources) == {"early_exit"}
    assert set(answers["model"].sources) == {"model"}
    assert answers["lookahead"].draft_ids == [], "nothing is in its pool yet"
    core.apply(CloseLink(1))
    assert sink.load.num_free_pages == sink.load.num_pages == 2 * 40


@pytest.mark.parametrize("lookahead_model", ["", "{tiny}", "{tiny}/."])
def test_a_model_is_loaded_once_for_all_that_use_it(tiny, tmp_path, lookahead_model):
    options = {"drafters": ("staged", "model", "lookahead"), "lookahead_model": lookahead_model.format(tiny=tiny)}
    hosted = load_drafters(settings(tiny, tmp_path, **options), no_progress)
    assert len(hosted.runners) == 1


def test_lookahead_may_iterate_a_model_of_its_own(tiny, tmp_path):
    other = save_tiny(tmp_path / "other", "llama", seed=1)
    asked = settings(tiny, tmp_path, drafters=("model", "lookahead"), lookahead_model=other)
    hosted = load_drafters(asked, no_progress)
    assert [runner.info.model_id for runner in hosted.runners] == [tiny.rsplit("/", 1)[1], "other"]
    alone = settings("", tmp_path, drafters=("lookahead",), lookahead_model=other)
    assert len(load_drafters(alone, no_progress).runners) == 1


def test_a_revision_is_the_draft_models_own(tiny, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(model, revision, **options):
        asked.append((model, revision))
        return tiny

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    options = {"drafters": ("model", "early_exit"), "early_exit_model": "some/target", "revision": "v1"}
    load_drafters(settings("some/draft", tmp_path, **options), no_progress)
    assert asked == [("some/draft", "v1"), ("some/target", None)]


def test_models_of_different_tokenizers_are_refused_whatever_their_names(tmp_path):
    folders = [tmp_path / part / "model" for part in ("one", "other")]
    for folder in folders:
        save_tiny(folder, "llama")
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {folder.parent.name: 0}}}))
    asked = settings(str(folders[0]), tmp_path, drafters=("model", "lookahead"), lookahead_model=str(folders[1]))
    with pytest.raises(
        FailedPreconditionError, match="--lookahead-model = .*: not the tokenizer of --model = .*: 1 and 1 ids"
    ):
        load_drafters(asked, no_progress)


def test_a_model_that_cannot_be_iterated_stops_the_worker(tiny, tmp_path):
    asked = settings(tiny, tmp_path, drafters=("lookahead",), lookahead_model=str(tmp_path / "nowhere"))
    with pytest.raises(FailedPreconditionError, match="--lookahead-model: .*nowhere"):
        load_drafters(asked, no_progress)


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "m" * 300])
def test_a_model_name_that_no_directory_can_have_stops_the_worker(model, tmp_path):
    with pytest.raises(FailedPreconditionError, match="--model: "):
        load_drafters(settings(model, tmp_path, drafters=("model",)), no_progress)


def test_the_handshake_has_the_tokenizer_of_whichever_model_has_one(tiny, tmp_path):
    """The router refuses a worker with another tokenizer, so none may go unnamed."""
    target = tmp_path / "target"
    save_tiny(target, "llama")
    (target / "tokenizer.json").write_text(byte_tokenizer_json())
    hello = WorkerHello()
    asked = settings(tiny, tmp_path, drafters=("model", "early_exit"), early_exit_model=str(target))
    _load(asked, DraftResults(), hello, [])
    runner = load_drafters(settings(str(target), tmp_path, drafters=("model",)), no_progress).runners[0]
    assert hello.tokenizer_hash == runner.info.tokenizer_hash != ""
    assert hello.draft_context == runner.info.max_context > 0


@pytest.mark.parametrize("drafters", [("model",), ("fused", "ngram", "staged")])
def test_the_handshake_has_the_mask_token_of_a_pard_model(tmp_path, drafters, caplog):
    directory, hello = save_pard(tmp_path, spd_type="pard2", pard2=True), WorkerHello()
    with caplog.at_level("INFO", "betoken.drafters"):
        _load(settings(directory, tmp_path, drafters=drafters), DraftResults(), hello, [])
    assert hello.mask_token_id == MASK
    assert f"model drafts in parallel (PARD): one forward per draft, mask token {MASK}" in caplog.text


@pytest.mark.parametrize("drafters", [("early_exit",), ("lookahead",), ("ngram",)])
def test_other_drafters_of_a_pard_model_are_not_parallel(tmp_path, drafters):
    directory, hello = save_pard(tmp_path), WorkerHello()
    asked = settings(directory, tmp_path, drafters=drafters, early_exit_model=directory)
    _load(asked, DraftResults(), hello, [])
    assert not hello.HasField("mask_token_id")


def test_a_pard_token_outside_the_vocabulary_stops_the_worker(tmp_path):
    directory = save_pard(tmp_path, pard_token=101)
    with pytest.raises(FailedPreconditionError, match=r"--model = .*: pard_token: 101 is not an integer in \[0, 101\)"):
        load_drafters(settings(directory, tmp_path, drafters=("model",)), no_progress)


def test_more_layers_than_the_model_has_stop_the_worker(tiny, tmp_path):
    asked = settings(tiny, tmp_path, drafters=("early_exit",), early_exit_layers=3)
    with pytest.raises(FailedPreconditionError, match="--early-exit-model = .*: num_layers: 3 is above the model's 2"):
        load_drafters(asked, no_progress)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": ("nonsense",)}, "must be among fused, model, ngram, suffix, staged, lookahead, early_exit"),
        ({"drafters": ()}, "must name at least one drafter"),
        ({"drafters": ("ngram", "ngram")}, "each once"),
        ({"drafters": ("model",), "model": ""}, "--model: must be given for the drafter `model`"),
        ({"drafters": ("staged",), "model": ""}, "--model: must be given for the drafter `staged`"),
        ({"drafters": ("early_exit",), "early_exit_model": ""}, "--early-exit-model: must be given"),
        ({"drafters": ("fused", "ngram")}, "there must be 2 at least"),
        ({"early_exit_layers": 0}, "early_exit_layers"),
        ({"model_branches": 0}, "model_branches"),
        ({"model_branches": 17}, "model_branches"),
        ({"suffix_memory": "max_bytes=1"}, "suffix_memory"),
        (
            {"drafters": ("lookahead",), "model": "", "early_exit_model": ""},
            "--lookahead-model or --model or --early-exit",
        ),
        ({"lookahead_window": 1}, "lookahead_window"),
        ({"lookahead_ngram_size": 1}, "lookahead_ngram_size"),
        (
            {"drafters": ("lookahead",), "lookahead_window": 100},
            "--lookahead-window = 100 with --lookahead-ngram-size = 5: 400 rows .* --max-num-batched-tokens = 256",
        ),
        ({"drafters": ("ngram",), "model": "", "revision": "v1"}, "--revision = 'v1': belongs to --model"),
    ],
)
def test_bad_settings_of_a_draft_worker_are_rejected_by_name(tmp_path, options, message):
    with pytest.raises(ValidationError, match=message):
        settings("somewhere", tmp_path, **options)


def test_a_draft_worker_refuses_the_verify_workers_share_of_memory(capsys):
    """The size of its KV pages has its own default, so a share would have no effect."""
    options = ["--kv-memory-fraction", "0.5"]
    assert VerifyWorkerSettings.parse(["--model", "m", *options]).engine_options()["kv_memory_fraction"] == 0.5
    with pytest.raises(SystemExit):
        DraftWorkerSettings.parse(["--drafters", "ngram", *options])
    assert "unrecognized arguments: --kv-memory-fraction" in capsys.readouterr().err


def test_a_model_without_torch_is_refused_by_what_to_install(tiny):
    code = "import sys\nsys.modules['torch'] = None\n"
    code += "from betoken.draft_worker.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "--drafters", "model", "--model", str(tiny), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith(f"a drafter with a model needs torch: {how_to_install('worker')}\n")


def test_a_broken_package_is_reported_with_its_cause(tiny, tmp_path, monkeypatch):
    def fail(name):  # as transformers does if a package cannot be imported; without a name
        raise ModuleNotFoundError("Could not import module 'X'") from ImportError("scipy is too old")

    name = "betoken.draft_worker.model_hosting"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].__getattr__ = fail
    with pytest.raises(ModuleNotFoundError, match="Could not import module 'X'") as raised:
        load_drafters(settings(tiny, tmp_path, drafters=("model",)), no_progress)
    assert "scipy" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"device": "cpu,cpu"}, "--device = 'cpu,cpu': must be one device with --drafters = ngram"),
        ({"tensor_parallel": 2}, "--tensor-parallel = 2: must be 1 with --drafters = ngram"),
        ({"tensor_parallel": 2, "synthetic": "step_ms=1"}, "--tensor-parallel = 2: must be 1 with --synthetic"),
    ],
)
def test_ranks_are_rejected_without_a_draft_model(options, limit):
    with pytest.raises(ValueError, match=limit):
        DraftWorkerSettings(drafters=("ngram",), **options)


def test_a_draft_worker_ends_if_a_rank_of_its_model_is_lost(tiny, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(model_hosting, "start_ranks", lambda config, *others: started.append(others) or config)
    thread = ModelThread(lambda: None, "test")
    load_drafters(settings(tiny, tmp_path, drafters=("model",), device="cpu,cpu"), no_progress, thread)
    ((devices, prepare, failing, _),) = started
    assert devices == ("cpu", "cpu") and failing is thread
    assert pickle.loads(pickle.dumps(prepare)).args == ("warning", "text")
