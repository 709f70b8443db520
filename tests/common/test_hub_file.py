"""GGUF files of the hub by name: which file is meant, and files in a cache of the published layout."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from betoken.common.gguf import GgufError, fetch_hub_file
from betoken.common.gguf.hub_file import choose_file
from betoken.common.model_path import split_hub_file
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.sources import open_source
from betoken.router.text.tokenizer import Tokenizer, TokenizerError
from tests.engine.gguf_files import write_gguf

FILES = [
    "README.md",
    "Coder-1.5B-IQ4_NL.gguf",
    "Coder-1.5B-Q4_K_M.gguf",
    "Coder-1.5B-Q4_K_S.gguf",
    "Coder-1.5B-Q8_0.gguf",
    "BF16/Coder-1.5B-BF16-00001-of-00002.gguf",
    "BF16/Coder-1.5B-BF16-00002-of-00002.gguf",
    "mmproj-Q8_0.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("Q4_K_M", ["Coder-1.5B-Q4_K_M.gguf"]),
        ("q8_0", ["Coder-1.5B-Q8_0.gguf"]),
        ("Coder-1.5B-Q4_K_S.gguf", ["Coder-1.5B-Q4_K_S.gguf"]),
        ("BF16", FILES[5:7]),
        (FILES[5], FILES[5:7]),
    ],
)
def test_a_gguf_file_is_chosen_by_quantisation_or_path(wanted: str, chosen: list[str]) -> None:
    assert choose_file(FILES, wanted, "org/coder") == chosen


@pytest.mark.parametrize("wanted", ["Q4_NL", "Q4_K", "Q9", "coder", "mmproj-Q8_0.gguf", "README.md"])
def test_a_gguf_name_that_matches_no_file_lists_all_of_them(wanted: str) -> None:
    with pytest.raises(GgufError, match=f"^org/coder:{wanted}: .*Coder-1.5B-IQ4_NL.gguf, Coder-1.5B-Q4_K_M.gguf"):
        choose_file(FILES, wanted, "org/coder")


def test_a_quantisation_of_several_gguf_files_names_them() -> None:
    with pytest.raises(GgufError, match=r"several files match: a-Q8_0.gguf, b-Q8_0.gguf$"):
        choose_file(["b-Q8_0.gguf", "a-Q8_0.gguf"], "Q8_0", "org/two")


def test_only_a_name_of_the_hub_is_split_at_its_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_hub_file("org/coder:Q8_0") == ("org/coder", "Q8_0")
    assert [split_hub_file(name) for name in ("org/coder", "/org/coder:Q8_0", "./coder:Q8_0", "coder:Q8_0")] == [
        None
    ] * 4
    monkeypatch.chdir(tmp_path)
    Path("org", "coder:Q8_0").mkdir(parents=True)
    assert split_hub_file("org/coder:Q8_0") is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache without a network, in which one repository has two files."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for index, type_name in enumerate(("Q4_1", "Q6_K")):
        write_gguf(tmp_path / "made.gguf", type_name)
        (tmp_path / "made.gguf").rename(repository / "blobs" / str(index))
        (snapshot / f"tiny-{type_name}.gguf").symlink_to(f"../../blobs/{index}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_gguf_file_is_found_in_the_hub_cache(cache: Path) -> None:
    assert fetch_hub_file("org/tiny:Q6_K", None) == fetch_hub_file("org/tiny:q6_k", "main") == cache / "tiny-Q6_K.gguf"
    source = open_source("org/tiny:Q6_K", None)
    assert (source.name, source.path) == ("tiny-Q6_K", cache / "tiny-Q6_K.gguf")
    assert Tokenizer.load("org/tiny:Q6_K").hash == source.tokenizer_hash()


def test_a_gguf_model_in_several_files_is_found_in_the_hub_cache(cache: Path) -> None:
    write_gguf(cache / "big-IQ4_NL.gguf", "IQ4_NL", max_tensors=9)
    first = cache / "big-IQ4_NL-00001-of-00003.gguf"
    assert fetch_hub_file("org/tiny:IQ4_NL", None) == fetch_hub_file(f"org/tiny:{first.name}", None) == first
    source = open_source("org/tiny:IQ4_NL", None)
    assert (source.name, source.path) == ("big-IQ4_NL", first)
    assert Tokenizer.load("org/tiny:IQ4_NL").hash == source.tokenizer_hash()
    (cache / "big-IQ4_NL-00003-of-00003.gguf").unlink()
    for load in (lambda name: open_source(name, None), Tokenizer.load):
        with pytest.raises((ModelRefusedError, TokenizerError), match=r"missing: big-IQ4_NL-00003-of-00003.gguf"):
            load("org/tiny:IQ4_NL")


@pytest.mark.parametrize("load", [lambda name: open_source(name, None), Tokenizer.load], ids=["worker", "router"])
def test_a_gguf_name_unknown_to_the_hub_cache_lists_its_files(cache: Path, load: Any) -> None:
    refused = (ModelRefusedError, TokenizerError)
    with pytest.raises(refused, match="org/tiny:Q8_0: no such GGUF file; it has tiny-Q4_1.gguf, tiny-Q6_K.gguf"):
        load("org/tiny:Q8_0")
    with pytest.raises(refused, match="org/none:Q8_0.* cannot be fetched"):
        load("org/none:Q8_0")
