"""The format in which a chat template writes tool calls, with the ids of its marks."""

from __future__ import annotations

from collections.abc import Mapping

from betoken.common.tool_formats import signature_of
from betoken.v1.generation_pb2 import ToolFormat


def tool_format(template: str, special_ids: Mapping[str, int]) -> ToolFormat:
    """The format of a template's source, empty if it is unknown; `special_ids` are the tokenizer's special tokens."""
    signature = signature_of(template)
    if signature is None:
        return ToolFormat()
    marks = {mark: special_ids[mark] for mark in signature.marks if mark in special_ids}
    return ToolFormat(name=signature.name, mark_ids=marks)
