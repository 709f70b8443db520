"""Maps tensors of a GGUF file to a model's parameters, including permutations.

transformers defines it in two ways: older architectures by a table of names and a processor, newer ones by transforms
of its loader. It knows names and orders, not types or files.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

_OF_EXPERTS = re.compile(
    r".*\.layers\.(\d+)\..*\.(experts\.gate_up_proj(?:_bias)?|experts\.down_proj_bias|e_score_correction_bias)"
)
"""Parameters that the table of ggml's package lacks."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one tensor."""

    name: str
    """The parameter's name in the model."""
    part: int = 0
    """Which part of the parameter it is, along the outputs of every expert."""
    takes_turns: bool = False
    """Whether the outputs of the parts take turns, instead of following each other."""


class Places(Protocol):
    """The places of a file's tensors."""

    def of(self, name: str) -> Place | None:
        """A tensor's place by name; None if the model lacks it."""
        ...

    def moved(self, name: str, numbers: Tensor) -> Tensor:
        """A tensor's numbers as the model has them."""
        ...

    def input_order(self, name: str) -> Tensor | None:
        """Which of its inputs each column of a tensor belongs to, [K]; None for their own order."""
        ...


def places_of(architecture: str, config: PreTrainedConfig, model: Any) -> Places:
    """How transformers places tensors of this architecture."""
    if architecture in GGUF_ARCHS:
        return _ByTransforms(architecture, config, model)
    return (_InTurns if architecture == "gpt-oss" else _ByTable)(architecture, config, model)


class _ByTable:
    """The table of ggml's package, and a processor of transformers."""

    _takes_turns = False
    """Whether the outputs of experts' gate and up take turns."""

    def __init__(self, architecture: str, config: PreTrainedConfig, model: Any) -> None:
        make: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor: Any = make(config=config.to_dict())
        number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        names = get_tensor_name_map(number, config.num_hidden_layers)
        self._places: dict[str, Place] = {}
        for name in model.state_dict():
            stem, dot, suffix = name.rpartition(".")
            if suffix not in ("weight", "bias"):  # a parameter of a module's own
                stem, dot, suffix = name, ".", "weight"
            if (known := names.get_name(stem)) is not None:
                self._places[known + dot + suffix] = Place(name)
            elif (match := _OF_EXPERTS.fullmatch(name)) is not None:
                self._add_experts(f"blk.{match[1]}", name)

    def _add_experts(self, layer: str, name: str) -> None:
        if "gate_up_proj" in name:
            suffix = "bias" if name.endswith("bias") else "weight"
            for part, stem in enumerate(("ffn_gate_exps", "ffn_up_exps")):
                self._places[f"{layer}.{stem}.{suffix}"] = Place(name, part, self._takes_turns)
        else:
            stem = "ffn_down_exps" if name.endswith("down_proj_bias") else "exp_probs_b"
            self._places[f"{layer}.{stem}.bias"] = Place(name)

    def of(self, name: str) -> Place | None:
        """See `Places`."""
        return self._places.get(name)

    def moved(self, name: str, numbers: Tensor) -> Tensor:
        """See `Places`."""
        beside: dict[str, Any] = {"tensors": {}}  # receives tensors that a processor renames itself
        taken = self._processor.process(weights=numbers.numpy(), name=name, parsed_parameters=beside).weights
        return torch.from_numpy(np.ascontiguousarray(taken))

    def input_order(self, name: str) -> Tensor | None:
        """See `Places`."""
        return None


class _InTurns(_ByTable):
    """gpt-oss, whose experts have inputs first in the model; transformers' processor knows other names of tensors."""

    _takes_turns = True

    def moved(self, name: str, numbers: Tensor) -> Tensor:
        """See `Places`."""
        return numbers.transpose(1, 2) if numbers.dim() == 3 else numbers


class _ByTransforms:
    """Renamings and converters, as the loader of transformers applies them."""

    def __init__(self, architecture: str, config: PreTrainedConfig, model: Any) -> None:
        transforms = deepcopy(GGUF_ARCHS[architecture](config))  # to ask one for a name marks it as used
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._known = set(model.state_dict())

    def of(self, name: str) -> Place | None:
        """See `Places`."""
        found, pattern, converter = self._find(name)
        part = 0 if converter is None else converter.source_patterns.index(pattern)
        return Place(found, part) if found in self._known else None

    def moved(self, name: str, numbers: Tensor) -> Tensor:
        """See `Places`."""
        found, pattern, converter = self._find(name)
        for operation in self._operations(converter):
            numbers = operation.convert({pattern: numbers}, source_patterns=[pattern], target_patterns=[found])[found]
        return numbers

    def input_order(self, name: str) -> Tensor | None:
        """See `Places`."""
        orders = [getattr(one, "input_permutation", None) for one in self._operations(self._find(name)[2])]
        return next((order for order in orders if order is not None), None)

    def _find(self, name: str) -> tuple[str, Any, Any]:
        found, pattern = rename_source_key(name, self._renamings, self._converters)
        return found, pattern, next((one for one in self._converters if pattern in one.source_patterns), None)

    @staticmethod
    def _operations(converter: Any) -> Sequence[Any]:
        """Operations on one tensor; parts are put together elsewhere."""
        operations = () if converter is None else converter.operations
        return [operation for operation in operations if not isinstance(operation, Concatenate)]


def row_order(places: Places, name: str, num_rows: int) -> Tensor | None:
    """The order in which a tensor's rows are taken [N] int64; None for their own.

    Raises:
        ValueError: more than rows is moved.
    """
    rows = torch.arange(num_rows, device="cpu")[:, None].expand(-1, 2).contiguous()
    try:
        taken = rows if places.input_order(name) is not None else places.moved(name, rows)
    except Exception as error:  # it may count on the shape of the numbers
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if torch.equal(taken, rows) or torch.equal(taken, rows.T):  # the latter of Conv1D
        return None
    if taken.shape != rows.shape or not torch.equal(taken[:, 0].sort().values, rows[:, 0]):
        raise ValueError("more than rows is moved")
    return taken[:, 0].contiguous()
