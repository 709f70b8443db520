"""Chats with more than roles and texts, and their rendering by templates, as in transformers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.chat import Chat, chat_of
from betoken.router.text.chat_template import ChatTemplate
from betoken.v1.generation_pb2 import ChatMessages

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}{{ ' ' + message.name if message.name }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}</>{% endfor %}{% if thinking %}<think>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": "\u00e9"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"z": 2, "a": "\u00e9"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi", "name": "bob"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]


def theirs(messages: list[dict[str, Any]], **options: Any) -> str:
    (text,), _ = render_jinja_template([messages], chat_template=TEMPLATE, **options)
    return text


def message(messages: list[dict[str, Any]], **fields: Any) -> ChatMessages:
    made = ChatMessages(**fields)
    for one in messages:
        extra = {key: value for key, value in one.items() if key not in ("role", "content")}
        made.messages.add(role=one["role"], content=one["content"], extra=json.dumps(extra) if extra else "")
    return made


def test_tools_calls_and_arguments_reach_the_chat_template_in_their_order() -> None:
    ours = chat_of(message(MESSAGES, tools=[json.dumps(TOOL)], template_arguments='{"thinking": true}'))
    text = ChatTemplate(TEMPLATE, {}).render(ours)
    assert text == theirs(MESSAGES, tools=[TOOL], thinking=True, add_generation_prompt=True)
    assert '"z": 1, "a": "\u00e9"' in text and '(f {"z": 2, "a": "\u00e9"})' in text and "<user bob>" in text


def test_a_continued_chat_keeps_the_last_message_to_the_last_space() -> None:
    messages = [MESSAGES[0], {"role": "assistant", "content": "so far "}]
    text = ChatTemplate(TEMPLATE, {}).render(Chat(messages, continues=True))
    assert text == theirs(messages, continue_final_message=True) and text.endswith("<assistant>so far ")
    with pytest.raises(InvalidArgumentError, match="continue_final_message"):
        ChatTemplate("{{ messages[0].content | upper }}", {}).render(Chat([MESSAGES[0]], continues=True))


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Chat(MESSAGES, tools=[TOOL]), "messages.tools"),
        (Chat(MESSAGES, arguments={"thinking": True}), "messages.template_arguments.thinking"),
        (Chat(MESSAGES, arguments={"messages": []}), "messages.template_arguments.messages"),
        (Chat(MESSAGES, arguments={"eos_token": "x"}), "messages.template_arguments.eos_token"),
    ],
)
def test_chat_arguments_unknown_to_the_template_are_rejected_by_name(chat: Chat, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field} = "):
        ChatTemplate("{{ messages[0].content }}{{ eos_token }}", {"eos_token": "</s>"}).render(chat)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": ["["]}, "messages.tools[0]"),
        ({"tools": ["[]"]}, "messages.tools[0]"),
        ({"tools": ["{}", "[" * 5000]}, "messages.tools[1]"),
        ({"template_arguments": "3"}, "messages.template_arguments"),
        ({"messages": [{"role": "user", "extra": "x"}]}, "messages.messages[0].extra"),
        ({"messages": [{"role": "user", "extra": '{"role": "system"}'}]}, "messages.messages[0].extra"),
    ],
)
def test_chat_texts_that_are_not_json_objects_are_rejected_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)} = "):
        chat_of(ChatMessages(**fields))
