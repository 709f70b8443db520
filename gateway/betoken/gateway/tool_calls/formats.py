"""The table of formats: which marks open a call, and what reads it."""

from __future__ import annotations

from dataclasses import dataclass

from betoken.gateway.tool_calls import tagged_calls
from betoken.gateway.tool_calls.json_calls import json_calls
from betoken.gateway.tool_calls.literal_calls import gemma_call, lfm2_calls
from betoken.gateway.tool_calls.named_calls import mistral_call, section
from betoken.gateway.tool_calls.reader import CallReader, ReadCall
from betoken.gateway.tool_calls.stream import Read


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One format."""

    openings: tuple[str, ...]
    """Marks that open a call or a section of calls."""
    read: ReadCall
    begins_with_object: bool = False
    """Whether an answer that begins with a JSON object may be a call without a mark."""


def _mistral(reader: CallReader, mark: str) -> Read[bool]:
    """Mistral's models write either form."""
    yield from reader.stream.spaces()
    is_list = (yield from reader.stream.peek()) == "["
    return (yield from (_MISTRAL_LIST if is_list else mistral_call)(reader, mark))


_MISTRAL_LIST = json_calls()
_DEEPSEEK = section(
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_DEEPSEEK_OPENINGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI = section(
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
    "functions.",
)
_DSML_SECTIONS = {f"<｜DSML｜{name}>": tagged_calls.dsml(name) for name in ("function_calls", "tool_calls")}


def _dsml(reader: CallReader, mark: str) -> Read[bool]:
    return (yield from _DSML_SECTIONS[mark](reader, mark))


def _hunyuan(reader: CallReader, mark: str) -> Read[bool]:
    """Its tagged calls are in a section."""
    if mark == "<tool_calls>":
        reader.expect("</tool_calls>")
        yield from reader.stream.spaces()
        if not (yield from reader.stream.take(("<tool_call>",))):
            return False
    return (yield from tagged_calls.HUNYUAN(reader, "<tool_call>"))


def _harmony(reader: CallReader, mark: str) -> Read[bool]:
    raise AssertionError("harmony has messages, not marks in content")


def _tagged(tags: tagged_calls.Tags) -> CallFormat:
    return CallFormat((tags.opening, tags.call) if tags.call else (tags.opening,), tags)


FORMATS = {
    "hermes": CallFormat(("<tool_call>",), json_calls("</tool_call>")),
    "llama": CallFormat(("<|python_tag|>",), json_calls(), begins_with_object=True),
    "mistral": CallFormat(("[TOOL_CALLS]",), _mistral),
    "mistral_named": CallFormat(("[TOOL_CALLS]",), _mistral),
    "granite": CallFormat(("<|tool_call|>",), json_calls()),
    "hunyuan": CallFormat(("<tool_calls>",), json_calls("</tool_calls>")),
    "nemotron": CallFormat(("<TOOLCALL>",), json_calls("</TOOLCALL>")),
    "phi4_mini": CallFormat(("functools", "<|tool_call|>"), json_calls()),
    "deepseek_v3": CallFormat(_DEEPSEEK_OPENINGS, _DEEPSEEK),
    "deepseek_v31": CallFormat(_DEEPSEEK_OPENINGS, _DEEPSEEK),
    "deepseek_dsml": CallFormat(tuple(_DSML_SECTIONS), _dsml),
    "kimi_k2": CallFormat(("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), _KIMI),
    "qwen3_coder": _tagged(tagged_calls.QWEN3_CODER),
    "seed_oss": _tagged(tagged_calls.SEED_OSS),
    "glm45": _tagged(tagged_calls.GLM),
    "hunyuan_v3": CallFormat(("<tool_calls>", "<tool_call>"), _hunyuan),
    "minimax_m2": _tagged(tagged_calls.MINIMAX),
    "lfm2": CallFormat(("<|tool_call_start|>",), lfm2_calls),
    "gemma4": CallFormat(("<|tool_call>",), gemma_call),
    "harmony": CallFormat((), _harmony),
}
"""All formats by name."""
