"""Models and tokenizers by hub id, from a hub of this machine: what is fetched, and what is said when it cannot be."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from betoken.engine.weights.fingerprint import hash_weights
from tests.e2e.hub import Hub, Repository, commit_of, serve_hub
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny import save_tiny
from tests.router.harness import CHAT_TEMPLATE, byte_tokenizer_json

TOKENIZER_FILES = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
MODEL_FILES = ["config.json", "generation_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
UNNEEDED = [
    "README.md",
    "consolidated.safetensors",
    "model.gguf",
    "onnx/model.onnx",
    "original/model.safetensors",
    "original/params.json",
    "pytorch_model.bin",
]
Case = tuple[str, str, str | None]


def save_repository(directory: Path, seed: int, max_shard_size: str) -> Path:
    """A tiny model with its tokenizer, and unrelated files."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(directory, "llama", seed))
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (directory / "chat_template.jinja").write_text(f"{seed}{CHAT_TEMPLATE}")
    for name in UNNEEDED:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"unneeded" * 100)
    return directory


def save_files(directory: Path) -> Path:
    """GGUF files of one model in two quantisations."""
    directory.mkdir()
    for type_name in ("Q4_1", "Q6_K"):
        write_gguf(directory / f"tiny-{type_name}.gguf", type_name)
    return directory


def save_without(directory: Path, *patterns: str, of: Path) -> Path:
    """A copy of a repository that lacks some of its files."""
    left_out = {path for pattern in patterns for path in of.glob(pattern)}
    directory.mkdir()
    for path in of.iterdir():
        if path.is_file() and path not in left_out:
            (directory / path.name).hardlink_to(path)
    return directory


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    main = save_repository(folder / "main", 0, "1GB")
    sharded = save_repository(folder / "sharded", 1, "200KB")
    pickled = save_without(folder / "pickled", "model.safetensors", of=main)
    with serve_hub() as hub:
        hub.repositories |= {
            "org/model": Repository({"main": main, "v1": sharded}),
            "org/chat": Repository({"main": main, "v1": sharded}),
            "org/files": Repository({"main": save_files(folder / "files")}),
            "org/gated": Repository({"main": main}, is_gated=True),
            "org/pickled": Repository({"main": pickled}),
            "org/no-tokenizer": Repository({"main": save_without(folder / "bare", "tok*", of=main)}),
            "org/down": Repository({"main": main}, failing="."),
            "org/half-down": Repository({"main": main}, failing="tokenizer_config"),
            "org/broken": Repository({"main": main}, broken_off=r"resolve/.*\.json"),
        }
        yield hub


def load(hub: Hub, home: Path, cases: Sequence[Case], **environment: str) -> dict[Case, dict[str, Any]]:
    """Results of the cases, one after another in one process with this cache and these variables."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hub_client.py"))],
        input=json.dumps(cases),
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr, "bars in the log"
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


TARGETS: list[Case] = [("target", "org/model", "v1"), ("target", "org/model", None)]
FILES: list[Case] = [("target", "org/files:q6_k", None), ("tokenizer", "org/files:tiny-Q6_K.gguf", "main")]
DRAFT: Case = ("draft", "org/model", "v1")
CHATS: list[Case] = [("tokenizer", "org/chat", None), ("tokenizer", "org/chat", "v1")]
REFUSED: dict[Case, str] = {
    (kind, name, revision): reason
    for kind in ("tokenizer", "target")
    for name, revision, reason in [
        ("org/missing", None, "RepositoryNotFoundError: "),
        ("org/model", "v9", "RevisionNotFoundError: "),
        ("org/gated", None, "GatedRepoError: "),
        ("org/down", None, "500 Internal Server Error"),
        ("org/half-down", None, "LocalEntryNotFoundError: "),
        ("org/broken", "main", "closed connection without sending complete message body"),
    ]
} | {
    ("target", "org/files:Q8_0", None): "no such GGUF file; it has tiny-Q4_1.gguf, tiny-Q6_K.gguf",
    ("tokenizer", "org/files:Q8_0", None): "no such GGUF file; it has tiny-Q4_1.gguf, tiny-Q6_K.gguf",
    ("target", "org/missing:Q8_0", None): "RepositoryNotFoundError: ",
    ("target", "org/pickled", None): "holds neither model.safetensors nor model.safetensors.index.json",
    ("tokenizer", "org/no-tokenizer", None): "has no tokenizer.json",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def loaded(hub: Hub, home: Path) -> dict[Case, dict[str, Any]]:
    """Results of the cases, of one process after another."""
    return load(hub, home, [*TARGETS, *FILES, DRAFT, *CHATS, *REFUSED])


def test_a_revision_is_loaded_from_the_files_that_are_needed(hub: Hub, loaded: dict[Case, dict[str, Any]]) -> None:
    targets = [loaded[case] for case in TARGETS]
    directories = [hub.repositories["org/model"].revisions[revision] for revision in ("v1", "main")]
    assert [target["model_id"] for target in targets] == ["org/model", "org/model"]
    assert [target["weights_fingerprint"] for target in targets] == [hash_weights(path) for path in directories]
    assert [target["downloaded"] for target in targets] == [1.0, 1.0]
    all_of_v1 = sorted([*MODEL_FILES, *TOKENIZER_FILES, *SHARDS])
    new_in_main = ["chat_template.jinja", "model.safetensors"]
    commits = [commit_of(directory) for directory in directories]
    assert hub.fetched("org/model") == dict(zip(commits, [all_of_v1, new_in_main], strict=True))


def test_a_gguf_file_of_the_hub_is_fetched_alone(hub: Hub, loaded: dict[Case, dict[str, Any]]) -> None:
    target, tokenizer = (loaded[case] for case in FILES)
    assert target["model_id"] == "tiny-Q6_K" and target["tokenizer_hash"] == tokenizer["hash"]
    assert [*hub.fetched("org/files").values()] == [["tiny-Q6_K.gguf"]]


def test_a_draft_worker_loads_a_revision_of_its_model(loaded: dict[Case, dict[str, Any]]) -> None:
    same = ("model_id", "weights_fingerprint", "tokenizer_hash")
    assert [loaded[DRAFT][name] for name in same] == [loaded[TARGETS[0]][name] for name in same]


def test_a_router_has_the_workers_tokenizer_and_the_revisions_template(
    hub: Hub, loaded: dict[Case, dict[str, Any]]
) -> None:
    chats = [loaded[case] for case in CHATS]
    assert {chat["hash"] for chat in chats} == {loaded[case]["tokenizer_hash"] for case in TARGETS}
    assert [chat["text"] for chat in chats] == ["0<user>hi\n<assistant>", "1<user>hi\n<assistant>"]
    assert chats[0]["fingerprint"] != chats[1]["fingerprint"]
    assert [*hub.fetched("org/chat").values()] == [TOKENIZER_FILES, ["chat_template.jinja"]]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_hub_model_that_cannot_be_loaded_is_rejected_by_name(case: Case, loaded: dict[Case, dict[str, Any]]) -> None:
    _, name, revision = case
    refusal = loaded[case]["refusal"]
    assert REFUSED[case] in refusal and name in refusal and (revision is None or f"revision {revision!r}" in refusal)


def test_a_downloaded_model_is_loaded_without_the_hub(hub: Hub, home: Path, loaded: dict[Case, dict[str, Any]]) -> None:
    before = len(hub.requests)
    again = load(hub, home, [TARGETS[0], *FILES, *CHATS, ("tokenizer", "org/other", "v1")], HF_HUB_OFFLINE="1")
    refusal = again.pop(("tokenizer", "org/other", "v1"))["refusal"]
    assert "org/other at revision 'v1' cannot be fetched" in refusal and "HF_HUB_OFFLINE" in refusal
    assert again[TARGETS[0]].pop("downloaded") == again[FILES[0]].pop("downloaded") == 0.0
    assert all(answer.items() <= loaded[case].items() for case, answer in again.items())
    assert len(hub.requests) == before


def test_an_unreachable_hub_is_reported_at_once(tmp_path: Path) -> None:
    case: Case = ("tokenizer", "org/model", None)
    nowhere = Hub()
    nowhere.endpoint = "http://127.0.0.1:9"
    assert "Connection refused" in load(nowhere, tmp_path, [case])[case]["refusal"]
