"""A chat template with tools, its special tokens, and the arguments of a call."""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
TEMPLATES = {
    "": TEMPLATE,
    "hermes": TEMPLATE + "{# <tool_call> #}",
    "mistral": TEMPLATE + "{# [TOOL_CALLS] #}",
    "mistral named": TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}",
    "llama": TEMPLATE + "{# <|python_tag|> #}",
}
"""Templates by the format of their tool calls; one does not show it."""


SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


ARGUMENTS = '{"city": "Bern"}'


HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }} {# <tool_call> #}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OPEN_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
"""Takes any city."""
WRITTEN = {
    "hermes": f'I ask.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f'I ask.[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "mistral named": f"I ask.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "llama": f'I ask.<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
}
"""A sentence and one call, by format."""
