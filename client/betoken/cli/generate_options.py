"""The options of `betoken generate`, each declared once, and what the SDK is asked by them.

Knows the SDK's options; asks nothing.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from betoken.cli.connection import Connection
from betoken.cli.constraint import read_constraint, read_file
from betoken.client import ChatMessage, Constraint, Prompt, PromptOptions, Sampling, Speculation, VerificationMode

_SAMPLING = "Sampling (default: the model's)"
_CONSTRAINT = "Constraint (one at most)"
_SPECULATION = "Speculation (never changes a token in the mode `coupled`)"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Connection):
    """The values of the options."""

    prompt: Annotated[str | None, typer.Argument(help="Text; `-` or none at all: standard input.")] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send the text as a user's message; default if the model has a chat template."),
    ] = False
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")] = False
    system: Annotated[str | None, typer.Option(help="System message before it; implies --chat.")] = None
    begin: Annotated[str | None, typer.Option(help="Beginning of the answer, which goes on; implies --chat.")] = None
    escape_special_tokens: Annotated[
        bool, typer.Option("--escape-special-tokens", help="Their names in messages are text.")
    ] = False
    no_special_tokens: Annotated[
        bool, typer.Option("--no-special-tokens", help="No BOS before a text, such as a rendered chat; implies --raw.")
    ] = False
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids in place of text: 1,2,3.")] = None
    suffix: Annotated[str | None, typer.Option(help="Text after the answer, which fills the gap; implies --raw.")] = (
        None
    )
    num_answers: Annotated[int, typer.Option(min=1, help="Number of answers, each with its own seed.")] = 1
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False
    model: Annotated[str, typer.Option(help="Model id the router must be serving.")] = ""
    tenant: Annotated[str, typer.Option(help="Whom the work is for.")] = ""
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.", rich_help_panel=_SAMPLING)] = None
    top_k: Annotated[int | None, typer.Option(help="Most likely ids kept; 0 = all.", rich_help_panel=_SAMPLING)] = None
    top_p: Annotated[float | None, typer.Option(help="Probability mass kept.", rich_help_panel=_SAMPLING)] = None
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the largest probability kept.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="On ids in prompt or output; 1 = none.", rich_help_panel=_SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="On ids in the output, once.", rich_help_panel=_SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="On ids in the output, per occurrence.", rich_help_panel=_SAMPLING)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS", help="ID=BIAS, added to that id's logit; repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", rich_help_panel=_SAMPLING)] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens.", rich_help_panel=_SAMPLING)] = None
    min_new_tokens: Annotated[
        int | None, typer.Option(help="Fewest tokens before the answer may end.", rich_help_panel=_SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="The answer ends before this text; repeatable.", rich_help_panel=_SAMPLING)
    ] = None
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="The answer ends after this id; repeatable.", rich_help_panel=_SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="EOS does not end the answer.", rich_help_panel=_SAMPLING)
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(help="Likeliest ids reported per token (--json).", rich_help_panel=_SAMPLING)
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Likeliest ids reported per prompt token (--json).", rich_help_panel=_SAMPLING)
    ] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The answer is a JSON object.", rich_help_panel=_CONSTRAINT)
    ] = False
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="It is JSON that this schema takes.", rich_help_panel=_CONSTRAINT),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="It matches this expression as a whole.", rich_help_panel=_CONSTRAINT)
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="It is one of these; repeatable.", rich_help_panel=_CONSTRAINT)
    ] = None
    lark: Annotated[
        Path | None, typer.Option(metavar="FILE", help="It is of this grammar.", rich_help_panel=_CONSTRAINT)
    ] = None
    drafter: Annotated[
        str | None, typer.Option(help="model, ngram, ...; see `betoken info`.", rich_help_panel=_SPECULATION)
    ] = None
    drafter_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="NAME=VALUE, for the drafter; repeatable.", rich_help_panel=_SPECULATION
        ),
    ] = None
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text that the answer may repeat long parts of.", rich_help_panel=_SPECULATION
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens per round; default: adaptive.", rich_help_panel=_SPECULATION)
    ] = None
    off: Annotated[bool, typer.Option("--off", help="Decode without speculation.", rich_help_panel=_SPECULATION)] = (
        False
    )
    mode: Annotated[
        VerificationMode | None,
        typer.Option(help="rejection: exact in distribution; typical: lossy.", rich_help_panel=_SPECULATION),
    ] = None
    posterior_threshold: Annotated[
        float | None,
        typer.Option(help="typical: probability above which a draft token stays.", rich_help_panel=_SPECULATION),
    ] = None
    posterior_alpha: Annotated[
        float | None,
        typer.Option(help="typical: this times exp(-entropy) is enough, too.", rich_help_panel=_SPECULATION),
    ] = None

    @property
    def is_raw(self) -> bool:
        """Whether a text is sent without the chat template."""
        return self.raw or self.no_special_tokens or self.suffix is not None

    def question(self) -> Prompt:
        """Return the prompt: text, token ids or messages.

        Raises:
            typer.BadParameter: the options contradict each other, or the prompt cannot be read.
        """
        if self.raw and (self.chat or self.system is not None or self.begin is not None):
            raise typer.BadParameter("excludes --chat, --system and --begin", param_hint="--raw")
        others = (self.chat, self.no_special_tokens, self.system is not None, self.begin is not None)
        if self.suffix is not None and (any(others) or self.prompt_ids is not None):
            excluded = "--chat, --system, --begin, --no-special-tokens and --prompt-ids"
            raise typer.BadParameter(f"excludes {excluded}", param_hint="--suffix")
        return question_of(self.prompt, self.prompt_ids, self.chat, self.system, self.begin)

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        values = vars(self) | {
            "logit_bias": _biases(self.logit_bias or []),
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_id or None,
        }
        return Sampling(**{field.name: values[field.name] for field in fields(Sampling)})

    def speculation(self) -> Speculation:
        """How to speculate.

        Raises:
            typer.BadParameter: an option without effect together with --off.
        """
        speculating = {
            "--drafter": self.drafter,
            "--drafter-setting": self.drafter_setting,
            "--num-draft-tokens": self.num_draft_tokens,
            "--prediction": self.prediction,
        }
        for option, value in speculating.items() if self.off else ():
            if value is not None and value != []:
                raise typer.BadParameter("means nothing with --off, which decodes plainly", param_hint=option)
        settings = _settings(self.drafter_setting or [])
        return Speculation(
            self.drafter,
            settings,
            self.num_draft_tokens,
            self.off or None,
            self.mode,
            posterior_threshold=self.posterior_threshold,
            posterior_alpha=self.posterior_alpha,
        )

    def constraint(self) -> Constraint | None:
        """The required form of the answer."""
        return read_constraint(self.json_object, self.json_schema, self.regex, self.choice, self.lark)

    def prompt_options(self) -> PromptOptions:
        """How the prompt is turned into ids."""
        options: PromptOptions = {"add_special_tokens": False} if self.no_special_tokens else {}
        if self.begin is not None:
            options["continue_final_message"] = True
        if self.escape_special_tokens:
            options["escape_special_tokens"] = True
        return options

    def predicted_text(self) -> str | None:
        """The predicted answer."""
        return None if self.prediction is None else read_file(self.prediction, "--prediction")


def question_of(text: str | None, ids: str | None, chat: bool, system: str | None, begin: str | None) -> Prompt:
    """The prompt: text, ids or messages; standard input if no text is given.

    Raises:
        typer.BadParameter: nothing, or too much, is asked.
    """
    if ids is not None:
        if text is not None or chat or system is not None or begin is not None:
            raise typer.BadParameter("takes the place of text and messages", param_hint="--prompt-ids")
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError:
            raise typer.BadParameter(f"{ids!r} is not a list of integers", param_hint="--prompt-ids") from None
    if text is None or text == "-":
        if text is None and sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Some locales let any byte pass; and a line end is part of the prompt, whichever it is.
            sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline="")
        try:
            text = sys.stdin.read()
        except OSError as error:
            raise typer.BadParameter(f"standard input cannot be read: {error}", param_hint="PROMPT") from None
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is not text: {error}", param_hint="PROMPT") from None
    if not chat and system is None and begin is None:
        return text
    said = [("system", system), ("user", text), ("assistant", begin)]
    return [ChatMessage(role=role, content=content) for role, content in said if content is not None]


def _biases(texts: list[str]) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for text in texts:
        token_id, bias = _pair(text, "--logit-bias", "ID=BIAS")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not ID=BIAS", param_hint="--logit-bias") from None
        if number in biases:
            raise typer.BadParameter(f"{number} is given twice", param_hint="--logit-bias")
        biases[number] = value
    return biases or None


def _settings(texts: list[str]) -> dict[str, str] | None:
    settings: dict[str, str] = {}
    for text in texts:
        name, value = _pair(text, "--drafter-setting")
        if name in settings:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--drafter-setting")
        settings[name] = value
    return settings or None


def _pair(text: str, option: str, expected: str = "NAME=VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not {expected}", param_hint=option)
    return name, value
