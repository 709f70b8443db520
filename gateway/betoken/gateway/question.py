"""What is asked of the router: one question an answer.

Knows the SDK's options; nothing of bodies and replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from betoken.client import AsyncClient, AsyncGeneration, Prompt, Sampling, Speculation


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
    """The request's names of fields, by the router's, where they are this endpoint's own."""

    def ask(self, client: AsyncClient, headers: Mapping[str, str]) -> AsyncGeneration:
        """The answer, still to be streamed.

        Raises:
            InvalidArgumentError: a value that cannot be sent.
        """
        return client.generate(
            self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            speculation=self.speculation,
            model=self.model,
            tenant=self.tenant,
            headers=headers,
        )
