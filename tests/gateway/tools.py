"""A chat template with tools, its special tokens, and the arguments of a call."""

from __future__ import annotations

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)


SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


ARGUMENTS = '{"city": "Bern"}'
