"""Answers with tool calls as models write them, by format. The wording follows the vendors' chat templates."""

# ruff: noqa: E501 (lines of chat templates and answers as models write them)

from __future__ import annotations

from typing import Any

from betoken.gateway.tool_calls.parts import Arguments, Call, Content, Part, Reasoning

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
}
A, B = '{"city": "Bern"}', '{"a": 1, "b": [2, {"c": "}"}]}'
WEATHER: tuple[Part, ...] = (Call("weather"), Arguments(A))
ADD: tuple[Part, ...] = (Call("add"), Arguments(B))
HERMES_WEATHER = f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>'
HERMES_ADD = f'<tool_call>\n{{"name": "add", "arguments": {B}}}\n</tool_call>'

ANSWERS: list[tuple[str, str, list[Any]]] = [
    ("", "hello", [Content("hello")]),
    ("", " hello\n", [Content(" hello\n")]),
    ("", "<think>\nhm\n</think>\n\nhello", [Reasoning("hm"), Content("hello")]),
    ("", "<think></think>hello", [Content("hello")]),
    ("", "<think>\nhm", [Reasoning("hm")]),
    ("", "a <think> b", [Content("a <think> b")]),
    ("", "[THINK]hm[/THINK]hello", [Reasoning("hm"), Content("hello")]),
    ("hermes", HERMES_WEATHER, [WEATHER]),
    ("hermes", f"I ask.\n{HERMES_WEATHER}\n{HERMES_ADD}", [Content("I ask."), WEATHER, ADD]),
    ("hermes", f"<think>\nhm\n</think>\n\n{HERMES_WEATHER}", [Reasoning("hm"), WEATHER]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {A}}}', [WEATHER]),  # cut off before its end
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Be',
        [Call("weather"), Arguments('{"city": "Be')],
    ),
    ("hermes", f'<tool_call>{{"arguments": {A}, "name": "weather"}}</tool_call>', [WEATHER]),
    (
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {A}, "id": "}}"}}</tool_call> so',
        [WEATHER, Content("so")],
    ),
    ("hermes", '<tool_call>{"name": "weather", "argu', [Content('<tool_call>{"name": "weather", "argu')]),
    ("hermes", '<tool_call>{"name": "other"}</tool_call>!', [Content('<tool_call>{"name": "other"}</tool_call>!')]),
    ("hermes", "a < b and <tool", [Content("a < b and <tool")]),
    # A call without its end, or a brace short, leaves the next one alone.
    ("hermes", HERMES_WEATHER.removesuffix("</tool_call>") + HERMES_ADD, [WEATHER, ADD]),
    ("hermes", HERMES_WEATHER.replace("}}", "}") + HERMES_ADD, [WEATHER, ADD]),
    ("hermes", HERMES_WEATHER.replace("}}\n</tool_call>", "}\n") + HERMES_ADD, [WEATHER, ADD]),
    ("hermes", HERMES_WEATHER.replace("}}", "}}}") + HERMES_ADD, [WEATHER, ADD]),
    ("hermes", HERMES_WEATHER.replace("}}", "") + HERMES_ADD, [Call("weather"), Arguments('{"city": "Bern"\n}'), ADD]),
    # Text that mentions a mark is text, and so are the words around calls.
    ("hermes", f"Use <tool_call> so: {HERMES_ADD}", [Content("Use <tool_call> so:"), ADD]),
    (
        "hermes",
        f'E.g. <tool_call>{{"name": NAME}}</tool_call>. {HERMES_ADD}',
        [
            Content('E.g. <tool_call>{"name": NAME}</tool_call>.'),
            ADD,
        ],
    ),
    ("hermes", f"One.\n{HERMES_WEATHER}\nTwo.", [Content("One."), WEATHER, Content("\n\nTwo.")]),
    ("hermes", f"One.{HERMES_WEATHER}Two.", [Content("One."), WEATHER, Content("\nTwo.")]),
    ("llama", f'{{"name": "weather", "parameters": {A}}}', [WEATHER]),
    (
        "llama",
        f'<|python_tag|>{{"name": "weather", "parameters": {A}}}; {{"name": "add", "parameters": {B}}}',
        [WEATHER, ADD],
    ),
    ("llama", '{"answer": 3}', [Content('{"answer": 3}')]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}, {{"name": "add", "arguments": {B}}}]',
        [WEATHER, ADD],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {B}, "id": "a"}},{{"arguments": {A}, "name": "weather"}}]',
        [ADD, WEATHER],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"arguments": {A}, "name": "weather"}}, {{"name": "add", "arguments": {B}}}].',
        [WEATHER, ADD, Content(".")],
    ),
    ("mistral_named", f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]add[ARGS]{B}", [WEATHER, ADD]),
    ("mistral_named", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{A}", [WEATHER]),
    ("mistral_named", f"Well.[TOOL_CALLS]weather{A}", [Content("Well."), WEATHER]),
    ("mistral_named", "[TOOL_CALLS]nothing", [Content("[TOOL_CALLS]nothing")]),
    ("mistral_named", "a < b and [TOO", [Content("a < b and [TOO")]),
    (
        "granite",
        f'<|tool_call|>[{{"name": "weather", "arguments": {A}}}, {{"name": "add", "arguments": {B}}}]',
        [WEATHER, ADD],
    ),
    ("hunyuan", f'<tool_calls>[{{"name": "weather", "arguments": {A}}}]</tool_calls>', [WEATHER]),
    ("nemotron", f'<TOOLCALL>[{{"name": "weather", "arguments": {A}}}]</TOOLCALL>', [WEATHER]),
    ("phi4_mini", f'functools[{{"name": "weather", "arguments": {A}}}]', [WEATHER]),
    ("phi4_mini", "Import functools now.", [Content("Import functools now.")]),
    (
        "deepseek_v3",
        f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{A}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{B}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Well."), WEATHER, ADD],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{B}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ADD],
    ),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{A}", [WEATHER]),
    (
        "deepseek_dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Bern'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [Call("weather"), Arguments('{"city": "Bern", "days": 3}')],
    ),
    (
        "kimi_k2",
        f"Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.add:1 <|tool_call_argument_begin|>{B}<|tool_call_end|><|tool_calls_section_end|>",
        [Content("Well."), WEATHER, ADD],
    ),
    (
        "qwen3_coder",
        "I ask.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        [Content("I ask."), Call("weather"), Arguments('{"city": "Bern", "days": 3}'), Call("add"), Arguments("{}")],
    ),
    (
        "qwen3_coder",  # neither ends
        '<tool_call>\n<function=weather>\n<parameter=city>\nx = "<a>"\n\n</parameter>\n'
        "<tool_call>\n<function=weather>\n<parameter=city>\n1",
        [Call("weather"), Arguments('{"city": "x = \\"<a>\\"\\n"}'), Call("weather"), Arguments("{")],
    ),
    (
        "seed_oss",
        "<seed:think>hm</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n</function>\n"
        "</seed:tool_call>",
        [Reasoning("hm"), WEATHER],
    ),
    (
        "glm45",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>\n"
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        '<arg_value>[2, {"c": "}"}]</arg_value></tool_call>',
        [WEATHER, ADD],
    ),
    ("glm45", "<tool_call>add\n</tool_call>", [Call("add"), Arguments("{}")]),
    (
        "glm45",
        "The tag <tool_call> opens. <tool_call>add</tool_call>",
        [
            Content("The tag <tool_call> opens."),
            Call("add"),
            Arguments("{}"),
        ],
    ),
    (
        "hunyuan_v3",
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>\n"
        "</tool_calls>",
        [WEATHER],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n</invoke>\n'
        '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        [WEATHER, Call("add"), Arguments('{"a": 1}')],
    ),
    (
        "lfm2",
        """Well.<|tool_call_start|>[weather(city="Bern"), add(a=-1, b=[2.5, {'c': None, "d": True}])]<|tool_call_end|>""",
        [Content("Well."), WEATHER, Call("add"), Arguments('{"a": -1, "b": [2.5, {"c": null, "d": true}]}')],
    ),
    (
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'
        '<|tool_call>call:add{a:1,b:[2,{c:<|"|>}<|"|>}]}<tool_call|>',
        [Reasoning("hm"), WEATHER, ADD],
    ),
    (
        "harmony",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{A}<|call|>",
        [Reasoning("hm"), WEATHER],
    ),
    ("harmony", f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{B}<|call|>", [ADD]),
    (
        "",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello",
        [
            Reasoning("hm"),
            Content("hello"),
        ],
    ),
]
"""(format, answer, its parts)."""
