"""Formats in which models write tool calls, and how a chat template reveals its format.

Knows marks as text only. The gateway parses and constrains the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TemplateSignature:
    """Texts by which a chat template is recognised."""

    name: str
    """Name of the format."""
    marks: tuple[str, ...]
    """Marks around calls; in many vocabularies they are special tokens, which leave no text."""
    contains: tuple[str, ...]
    """All of these are in the template."""
    lacks: tuple[str, ...] = ()
    """None of these is."""

    def matches(self, template: str) -> bool:
        """Whether a template's source has this format."""
        return all(text in template for text in self.contains) and not any(text in template for text in self.lacks)


_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
_ARGUMENT_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")

SIGNATURES = (
    TemplateSignature("harmony", _HARMONY, ("<|channel|>", "<|message|>")),
    TemplateSignature("gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|tool_call>",)),
    TemplateSignature("kimi_k2", _KIMI, ("<|tool_call_begin|>",)),
    TemplateSignature("deepseek_dsml", ("｜DSML｜",), ("DSML",)),
    TemplateSignature("deepseek_v3", _DEEPSEEK, ("<｜tool▁call▁begin｜>", "```json")),
    TemplateSignature("deepseek_v31", _DEEPSEEK, ("<｜tool▁call▁begin｜>",)),
    TemplateSignature("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>"), ("minimax:tool_call", "<invoke")),
    TemplateSignature("seed_oss", ("<seed:tool_call>", "</seed:tool_call>"), ("seed:tool_call",)),
    TemplateSignature(
        "hunyuan_v3", (*_ARGUMENT_TAGS, "<tool_calls>", "</tool_calls>", "<tool_sep>"), ("<tool_sep>", "<arg_key>")
    ),
    TemplateSignature("glm45", _ARGUMENT_TAGS, ("<arg_key>",), ("<tool_calls>",)),
    TemplateSignature("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_call_start|>",)),
    TemplateSignature("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_list_start|>",)),
    TemplateSignature("qwen3_coder", _TOOL_CALL, ("<tool_call>", "<function=")),
    TemplateSignature("mistral_named", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]", "[ARGS]")),
    TemplateSignature("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    TemplateSignature("granite", ("<|tool_call|>",), ("<|tool_call|>",), ("<|/tool_call|>",)),
    TemplateSignature("hunyuan", ("<tool_calls>", "</tool_calls>"), ("<tool_calls>",), ("<tool_call>", "<arg_key>")),
    TemplateSignature("nemotron", ("<TOOLCALL>", "</TOOLCALL>"), ("<TOOLCALL>",)),
    TemplateSignature("phi4_mini", (), ("functools",)),
    TemplateSignature(
        "hermes",
        _TOOL_CALL,
        ("<tool_call>",),
        ("<tool_calls>", "<arg_key>", "<function=", "<function ", "<function>", "<invoke"),  # not "<function-name>"
    ),
    TemplateSignature("llama", ("<|python_tag|>",), ("<|python_tag|>",)),
    TemplateSignature("llama", ("<|python_tag|>",), ("<|start_header_id|>", "parameters")),
)
"""All formats. Of several that match a template, the first applies."""
REASONING_MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>": "<channel|>",
}
"""Marks that begin a model's reasoning -> marks that end it."""
MARKS = frozenset(
    [mark for signature in SIGNATURES for mark in signature.marks]
    + [mark for pair in REASONING_MARKS.items() for mark in pair]
)
"""All marks."""


def signature_of(template: str, signatures: Sequence[TemplateSignature] = SIGNATURES) -> TemplateSignature | None:
    """The format of a chat template's source; None = unknown."""
    return next((signature for signature in signatures if signature.matches(template)), None)
