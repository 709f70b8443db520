"""Questions to the router, one for each answer.

Knows the SDK's options; nothing of bodies and replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from betoken.client import AsyncClient, AsyncGeneration, Constraint, Prompt, Sampling, Speculation


@dataclass(frozen=True, slots=True)
class Question:
    """One answer to be had."""

    prompt: Prompt
    seed: int
    sampling: Sampling
    speculation: Speculation
    model: str = ""
    tenant: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """The endpoint's names of fields by the router's, if they differ."""
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    constraint: Mapping[str, Any] | None = None
    prediction: str | None = None
    suffix: str | None = None
    files: Sequence[tuple[str, str]] = ()
    num_answers: int = 1
    add_special_tokens: bool | None = None
    escape_special_tokens: bool = False

    def with_rounds(self) -> Question:
        """A copy whose answer reports its rounds."""
        return replace(self, speculation=replace(self.speculation, report_rounds=True))

    def ask(self, client: AsyncClient, headers: Mapping[str, str]) -> AsyncGeneration:
        """The answer, still to be streamed.

        Raises:
            InvalidArgumentError: a value that cannot be sent.
        """
        options: dict[str, Any] = {}
        if self.add_special_tokens is not None:  # rejected with ids and messages, for any value
            options["add_special_tokens"] = self.add_special_tokens
        return client.generate(
            self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            speculation=self.speculation,
            model=self.model,
            tenant=self.tenant,
            headers=headers,
            tools=self.tools,
            template_arguments=self.template_arguments,
            continue_final_message=self.continue_final_message,
            constraint=cast(Constraint | None, self.constraint),
            prediction=self.prediction,
            suffix=self.suffix,
            files=self.files,
            n=self.num_answers,
            escape_special_tokens=self.escape_special_tokens,
            **options,
        )
