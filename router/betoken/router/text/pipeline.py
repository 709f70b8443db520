"""Options of `tokenizer_config.json` for the whole tokenizer: the beginning of a text, and changes to a decoded one.

Follows that file's options as transformers does. Classes that build their tokenizer anew change `tokenizer.json`'s; the
generic class leaves it as it is. A class is recognised by its name alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

_BYTE_LEVEL_CLASSES = frozenset(
    "BlenderbotTokenizer CodeGenTokenizer CohereTokenizer GPT2Tokenizer GPTNeoXTokenizer Qwen2Tokenizer"
    " RobertaTokenizer WhisperTokenizer".split()
)
"""Tokenizer classes that heed `add_prefix_space` and work on bytes."""
_METASPACE_CLASSES = frozenset(("CodeLlamaTokenizer", "LlamaTokenizer"))
"""Tokenizer classes that heed it and write spaces as letters."""
_REFUSED = {
    "fix_mistral_regex": "rewrites the tokenizer; apply it and save the result",
    "fast_tokenizer_files": "names other files than tokenizer.json; keep the intended file under that name",
}


def refused_options(config: Mapping[str, Any]) -> Iterator[str]:
    """Options that are set and would change ids in ways that are not known here, each with a remedy."""
    for option, remedy in _REFUSED.items():
        if config.get(option) and config[option] != ["tokenizer.json"]:
            yield f"{option} = {config[option]!r}: {remedy}"


def cleans_up(data: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether spaces before punctuation go from decoded texts; `data` is the content of `tokenizer.json`."""
    is_bpe = (data.get("model") or {}).get("type") == "BPE"
    is_meant = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(config.get("clean_up_tokenization_spaces", False) and (is_meant or not is_bpe))


def adapted(data: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`data`, the content of `tokenizer.json`, as the class of `config` would build it with its options."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    adds_space = config.get("add_prefix_space")
    if name in _BYTE_LEVEL_CLASSES and adds_space is not None:
        data = copy.deepcopy(data)
        for part in _parts(data.get("pre_tokenizer"), "ByteLevel"):
            part["add_prefix_space"] = bool(adds_space)
    if name in _METASPACE_CLASSES and (adds_space is not None or "legacy" in config):
        data = copy.deepcopy(data)
        for part in _parts(data.get("pre_tokenizer"), "Metaspace"):
            is_added = part.get("prepend_scheme") != "never" if adds_space is None else bool(adds_space)
            is_legacy = name == "LlamaTokenizer" and bool(config.get("legacy", False))
            part["prepend_scheme"] = ("always" if is_legacy else "first") if is_added else "never"
            if name == "LlamaTokenizer":  # the other always does
                _strip_first(data, is_added)
    return data


def _parts(component: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Components of one type in a pre-tokenizer or what it is made of."""
    if isinstance(component, dict):
        if component.get("type") == kind:
            yield component
        for part in component.get("pretokenizers") or ():
            yield from _parts(part, kind)


def _strip_first(data: dict[str, Any], is_added: bool) -> None:
    """Let the decoder remove the first space exactly if one was added."""
    decoders = (data.get("decoder") or {}).get("decoders")
    if isinstance(decoders, list):
        decoders[:] = [part for part in decoders if part.get("type") != "Strip"]
        if is_added:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
