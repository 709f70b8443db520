"""JSON constraints of thinking models: the thought comes first and is unconstrained, the constrained answer follows.

Knows `<think>` and `</think>`, and whether a prompt has begun a thought; nothing of other constraints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from betoken.rpc.constraints import JSON_OPTIONS
from betoken.v1.types_pb2 import Constraint

if TYPE_CHECKING:
    from betoken.router.text.tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
_NUM_TAIL_IDS = len(_END) + 4
"""Last ids of a prompt that are read: a mark and line ends, even if each byte is a token."""


def thought_first(constraint: Constraint, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Constraint:
    """The constraint of a chat's answer, which a thought precedes if the prompt has begun one, and may precede if the
    template knows thoughts and has not written an empty one."""
    kind = constraint.WhichOneof("kind")
    if kind not in ("json_object", "json_schema") or not tokenizer.thinks:
        return constraint
    tail = b"".join(map(tokenizer.token_bytes, prompt_ids[-_NUM_TAIL_IDS:])).rstrip()
    if tail.endswith(_END.encode()):
        return constraint
    schema = json.loads(constraint.json_schema) if kind == "json_schema" else {"type": "object"}
    return Constraint(lark=_grammar(schema, tokenizer.special_ids, is_begun=tail.endswith(_BEGIN.encode())))


def _grammar(schema: Mapping[str, object], special_ids: Mapping[str, int], *, is_begun: bool) -> str:
    begin, end = (f"<[{special_ids[mark]}]>" if mark in special_ids else json.dumps(mark) for mark in (_BEGIN, _END))
    lines = [
        "start: thought SPACE? answer" if is_begun else f"start: {begin} thought SPACE? answer | answer",
        f"thought: TEXT? {end}" if _END in special_ids else f"thought[lazy]: /(.|\\n)*/ {end}",
        r"TEXT: /(.|\n)+/",
        r"SPACE: /[ \n\t]{1,8}/",
        f"answer: %json {json.dumps({'x-guidance': JSON_OPTIONS, **schema})}",
    ]
    return "\n".join(lines) + "\n"
