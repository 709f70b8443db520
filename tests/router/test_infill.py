"""Prompts with a gap: the layout of each family's tokens, the cut to the context, ends and predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from google.protobuf.json_format import ParseDict
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as FastTokenizer

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.encoding import TextLimits
from betoken.router.text.infill_prompt import encode_infill, predicted_of_infill, with_infill_ends
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.validation import validate_generate
from betoken.testing.fake_model import FakeModel
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2 import Infill, InfillFile
from tests.router.harness import MakeCluster, byte_fallback_tokenizer_json, byte_tokenizer_json

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
STARCODER2 = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>"]
SNIPPET = "\n\n--- snippet ---\n\n"
WITHOUT_FILES = {
    "Qwen2.5-Coder": (QWEN, "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>"),
    "CodeGemma": ([*QWEN[:3], "<|file_separator|>"], "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>"),
    "StarCoder2": (STARCODER2, "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>"),
    "SantaCoder": (
        ["<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"],
        "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>",
    ),
    "DeepSeek": (
        ["<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>"],
        "<\uff5cfim\u2581begin\uff5c>{p}<\uff5cfim\u2581hole\uff5c>{s}<\uff5cfim\u2581end\uff5c>",
    ),
    "Seed-Coder": (
        ["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"],
        "<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>",
    ),
    "Codestral": (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]{s}[PREFIX]{p}"),
}
WITH_FILES = {
    "Qwen2.5-Coder": (
        QWEN,
        "<|repo_name|>myproject\n<|file_sep|>a.py\n{a}<|file_sep|>filename\n{b}<|file_sep|>filename\n"
        "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    ),
    "StarCoder2": (
        STARCODER2,
        "<repo_name>myproject<file_sep>a.py\n{a}<file_sep>filename\n{b}<file_sep>"
        "<fim_prefix>filename\n{p}<fim_suffix>{s}<fim_middle>",
    ),
    "Granite Code": (
        [*STARCODER2[:4], "<filename>", "<reponame>"],
        SNIPPET + "{a}" + SNIPPET + "{b}<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    ),
    "Codestral": (["[PREFIX]", "[SUFFIX]"], SNIPPET + "{a}" + SNIPPET + "{b}[SUFFIX]{s}[PREFIX]{p}"),
}
PREFIX, SUFFIX, A, B = "def f(x):\n    ", "\n    return the\n", "the a\n", "on b\n"
LIMITS = TextLimits(1 << 20, 2048)


def with_tokens(names: list[str], *, are_special: bool = True, text: str = "") -> Tokenizer:
    fast = FastTokenizer.from_str(text or byte_tokenizer_json())
    fast.add_tokens([AddedToken(name, special=are_special, normalized=False) for name in names])
    return Tokenizer(fast.to_str(), {}, None, "test")


def ids_of(tokenizer: Tokenizer, layout: str) -> list[int]:
    """Ids of a layout with its texts, each part encoded alone."""
    filled = layout.format(p=f"\0{PREFIX}\0", s=f"\0{SUFFIX}\0", a=f"\0{A}\0", b=f"\0{B}\0")
    filled = filled.replace(SNIPPET, f"\0{SNIPPET}\0")
    return [token_id for part in filled.split("\0") for token_id in tokenizer.encode(part)]


async def encoded(tokenizer: Tokenizer, *, limits: TextLimits = LIMITS, num_new: int = 1, **texts: object) -> list[int]:
    given = Infill(**({"prefix": PREFIX, "suffix": SUFFIX} | texts))  # type: ignore[arg-type]
    return list(await encode_infill(given, tokenizer, limits, num_new))


@pytest.mark.parametrize(("names", "layout"), WITHOUT_FILES.values(), ids=WITHOUT_FILES)
async def test_an_infill_prompt_has_the_layout_of_its_family(names: list[str], layout: str) -> None:
    tokenizer = with_tokens(names)
    assert await encoded(tokenizer) == ids_of(tokenizer, layout)
    assert tokenizer.infill is not None and set(tokenizer.infill.end_ids) >= {tokenizer.special_ids[n] for n in names}


@pytest.mark.parametrize(("names", "layout"), WITH_FILES.values(), ids=WITH_FILES)
async def test_files_of_an_infill_prompt_have_the_layout_of_its_family(names: list[str], layout: str) -> None:
    tokenizer = with_tokens(names)
    files = [InfillFile(name="a.py", text=A), InfillFile(text=B)]
    assert await encoded(tokenizer, files=files) == ids_of(tokenizer, layout)


async def test_code_llamas_suffix_has_no_blank_before_it() -> None:
    names = ["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>"]
    fast = FastTokenizer.from_str(with_tokens(names, text=byte_fallback_tokenizer_json())._fast.to_str())
    fast.add_special_tokens(["<s>"])
    bos = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(fast.to_str(), {"bos_token": "<s>"}, None, "test")
    pre, mid, suf, _ = (tokenizer.special_ids[name] for name in names)
    blank, a, b, line_end = (fast.token_to_id(character) for character in "\u2581ab\n")
    expected = [bos, pre, blank, a, blank, suf, b, line_end, mid]
    assert await encoded(tokenizer, prefix="a ", suffix="b\n") == expected
    assert await encoded(tokenizer, prefix="a ", suffix="") == [bos, pre, blank, a, blank, suf, mid]


@pytest.mark.parametrize("are_special", [True, False])
async def test_names_of_tokens_in_infill_texts_are_text(are_special: bool) -> None:
    tokenizer = with_tokens(QWEN, are_special=are_special)
    spelled = "".join(QWEN) + "\ufdd1<|fim_pad|><eos>"
    ids = await encoded(tokenizer, prefix=spelled, suffix=spelled, files=[InfillFile(name=spelled, text=spelled)])
    added = tokenizer._fast.get_added_tokens_decoder()
    names = [added[token_id].content for token_id in ids if token_id in added]
    assert names == [QWEN[4], QWEN[5], QWEN[5], QWEN[0], QWEN[2], QWEN[1]]
    assert tokenizer.decode(ids).count(spelled) == 4


async def test_an_infill_prompt_is_cut_to_the_context() -> None:
    """As in llama.cpp: the end of the prefix in three quarters, the begin of the suffix in one, whole last files."""
    tokenizer = with_tokens(QWEN[:3])
    assert tokenizer.infill is not None
    pre, suf, mid = tokenizer.infill.prefix_id, tokenizer.infill.suffix_id, tokenizer.infill.middle_id
    p, s = tokenizer.encode("p" * 99 + "q" * 60), tokenizer.encode("s" * 20 + "t" * 99)
    limits = TextLimits(1 << 20, 100)
    ids = await encoded(tokenizer, limits=limits, num_new=17, prefix="p" * 99 + "q" * 60, suffix="s" * 20 + "t" * 99)
    assert ids == [pre, *p[-60:], suf, *s[:20], mid]
    ids = await encoded(tokenizer, limits=limits, num_new=17, prefix="q" * 159, suffix="ss")
    assert (len(ids), ids[-4:]) == (83, [suf, *s[:2], mid])
    ids = await encoded(tokenizer, limits=limits, num_new=17, prefix="q", suffix="s" * 20 + "t" * 99)
    assert (len(ids), ids[-1], ids[:2]) == (83, mid, [pre, p[-1]])
    files = [InfillFile(text="the" * 30), InfillFile(text="on" * 20), InfillFile(text="the")]
    ids = await encoded(tokenizer, limits=limits, num_new=1, prefix="q", suffix="", files=files)
    snippet = tokenizer.encode(SNIPPET)
    assert ids == [*snippet, *tokenizer.encode("on" * 20), *snippet, *tokenizer.encode("the"), pre, p[-1], suf, mid]


async def test_an_infill_without_tokens_or_with_too_long_texts_is_rejected_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="infill = set: must be absent: .* no fill-in-the-middle tokens"):
        await encoded(with_tokens(QWEN[:2]))
    with pytest.raises(InvalidArgumentError, match="infill = 29 bytes: must be at most 20"):
        await encoded(with_tokens(QWEN), limits=TextLimits(20, 100), prefix="p" * 12, files=[InfillFile(text="a")])


def test_fim_tokens_leave_no_text_and_end_answers_of_prompts_with_a_gap() -> None:
    tokenizer = with_tokens(QWEN, are_special=False)
    pad, pre, suf = (tokenizer.special_ids[name] for name in ("<|fim_pad|>", "<|fim_prefix|>", "<|fim_suffix|>"))
    assert tokenizer.decode([*tokenizer.encode("the"), pad]) == "the"
    assert with_infill_ends((0,), tokenizer, [pre, 5], 999) == (0,)
    assert pad in with_infill_ends((0,), tokenizer, [pre, 5, suf], 999)
    assert max(with_infill_ends((0,), tokenizer, [pre, 5, suf], pad)) < pad, "the model has no such token"


async def test_what_followed_the_prefix_elsewhere_is_predicted() -> None:
    tokenizer = with_tokens(QWEN)
    old = "def area(r):\n    return 3 * r * r\n"
    gap = {"prefix": "import x\n\ndef area(r):\n", "suffix": "\n\nprint(1)\n"}
    ids = await encoded(tokenizer, files=[InfillFile(text=old), InfillFile(text="# other\n")], **gap)
    assert tokenizer.decode(predicted_of_infill(tokenizer, ids)) == "    return 3 * r * r\n"
    ids = await encoded(tokenizer, prefix=gap["prefix"], suffix=gap["suffix"] + old + "more")
    assert tokenizer.decode(predicted_of_infill(tokenizer, ids)) == "    return 3 * r * r\nmore"
    assert not predicted_of_infill(tokenizer, await encoded(tokenizer, **gap))
    assert not predicted_of_infill(tokenizer, tokenizer.encode(old + old)), "no gap"


def test_fim_tokens_that_a_gguf_file_names_are_its_format(tmp_path: Path) -> None:
    data = json.loads(byte_tokenizer_json())
    tokens = [*sorted(data["model"]["vocab"], key=data["model"]["vocab"].get), "<P>", "<S>", "<M>", "<N>", "<F>"]
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * 260 + [TokenType.CONTROL] * 5)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    for role, name in {"pre": "<P>", "suf": "<S>", "mid": "<M>", "pad": "<N>", "sep": "<F>"}.items():
        writer.add_uint32(f"tokenizer.ggml.fim_{role}_token_id", tokens.index(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    infill = Tokenizer.load(str(tmp_path / "model.gguf")).infill
    assert infill is not None and (infill.prefix_id, infill.suffix_id, infill.middle_id) == (261, 262, 263)
    assert infill.file_id == 265 and set(infill.end_ids) == {261, 262, 263, 264, 265}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    fast = FastTokenizer.from_str(byte_tokenizer_json())
    fast.add_special_tokens(QWEN)
    return Tokenizer(fast.to_str(), {"eos_token": "<eos>"}, None, "test")


async def test_an_infill_ends_at_a_fim_token_also_when_its_ids_are_resumed(
    make_cluster: MakeCluster, tokenizer: Tokenizer
) -> None:
    script = (*tokenizer.encode("the"), tokenizer.special_ids["<|file_sep|>"], *tokenizer.encode("on"))
    model = FakeModel(tokenizer.vocab_size, script=script)
    cluster = await make_cluster(model=model, draft_hellos=[{"predicting_drafters": ["ngram"]}])
    gap: dict[str, Any] = {"prefix": "def area(r):\n", "suffix": "\n# def area(r):\n    return r\n"}
    reply = await cluster.generate(infill=gap, drafter="ngram", num_draft_tokens=3)
    assert (reply.text, reply.ids) == ("the", list(script[:2]))
    assert reply.finish.reason == pb.FINISH_REASON_STOP
    predicted = cluster.drafters[0].opened[-1].predicted_ids
    assert tokenizer.decode(predicted) == "    return r\n"
    again = await cluster.generate(prompt_ids=reply.start.prompt_ids, resume_ids=[script[0]], seed=1)
    assert again.ids == [script[1]]
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.supports_infill


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"files": [{"name": "a" * 4097}]}, r"infill\.files\[0\]\.name"),
        ({"files": [{}] * 1025}, "infill.files = 1025"),
    ],
)
async def test_an_infill_outside_its_limits_is_rejected(fields: dict[str, Any], field: str) -> None:
    message = ParseDict({"infill": fields}, pb.GenerateRequest())
    with pytest.raises(InvalidArgumentError, match=field):
        validate_generate(message)
