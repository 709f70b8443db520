"""The decode step of a dense model whose layers are divided among pipeline stages that work at the same time.

A stage sends the hidden states of its sequences to the next one; docs/devices.md has the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from betoken.common.economy.column_split import ModelShape
from betoken.common.errors import InvalidArgumentError

_STATE_BYTES = 2
_MAX_STAGES = 64


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage; earlier stages have one more if the number is uneven."""
    ends = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return [stop - start for start, stop in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Stages of a model and the forwards that they have under way.

    Raises:
        InvalidArgumentError: a value is outside its range; names field, value and limit.
    """

    shape: ModelShape
    pipeline: int
    """Stages."""
    micro_batches: int
    """Forwards of distinct sequences under way, at most one for each stage."""
    stage_link_gb_s: float
    """Bandwidth from one stage to the next, gigabytes per second."""
    stage_link_us: float
    """Time of a message of a few bytes from one stage to the next, microseconds."""
    target_step_ms: float
    """Decode step of all layers in one stage, with the sequences of one micro-batch, milliseconds."""
    batch: int
    """Sequences of all micro-batches."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("pipeline", 2, min(_MAX_STAGES, self.shape.num_layers)),
            ("micro_batches", 1, min(self.pipeline, self.batch)),
            ("stage_link_gb_s", 1e-3, 1e6),
            ("stage_link_us", 0, 1e9),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and low <= value <= high):
                raise InvalidArgumentError(name, value, f"must be {low:g} to {high:.10g}")

    @property
    def state_bytes(self) -> int:
        """Bytes of hidden states that a stage sends to the next one for one token."""
        return _STATE_BYTES * self.shape.hidden_size

    @property
    def link_ms(self) -> float:
        """Time of the hidden states of a micro-batch from one stage to the next, milliseconds."""
        num_sequences = -(-self.batch // self.micro_batches)
        return self.stage_link_us / 1e3 + num_sequences * self.state_bytes / (self.stage_link_gb_s * 1e6)

    @property
    def stage_ms(self) -> list[float]:
        """Time of a micro-batch in each stage: its part of the weights that a step reads, output layer included."""
        shape = self.shape
        layer = shape.hidden_size * (2 * shape.attention_size + 3 * shape.intermediate_size)  # keys, values are few
        weights = [count * layer for count in layers_of_stages(shape.num_layers, self.pipeline)]
        weights[-1] += shape.hidden_size * shape.vocab_size
        return [self.target_step_ms * count / sum(weights) for count in weights]

    @property
    def pass_ms(self) -> float:
        """Time until the next step of a sequence alone: all stages, the states between them, and the chosen ids."""
        return self.target_step_ms + (self.pipeline - 1) * self.link_ms + self.stage_link_us / 1e3

    @property
    def step_ms(self) -> float:
        """Time in which each sequence gets a token, milliseconds.

        Stages and micro-batches form a closed queueing network: a cycle takes at least one pass, and at least the time
        of all micro-batches in the slowest stage. With constant times it takes the greater of both.

        Source: Denning and Buzen, The Operational Analysis of Queueing Network Models, 1978, asymptotic bounds.
        """
        return max(self.pass_ms, self.micro_batches * max(self.stage_ms))

    @property
    def idle_share(self) -> float:
        """Share of a decode step in which a stage waits, the mean of all stages."""
        return 1 - self.micro_batches * self.target_step_ms / self.pipeline / self.step_ms

    @property
    def bubble_share(self) -> float:
        """Share of a prompt's forward in which a stage waits while the pipeline fills and drains.

        Stages are taken as equally long: (P - 1) / (m + P - 1).

        Source: Huang et al., GPipe, arXiv:1811.06965, section 2.
        """
        return (self.pipeline - 1) / (self.micro_batches + self.pipeline - 1)
