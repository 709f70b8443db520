"""Reads the MTP layers of a target's checkpoint into transformers' own modules.

Knows files, names and shapes, not how a layer is run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
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

from betoken.drafters.mtp import nemotron
from betoken.drafters.mtp.layouts import GGUF, LAYOUTS, Layout
from betoken.engine.attention import ATTENTION_NAME, CONTEXT_KEYWORD, ProbeContext, register_attention
from betoken.engine.errors import ModelRefusedError
from betoken.engine.kv_pool import LayerShape
from betoken.engine.weights.experts import up_name
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.gguf.mtp_layer import read_mtp_layer
from betoken.engine.weights.language_model import model_class_of
from betoken.engine.weights.quantized import DenseTensor, with_dense
from betoken.engine.weights.sources import DirectorySource, GgufSource, open_source
from betoken.engine.weights.tensor_files import StoredTensor


class MtpRefusedError(ModelRefusedError):
    """MTP layers that cannot draft, of a checkpoint that may well be served."""


class NoMtpLayerError(MtpRefusedError):
    """The checkpoint holds no MTP layer of a supported model type."""


Rotary = Callable[[Tensor, Tensor], Any]
"""Rows [1, R, H], whose type and device count, and positions [1, R] -> angles, as the layer takes them."""
_DENSE = ("F32", "F16", "BF16")
_UNREAD = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_dspark)\.")
"""Names of tensors of drafting layers in layouts that are not read."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """An MTP layer of a checkpoint, not yet read."""

    config: Any
    """Configuration of the target's language model."""
    layout: Layout
    tensors: Mapping[str, StoredTensor | DenseTensor]
    """By their names in an `MtpModel` of one layer."""
    index: int = 0
    """Depth of the draft tokens that the layer predicts, if there are several layers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files, of FP8 weights once they are dequantised."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored_name(self, own_name: str) -> str:
        """Name in the checkpoint of a tensor of `MtpModel`."""
        return self.layout.stored_name(own_name, self.config.num_hidden_layers, self.index)


def find_layers(model: str, revision: str | None) -> tuple[MtpTensors, ...]:
    """The MTP layers of a target's checkpoint, one for each depth of a draft, or one for all.

    Raises:
        NoMtpLayerError: it holds none of a supported model type.
        MtpRefusedError: its format of quantised weights is not supported.
        ModelRefusedError: it cannot be read.
    """
    source = open_source(model, revision)
    try:
        config = source.config()
        headers = read_headers(source.path) if isinstance(source, DirectorySource) else {}
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever the files' contents make transformers raise
        raise ModelRefusedError(f"{model}: {type(error).__name__}: {error}") from error
    _check_read(config.model_type, headers)
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise NoMtpLayerError(f"model_type: {config.model_type!r}: must be one of {', '.join(LAYOUTS)}")
    if isinstance(source, GgufSource):
        return (_of_gguf(source, config),)
    found: list[MtpTensors] = []
    while (layer := _layer_of(config, layout, headers, len(found))) is not None:
        found.append(layer)
        if not layout.has_several:
            break
    if not found:
        raise NoMtpLayerError(f"it holds no MTP tensors, {layout.prefix_of(config.num_hidden_layers)}*")
    return tuple(found)


def _check_read(model_type: str, names: Iterable[str]) -> None:
    """Raises:
    MtpRefusedError: the checkpoint holds drafting layers of a layout that is not read.
    """
    for name in sorted(name for name in names if _UNREAD.search(name)):
        if ".mtp_dspark." in f".{name}":
            limit = "DSpark tensors are read from a separate directory (--dflash), not from the target's checkpoint"
            raise MtpRefusedError(f"{name}: {limit}")
        if model_type not in LAYOUTS:
            raise MtpRefusedError(
                f"{name}: model_type {model_type!r} of MTP tensors: must be one of {', '.join(LAYOUTS)}"
            )


def _layer_of(config: Any, layout: Layout, headers: Mapping[str, StoredTensor], index: int) -> MtpTensors | None:
    """The MTP layer of that index; None if the files hold none.

    Raises:
        MtpRefusedError: its format of quantised weights is not supported.
    """
    num_layers = config.num_hidden_layers
    files = {name: tensor for name, tensor in headers.items() if layout.own_name(name, num_layers, index)}
    if not files:
        return None
    try:
        empty = empty_models(config, torch.float32, index)[1]

        def shape_of(path: str) -> tuple[int, int] | None:
            return _linear_shape(empty, layout.own_name(f"{path}.weight", num_layers, index) or "")

        dense = with_dense(getattr(config, "quantization_config", None), files, shape_of)
    except ModelRefusedError as error:
        raise MtpRefusedError(str(error)) from error
    found = {cast(str, layout.own_name(name, num_layers, index)): tensor for name, tensor in dense.items()}
    for tensor in found.values():
        if tensor.dtype not in _DENSE:
            limit = f"must be one of {', '.join(_DENSE)}, or of a supported quantization"
            raise MtpRefusedError(f"{tensor.name}: {tensor.dtype}: {limit}")
    return MtpTensors(config, layout, found, index)


def _of_gguf(source: GgufSource, config: Any) -> MtpTensors:
    try:
        found = read_mtp_layer(source.header, config, *empty_models(config, torch.float32))
    except ModelRefusedError as error:
        raise MtpRefusedError(str(error)) from error
    if not found:
        raise NoMtpLayerError(f"it holds no MTP tensors, blk.{config.num_hidden_layers}.nextn.*")
    return MtpTensors(config, GGUF, found)


def empty_models(config: Any, dtype: torch.dtype, index: int = 0) -> tuple[Any, MtpModel]:
    """A target of this configuration with one layer, and the modules of an MTP layer for it, on the meta device."""
    register_attention()
    config, layout = copy.deepcopy(config), LAYOUTS[config.model_type]
    config.num_mtp_layers, config.num_hidden_layers = 1, 1
    is_nemotron = config.model_type == nemotron.MODEL_TYPE
    if is_nemotron:
        nemotron.settle(config)
    for name, usual in (("layer_types", layout.attention), ("mlp_layer_types", layout.mlp)):
        if getattr(config, name, None) and not is_nemotron:
            kinds = (getattr(config, f"mtp_{name}", None) or [usual])[index : index + 1] or [usual]
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
        model = MtpModel(target, 1)
        if is_nemotron:
            nemotron.put_together(target, model)
        return target, model


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


def kv_shape(found: MtpTensors) -> LayerShape:
    """The layer's record of a token."""
    config = found.config
    model, context = empty_models(config, torch.float32, found.index)[1], ProbeContext()
    layer: Any = model.layers[0]
    if config.model_type == nemotron.MODEL_TYPE:
        layer.mtp_block[1].mixer = torch.nn.Identity()
    else:
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


def _linear_shape(model: MtpModel, name: str) -> tuple[int, int] | None:
    """Outputs and inputs of the linear layer, or of the expert's, whose weight has this name; None of others."""
    path = name.removesuffix(".weight")
    if (expert := _EXPERT.fullmatch(path)) is not None:
        module = model.get_submodule(expert[1])
        own = "down_proj" if expert[2] == "down_proj" else up_name(module)
        _, height, width = getattr(module, own).shape
        return height // 2 if own == "gate_up_proj" else height, width
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    return (layer.out_features, layer.in_features) if isinstance(layer, torch.nn.Linear) else None


def _filled(found: MtpTensors, dtype: torch.dtype, device: str) -> MtpModel:
    disable_progress_bar()  # type: ignore[no-untyped-call]  # standard error is the log
    target, model = empty_models(found.config, dtype, found.index)
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
