"""Reads the MTP layer of a target's checkpoint into transformers' own modules.

Knows files, names and shapes, not how a layer is run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers
from transformers.utils.logging import disable_progress_bar

from betoken.common.model_path import split_hub_file
from betoken.drafters.mtp.layouts import LAYOUTS, Layout
from betoken.engine.attention import ATTENTION_NAME, CONTEXT_KEYWORD, ProbeContext, register_attention
from betoken.engine.errors import ModelRefusedError
from betoken.engine.kv_pool import LayerShape
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.language_model import model_class_of
from betoken.engine.weights.quantized import DenseTensor, with_dense_fp8
from betoken.engine.weights.sources import DirectorySource, open_source
from betoken.engine.weights.tensor_files import StoredTensor


class MtpRefusedError(ModelRefusedError):
    """MTP layers that cannot draft, of a checkpoint that may well be served."""


class NoMtpLayerError(MtpRefusedError):
    """The checkpoint holds no MTP layer of a supported model type."""


Rotary = Callable[[Tensor, Tensor], Any]
"""Rows [1, R, H], whose type and device count, and positions [1, R] -> angles, as the layer takes them."""
_DENSE = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """The MTP layer of a checkpoint, not yet read."""

    config: Any
    """Configuration of the target's language model."""
    layout: Layout
    tensors: Mapping[str, StoredTensor | DenseTensor]
    """By their names in `MtpModel`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files, of FP8 weights once they are dequantised."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored_name(self, own_name: str) -> str:
        """Name in the checkpoint of a tensor of `MtpModel`."""
        return self.layout.stored_name(own_name, self.config.num_hidden_layers)


def find_layer(model: str, revision: str | None) -> MtpTensors:
    """The first MTP layer of a target's checkpoint.

    Raises:
        NoMtpLayerError: it holds none of a supported model type.
        MtpRefusedError: it is quantised, and not to FP8.
        ModelRefusedError: it cannot be read.
    """
    source = None
    if not model.endswith(".gguf") and split_hub_file(model) is None:
        source = open_source(model, revision)
    if not isinstance(source, DirectorySource):
        raise NoMtpLayerError("MTP layers of GGUF files are not supported")
    try:
        config, headers = source.config(), read_headers(source.path)
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever the files' contents make transformers raise
        raise ModelRefusedError(f"{model}: {type(error).__name__}: {error}") from error
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise NoMtpLayerError(f"model_type: {config.model_type!r}: must be one of {', '.join(LAYOUTS)}")
    num_layers = config.num_hidden_layers
    files = {name: tensor for name, tensor in headers.items() if layout.own_name(name, num_layers)}
    if not files:
        raise NoMtpLayerError(f"it holds no MTP tensors, {layout.prefix.format(num_layers)}*")
    try:
        dense = with_dense_fp8(getattr(config, "quantization_config", None), files)
    except ModelRefusedError as error:
        raise MtpRefusedError(str(error)) from error
    found = {cast(str, layout.own_name(name, num_layers)): tensor for name, tensor in dense.items()}
    for tensor in found.values():
        if tensor.dtype not in _DENSE:
            limit = f"must be one of {', '.join(_DENSE)}, or FP8 with its scales"
            raise MtpRefusedError(f"{tensor.name}: {tensor.dtype}: {limit}")
    return MtpTensors(config, layout, found)


def empty_models(config: Any, dtype: torch.dtype) -> tuple[Any, MtpModel]:
    """A target of this configuration with one layer, and the MTP modules for it, on the meta device."""
    register_attention()
    config, layout = copy.deepcopy(config), LAYOUTS[config.model_type]
    config.num_mtp_layers, config.num_hidden_layers = 1, 1
    for name, usual in (("layer_types", layout.attention), ("mlp_layer_types", layout.mlp)):
        if getattr(config, name, None):
            kinds = (getattr(config, f"mtp_{name}", None) or [usual])[:1]
            setattr(config, name, kinds)
            setattr(config, f"mtp_{name}", kinds)
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = []
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config._attn_implementation = ATTENTION_NAME
    contexts = MtpModel.get_init_context(dtype, False, False, None)
    with ContextManagers(contexts), torch.device("meta"):
        target = model_class_of(config)(config)
        return target, MtpModel(target, 1)


def check_layer(found: MtpTensors) -> None:
    """Check names and shapes of the tensors without reading them.

    Raises:
        MtpRefusedError: a tensor is missing, unknown or misshapen.
    """
    _filled(found, torch.bfloat16, "meta")


def load_layer(found: MtpTensors, dtype: torch.dtype) -> MtpModel:
    """The layer with its weights, on the CPU.

    Raises:
        MtpRefusedError: a tensor is missing, unknown or misshapen.
    """
    model = _filled(found, dtype, "cpu")
    model.train(False)
    model.requires_grad_(False)
    return model


def kv_shape(config: Any) -> LayerShape:
    """The layer's record of a token."""
    model, context = empty_models(config, torch.float32)[1], ProbeContext()
    layer: Any = model.layers[0]
    layer.mtp_block.mlp = torch.nn.Identity()
    hidden = torch.zeros(1, 2, model.config.hidden_size, device="meta")
    call_layer(
        layer,
        rotary_of(model, model.rotary_emb),
        hidden,
        hidden,
        torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        context,
    )
    return LayerShape(*context.shapes[0])


def rotary_of(model: MtpModel, module: Any) -> Rotary | None:
    """How the layer gets the angles of positions, from the target's module; None without one."""
    if module is None or not model.has_per_layer_rope:
        return cast(Rotary | None, module)
    return partial(module, layer_type=model.config.layer_types[0])


def call_layer(
    layer: Any, rotary: Rotary | None, embedded: Tensor, hidden: Tensor, positions: Tensor, context: Any
) -> Tensor:
    """Run an MTP layer over rows; return [1, R, H].

    Args:
        embedded: [1, R, H] embeddings of the next tokens.
        hidden: [1, R, H] states.
        positions: [1, R].
    """
    out: Tensor = layer(
        embedded,
        hidden,
        position_embeddings=None if rotary is None else rotary(embedded, positions),
        attention_mask=None,
        position_ids=positions,
        past_key_values=None,
        **{CONTEXT_KEYWORD: context},
    )
    return out


def _filled(found: MtpTensors, dtype: torch.dtype, device: str) -> MtpModel:
    disable_progress_bar()  # type: ignore[no-untyped-call]  # standard error is the log
    target, model = empty_models(found.config, dtype)
    state: dict[str, Any] = dict(found.tensors)
    if device == "meta":
        state = {name: torch.empty(tensor.shape, device=device) for name, tensor in state.items()}
    strict = target._keep_in_fp32_modules_strict or ()
    conversions: Any = get_model_conversion_mapping(target, add_legacy=False)
    options = LoadStateDictConfig(
        weight_mapping=conversions,
        device_map={"": device},
        dtype=dtype,
        dtype_plan={name: torch.float32 for name in strict},
    )
    info, _ = convert_and_load_state_dict_in_model(model, state, options)
    _check(info, found)
    return model


def _check(info: Any, found: MtpTensors) -> None:
    if missing := sorted(name for name in info.missing_keys if name.startswith("layers.")):
        raise MtpRefusedError(f"{found.stored_name(missing[0])} and {len(missing) - 1} more MTP tensors are missing")
    for name, stored, expected in sorted(info.mismatched_keys):
        raise MtpRefusedError(f"{found.stored_name(name)}: {list(stored)}: must be {list(expected)}")
    if unknown := sorted(info.unexpected_keys):
        raise MtpRefusedError(
            f"{found.stored_name(unknown[0])} and {len(unknown) - 1} more are tensors that the MTP layer does not use"
        )
    for name, text in info.conversion_errors.items():
        raise MtpRefusedError(f"{found.stored_name(name)}: {text}")
