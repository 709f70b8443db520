"""In which form a chat template has tools called, by the marks that it writes. Knows templates as text only."""

from __future__ import annotations

from collections.abc import Mapping

from betoken.v1.generation_pb2 import ToolFormat

_MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


def tool_format(template: str, special_ids: Mapping[str, int]) -> ToolFormat:
    """The form of a template's source; `special_ids` are the tokenizer's special tokens."""
    marks = {mark: special_ids[mark] for mark in _MARKS if mark in special_ids}
    return ToolFormat(name=_name(template), mark_ids=marks)


def _name(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral_named" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # which is another form, of XML
        return "hermes"
    is_llama = "<|start_header_id|>" in template and "parameters" in template
    return "llama" if is_llama or "<|python_tag|>" in template else ""
