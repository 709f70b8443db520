"""Sequences of a Medusa drafter over the tiny target, told rows that a test makes up."""

import random

import torch

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.medusa.drafter import MedusaDrafter
from betoken.engine.sampling import SamplingParams

HIDDEN, VOCAB = 64, 101
"""Width and ids of the tiny target."""


class Bench:
    """Sequences of a drafter, each with the state that it was told last."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self.drafter = drafter
        self.states: dict[DraftSequence, torch.Tensor] = {}

    def open(self, number: int, length: int = 9, takes_trees: bool = True, **fields: object) -> DraftSequence:
        rng = random.Random(number)
        params = {"temperature": 0.0, "seed": number, "eos_token_ids": (0,), "ignore_eos": True}
        names = {"temperature", "seed", "ignore_eos", "top_k", "logit_bias"}
        params |= {name: fields.pop(name) for name in names & fields.keys()}
        sequence = DraftSequence(
            (1, number),
            SamplingParams(**params),  # type: ignore[arg-type]
            [rng.randrange(1, VOCAB) for _ in range(length)],
            [5],
            fields.pop("max_length", 200),  # type: ignore[arg-type]
            takes_trees=takes_trees,
            **fields,  # type: ignore[arg-type]
        )
        self.drafter.open(sequence)
        return sequence

    def send(self, sequences: list[DraftSequence]) -> None:
        """The states up to the last token but one; only the last of them is the sequence's own."""
        rows, spans = [], []
        for sequence in sequences:
            num_rows = 2
            spans.append(FeatureSpan(sequence, len(sequence.ids) - 1 - num_rows, len(rows), num_rows))
            rows += [torch.randn(HIDDEN) for _ in range(num_rows)]
            self.states[sequence] = rows[-1]
        self.drafter.observe(spans, torch.stack(rows)[:, None])

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        sequence.ids.extend(ids)
        sequence.output_ids.extend(ids)
        self.drafter.commit(sequence, ids)

    def draft(self, *asked: tuple[DraftSequence, int]) -> list[Drafted]:
        for sequence, num_tokens in asked:
            self.drafter.request(sequence, num_tokens)
        answers = {one.sequence: one for one in self.drafter.step()}
        assert not self.drafter.has_work and len(answers) == len(asked)
        for one in answers.values():
            one.check()
        return [answers[sequence] for sequence, _ in asked]
