"""Options of `tokenizer_config.json` are honoured as in `transformers`, or rejected by name."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from betoken.router.text.chat import Chat
from betoken.router.text.clean_up import CleaningDetokenizer, clean_up
from betoken.router.text.tokenizer import Tokenizer, TokenizerError
from tests.router.harness import byte_fallback_tokenizer_json, byte_tokenizer_json

TOKENS = ("<s>", "</s>", "<eos>", "<bos>", "<pad>", "<mask>")
BYTES = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer")
PIECES = ("LlamaTokenizer", "GemmaTokenizer")
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "SomeTokenizerOfTheirOwn", None)
OPTIONS: dict[str, list[Any]] = {
    "add_prefix_space": [True, False],
    "legacy": [True, False],
    "clean_up_tokenization_spaces": [True, False],
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": [True],
    "add_bos_token": [True, False],
    "add_eos_token": [True, False],
    "split_special_tokens": [True, False],
    "model_max_length": [2, 1e30],
    "max_length": [2],
    "padding_side": ["left", "right"],
    "truncation_side": ["left", "right"],
    "unk_token": ["a"],
    "bos_token": ["<s>", "<new>", None],
    "eos_token": ["the", "<new>", {"__type": "AddedToken", "content": "<eos>", "lstrip": True}, None],
    "pad_token": ["<new>", None],
    "sep_token": ["<other>"],
    "image_token": ["<other>"],
    "extra_special_tokens": [["<new>"], {"audio_token": "<other>"}],
    "additional_special_tokens": [["<new>", "<other>"]],
    "errors": ["strict"],
    "trim_offsets": [False],
    "use_default_system_prompt": [True],
    "sp_model_kwargs": [{}],
    "model_input_names": [["input_ids"]],
    "processor_class": ["SomeProcessor"],
}
PIECE = st.sampled_from(
    ["the", " ", "  ", "a", "b", ".", " .", "'", "n't", "é", "\n", "\u6f22", *TOKENS, "<new>", "<other>"]
)
CONFIGS = st.sets(st.sampled_from(sorted(OPTIONS)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(OPTIONS[name]) for name in sorted(names)})
)


@cache
def saved_by(name: str | None) -> tuple[str, dict[str, Any]]:
    """A tokenizer's two files as the class writes them."""
    if name not in (*BYTES, *PIECES):
        return byte_tokenizer_json(), {"eos_token": "<eos>"} | ({"tokenizer_class": name} if name else {})
    model = json.loads(byte_tokenizer_json() if name in BYTES else byte_fallback_tokenizer_json())["model"]
    vocab = dict(model["vocab"])
    for token in TOKENS:
        vocab.setdefault(token, len(vocab))
    made = getattr(transformers, name)(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]])
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        text = Path(folder, "tokenizer.json").read_text()
        return text, json.loads(Path(folder, "tokenizer_config.json").read_text())


def both(text: str, config: dict[str, Any], **files: str) -> tuple[Tokenizer, Any]:
    """Ours and theirs of the same files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"tokenizer": text, "tokenizer_config": json.dumps(config), **files}.items():
            Path(folder, f"{name}.json").write_text(content)
        return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", [*BYTES, *PIECES, *GENERIC])
@given(options=CONFIGS, pieces=st.lists(PIECE, max_size=12))
@settings(deadline=None, max_examples=40)
def test_ids_and_text_equal_transformers_whatever_the_tokenizer_options(
    name: str | None, options: dict[str, Any], pieces: list[str]
) -> None:
    text, config = saved_by(name)
    ours, theirs = both(text, config | options)
    for adds in (True, False):
        ids = theirs("".join(pieces), add_special_tokens=adds)["input_ids"]
        assert ours.encode("".join(pieces), add_special_tokens=adds) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
@given(words=st.lists(st.sampled_from(["it", "n't", "'", "'s", ".", ",", "is", "?"]), max_size=8), cleans=st.booleans())
@settings(deadline=None, max_examples=20)
def test_spaces_before_punctuation_go_where_the_tokenizer_is_no_bpe(kind: str, words: list[str], cleans: bool) -> None:
    known = ["<unk>", "it", "n't", "'", "'s", ".", ",", "is", "?"]
    model: dict[str, Any] = {"type": kind, "vocab": {word: index for index, word in enumerate(known)}}
    model |= {"unk_token": "<unk>"}
    if kind == "Unigram":
        model = {"type": kind, "vocab": [[word, -1.0] for word in known], "unk_id": 0, "byte_fallback": False}
    split = {"type": "WhitespaceSplit"}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": split})
    ours, theirs = both(text, {"clean_up_tokenization_spaces": cleans})
    ids = theirs(" ".join(words))["input_ids"]
    shown = theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode(" ".join(words)) == ids and ours.decode(ids) == shown
    growing = ours.detokenizer([])
    assert "".join(growing.step([token_id])[0] for token_id in ids) + growing.flush() == shown


class Said:
    """A detokenizer whose ids are places in a list of texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def step(self, ids: list[int]) -> tuple[str, list[int]]:
        texts = [self.texts[index] for index in ids]
        return "".join(texts), [len(text) for text in texts]

    def flush(self) -> str:
        return ""


@given(texts=st.lists(st.text(" .?!,'ntmsverx", max_size=4), max_size=12))
@settings(deadline=None, max_examples=500)
def test_a_growing_text_is_cleaned_up_like_the_whole_text(texts: list[str]) -> None:
    growing = CleaningDetokenizer(Said(texts))  # type: ignore[arg-type]
    released = ""
    for index in range(len(texts)):
        text, num_chars = growing.step([index])
        assert num_chars == [len(text)]
        released += text
    assert released + growing.flush() == clean_up("".join(texts))


def test_words_are_released_as_they_end() -> None:
    growing = CleaningDetokenizer(Said(["a", " b", " nerves", " tense", "s", " .", " a"]))  # type: ignore[arg-type]
    assert [growing.step([index])[0] for index in range(7)] == ["a", " b", "", " nerves", "", " tenses", ". a"]


def test_the_fingerprint_reports_options_that_change_ids_or_text() -> None:
    text, config = saved_by("GPT2Tokenizer")
    flag = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    options: list[dict[str, Any]] = [{}, {"add_prefix_space": True}, {"clean_up_tokenization_spaces": True, flag: True}]
    made = [Tokenizer(text, config | given, None, "test") for given in options]
    assert len({tokenizer.fingerprint for tokenizer in made}) == 3 and len({tokenizer.hash for tokenizer in made}) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("fix_mistral_regex", True), ("fast_tokenizer_files", ["tokenizer.4.0.0.json"])]
)
def test_unsupported_tokenizer_options_are_rejected_by_name(option: str, value: object) -> None:
    with pytest.raises(TokenizerError, match=f"^test/tokenizer_config.json: {option} = "):
        Tokenizer(byte_tokenizer_json(), {option: value}, None, "test")
    Tokenizer(byte_tokenizer_json(), {"fix_mistral_regex": False, "fast_tokenizer_files": ["tokenizer.json"]}, None, "")


@given(special=st.booleans(), pieces=st.lists(PIECE, max_size=8))
@settings(deadline=None, max_examples=20)
def test_tokens_of_added_tokens_json_are_transformers(special: bool, pieces: list[str]) -> None:
    num_ids = len(json.loads(byte_tokenizer_json())["model"]["vocab"])
    added = json.dumps({"<new>": num_ids + 1, "<other>": num_ids})
    config: dict[str, Any] = {"eos_token": "<eos>"} | ({"pad_token": "<new>"} if special else {})
    ours, theirs = both(byte_tokenizer_json(), config, added_tokens=added)
    ids = theirs("".join(pieces))["input_ids"]
    assert ours.encode("".join(pieces)) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("form", ["list", "files"])
def test_a_chat_with_tools_takes_the_template_that_is_named_for_it(form: str, tmp_path: Path) -> None:
    templates = {"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | length }} tools", "rag": "none"}
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    config: dict[str, Any] = {"eos_token": "<eos>"}
    if form == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    else:
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    messages, tool = [{"role": "user", "content": "hi"}], {"type": "function", "function": {"name": "f"}}
    for tools in ([], [tool]):
        text = theirs.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert ours.render(Chat(messages, tools=tools)) == text
