"""The router's tokenizer is the model's, and its hash is the workers'."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from betoken.common.errors import InvalidArgumentError
from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.engine.weights.fingerprint import hash_tokenizer
from betoken.engine.weights.sources import open_source
from betoken.router.text.chat import Chat
from betoken.router.text.chat_template import ChatTemplate
from betoken.router.text.tokenizer import Tokenizer, TokenizerError
from tests.router.harness import CHAT_TEMPLATE, byte_tokenizer_json, chat_ids


def save(directory: Path, **config: object) -> None:
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": ["a é"]},
        {"type": "BPE", "vocab": {"é": 1, "a": 0}, "merges": [["a", "é"]]},
        {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]},
        {"type": "WordLevel", "vocab": {"a": 0}},
    ],
)
def test_the_tokenizer_hash_is_the_engines(model: dict[str, object], tmp_path: Path) -> None:
    text = json.dumps({"model": model, "added_tokens": [{"id": 7, "content": "<s>", "special": True}]})
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert hash_tokenizer_json(text) == hash_tokenizer(tmp_path)


def test_the_tokenizer_hash_ignores_the_form_of_merges_and_sees_every_merge() -> None:
    data = json.loads(byte_tokenizer_json())
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in data["model"]["merges"]]
    data["model"]["merges"] = pairs
    as_pairs = hash_tokenizer_json(json.dumps(data))
    data["model"]["merges"] = [" ".join(pair) for pair in pairs]
    assert hash_tokenizer_json(json.dumps(data)) == as_pairs
    data["model"]["merges"].pop()
    assert hash_tokenizer_json(json.dumps(data)) != as_pairs


def test_importing_the_router_and_loading_a_tokenizer_imports_no_torch(tmp_path: Path) -> None:
    save(tmp_path)
    code = (
        "import sys, betoken.router.__main__; from betoken.router.text.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(tmp_path)!r}).encode('the'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'triton')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_tokenizer_directory_is_loaded_with_its_chat_template(tmp_path: Path) -> None:
    save(tmp_path, chat_template=CHAT_TEMPLATE, eos_token={"content": "<eos>"})
    tokenizer = Tokenizer.load(str(tmp_path))
    ids = chat_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<user>hi\n<assistant>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert chat_ids(Tokenizer.load(str(tmp_path)), [{"role": "user", "content": "a"}])[-1] == 0


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in messages %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 100_000 + "1 }}",
        "{% for a in %}",
    ],
    ids=["blocks", "brackets", "signs", "no template"],
)
def test_a_template_that_cannot_be_compiled_is_refused_by_name(tmp_path: Path, template: str) -> None:
    save(tmp_path, chat_template=template)
    with pytest.raises(TokenizerError, match="the chat template of .* does not compile: "):
        Tokenizer.load(str(tmp_path))


def test_variables_of_a_chat_template_end_with_the_assistants_part() -> None:
    source = (
        "{% set last = 'none' %}{% for m in messages %}{% generation %}{% set last = m.content %}({{ last }})"
        "{% endgeneration %}{{ last }} {% endfor %}"
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (theirs,), _ = render_jinja_template([chat], chat_template=source)
    assert ChatTemplate(source, {}).render(Chat(chat)) == theirs == "(hi)none (ho)none "


def test_special_tokens_of_a_checkpoint_that_names_them_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As transformers before 4.34 saved them; it reads that file still, and what it names wins."""
    save(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", eos_token="a")
    tokens = tmp_path / "special_tokens_map.json"
    tokens.write_text('{"bos_token": {"content": "<eos>", "lstrip": false}, "eos_token": "b"}')
    messages = [{"role": "user", "content": "hi"}]
    template = Tokenizer.load(str(tmp_path)).chat_template
    assert template is not None and template.render(Chat(messages)) == "<eos>hib"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    save(tmp_path, **config, added_tokens_decoder={})  # a later version's: the file says nothing more
    template = Tokenizer.load(str(tmp_path)).chat_template
    assert template is not None and template.render(Chat(messages)) == "hia"
    save(tmp_path, **config)
    tokens.write_text("[]")
    with pytest.raises(TokenizerError, match=r"special_tokens_map\.json is not a JSON object"):
        Tokenizer.load(str(tmp_path))


def described(content: str, **flags: bool) -> dict[str, object]:
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), **flags}


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|end|>"},  # which tokenizer.json takes for text
        {"eos_token": "<eos>", "bos_token": "<|new|>", "pad_token": "the"},
        {"eos_token": "<eos>", "additional_special_tokens": ["<|new|>", "the"]},
        {"eos_token": "<eos>", "extra_special_tokens": {"image_token": "<|new|>"}},
        {"eos_token": "<eos>", "split_special_tokens": True},
        {"added_tokens_decoder": {"261": described("<|end|>", rstrip=True), "999": described("<|new|>", special=True)}},
        {"eos_token": "<|end|>", "added_tokens_decoder": {"261": described("<|end|>"), "0": described("<eos>")}},
    ],
)
def test_tokens_that_only_the_configuration_knows_are_transformers(config: dict[str, object], tmp_path: Path) -> None:
    """Whoever edits a checkpoint by hand, to chat, say, edits that file alone."""
    template = "{{ image_token }}{{ messages[0].content }}{{ eos_token }}"
    save(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=template, **config)
    data = json.loads(byte_tokenizer_json())
    data["added_tokens"].append({"id": len(data["model"]["vocab"]), **described("<|end|>", special=False)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    ours, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    text = "<|new|> the<|end|> end<eos>"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": text}]
    assert chat_ids(ours, chat) == theirs.apply_chat_template(chat)["input_ids"]
    assert set(theirs.all_special_ids) <= set(ours.special_ids.values())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": "<mask>"}))
    assert Tokenizer.load(str(tmp_path)).fingerprint != ours.fingerprint


@pytest.mark.parametrize("tokens", [{"a": {}}, {"1": {"content": 1}}, {"1": 1}, [1]])
def test_invalid_descriptions_of_added_tokens_are_rejected(tokens: object, tmp_path: Path) -> None:
    save(tmp_path, added_tokens_decoder=tokens)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json describes tokens that are none: "):
        Tokenizer.load(str(tmp_path))


def test_a_template_that_refuses_or_misbehaves_is_the_requests_fault(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no tools"):
        chat_ids(tokenizer, [{"role": "tool", "content": "x"}])
    save(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidArgumentError, match="messages"):
        chat_ids(Tokenizer.load(str(tmp_path)), [{"role": "user", "content": "x"}])


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))
    save(tmp_path, chat_template="{% if %}")
    with pytest.raises(TokenizerError, match="template"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="is not a JSON object"):
        Tokenizer.load(str(tmp_path))
    save(tmp_path, chat_template=["default"])
    assert Tokenizer.load(str(tmp_path)).chat_template is None


def test_a_home_directory_is_found_as_workers_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands `--tokenizer=~/model` or a variable's `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    save(tmp_path / "model")
    assert Tokenizer.load("~/model").vocab_size > 0


def test_a_tokenizer_revision_is_loaded_from_the_hub(tmp_path: Path) -> None:
    """A hub checkout; tests/e2e/test_hub.py covers the hub."""
    save(tmp_path)
    with pytest.raises(TokenizerError, match=rf"revision 'v1\.2' is one of the hub, and {tmp_path} is a directory"):
        Tokenizer.load(str(tmp_path), "v1.2")


def test_the_fingerprint_is_of_all_that_makes_ids_and_text() -> None:
    text, config = byte_tokenizer_json(), {"eos_token": "<eos>"}
    data = json.loads(text)
    data["normalizer"] = {"type": "Lowercase"}
    same, *others = (
        Tokenizer(text, config, CHAT_TEMPLATE, "test"),
        Tokenizer(json.dumps(data), config, CHAT_TEMPLATE, "test"),
        Tokenizer(text, {"eos_token": "<end>"}, CHAT_TEMPLATE, "test"),
        Tokenizer(text, config, CHAT_TEMPLATE + " ", "test"),
        Tokenizer(text, config, None, "test"),
        Tokenizer(text, config | {"split_special_tokens": True}, CHAT_TEMPLATE, "test"),
    )
    assert {tokenizer.hash for tokenizer in others} == {same.hash}
    assert len({tokenizer.fingerprint for tokenizer in (same, *others)}) == 6
    assert Tokenizer(text, config, CHAT_TEMPLATE, "elsewhere").fingerprint == same.fingerprint


def test_encoding_a_long_text_on_a_thread_holds_up_no_other(tokenizer: Tokenizer) -> None:
    times_s = [time.perf_counter()]
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(tokenizer.encode, "the end, or so they say\n" * 30_000)
        while not encoding.done():
            time.sleep(0.001)
            times_s.append(time.perf_counter())
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(times_s))
    assert longest_s < 0.5 * (times_s[-1] - times_s[0])


def test_a_gguf_file_holds_the_tokenizer_that_workers_hash(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", ["<|end|>", "a", "b", "ab"])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    writer.add_string("tokenizer.chat_template", "{{ messages[0].content }}<|end|>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(str(tmp_path / "tiny.gguf"))
    assert chat_ids(tokenizer, [{"role": "user", "content": "aab"}]) == [1, 3, 0]
    assert tokenizer.special_ids == {"<|end|>": 0} and tokenizer.is_concatenative
    source = open_source(str(tmp_path), None)
    assert tokenizer.hash == Tokenizer.load(str(tmp_path)).hash == source.tokenizer_hash()
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match="has 4 bytes and is not a GGUF file"):
        Tokenizer.load(str(tmp_path / "tiny.gguf"))
    with pytest.raises(TokenizerError, match="revision 'v1' is one of the hub, and .* is a file"):
        Tokenizer.load(str(tmp_path / "tiny.gguf"), "v1")
