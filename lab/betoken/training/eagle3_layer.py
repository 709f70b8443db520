"""EAGLE-3's training-time test: the layer run on its own output, as it will be when it drafts.

Row p pairs the target's states of position p with the token of position p + 1. Pass k reads what pass k - 1 fed back
and the token one place further on. It attends to the true rows up to p and to the earlier passes of its row, whose
places follow p. So one forward over an answer says what every round would draft. It knows no data.

Source: Li et al., EAGLE-3, arXiv:2503.01840, section 3.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

from betoken.drafters.eagle3.module import Eagle3Layer
from betoken.drafters.eagle3.shape import EagleShape
from betoken.training.batches import Rows
from betoken.training.samples import Sample
from betoken.training.teacher import Taught, Teacher

_ON_STATES = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
"""Projections of an embedding and a state side by side."""


class Attention:
    """The keys that the queries of all passes so far meet."""

    def __init__(self, num_rows: int, chosen: torch.Tensor) -> None:
        """`chosen`: [K] rows that passes after the first run on."""
        self._keys: list[torch.Tensor] = []  # [B, N, H, D] of the first pass, [B, K, H, D] of each later one
        self._values: list[torch.Tensor] = []
        rows = torch.arange(num_rows, device=chosen.device)
        self._hidden = [rows > rows[:, None], rows > chosen[:, None]]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, N, Hq, D] of one more pass; see `betoken.drafters.eagle3.module.Attend`."""
        hidden = self._hidden[min(1, len(self._keys))]
        self._keys.append(key)
        self._values.append(value)
        num_groups = query.shape[2] // key.shape[2]
        grouped = query.reshape(*query.shape[:2], key.shape[2], num_groups, -1)  # [B, N, H, G, D]
        scores = torch.einsum("bnhgd,bmhd->bhgnm", grouped, self._keys[0]).masked_fill(hidden, -torch.inf)
        own = [torch.einsum("bnhgd,bnhd->bhgn", grouped, key)[..., None] for key in self._keys[1:]]
        shares = (torch.cat([scores, *own], -1).float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
        num_rows = scores.shape[-1]
        mixed = torch.einsum("bhgnm,bmhd->bnhgd", shares[..., :num_rows], self._values[0])
        for index, later in enumerate(self._values[1:]):
            mixed = mixed + torch.einsum("bhgn,bnhd->bnhgd", shares[..., num_rows + index], later)
        return mixed.flatten(2, 3)


def passes(
    layer: Eagle3Layer,
    teacher: Teacher,
    taught: Taught,
    ids: torch.Tensor,
    num_passes: int,
    chosen: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Inputs of the layer's head: row p of pass k predicts the id at place p + 2 + k.

    Args:
        chosen: [K] rows that passes after the first run on, which meet no rows but their own and the first pass's;
            None = all.
    Yields:
        [B, T - 1, H] of the first pass, then [B, K, H] of each later one.
    """
    hidden = layer.fuse(torch.cat([state[:, :-1] for state in taught.features], -1).to(layer.fc.weight.dtype))
    rows = torch.arange(ids.shape[1] - 1, device=ids.device)
    later = rows if chosen is None else chosen
    attend = Attention(len(rows), later)
    padded = F.pad(ids, (0, num_passes))
    for index in range(num_passes):
        normed, hidden = layer.run(teacher.embedding(padded[:, rows + 1 + index]), hidden, rows + index, attend)
        yield normed
        if index == 0 and chosen is not None:
            hidden, rows = hidden[:, chosen], chosen


class Eagle3Trainee(nn.Module):
    """The layer with its target."""

    def __init__(
        self, teacher: Teacher, layer: Eagle3Layer, num_passes: int, decay: float, later_share: float = 1.0
    ) -> None:
        """Args:
        decay: pass k counts decay^k.
        later_share: share of the rows that passes after the first learn from, drawn anew each time.
        """
        super().__init__()
        self.layer = layer
        self._teacher, self._num_passes, self._decay, self._later_share = teacher, num_passes, decay, later_share
        self._layers = layer.shape.states_of(teacher.config.num_hidden_layers)
        self.register_buffer("target_ids", layer.d2t + torch.arange(len(layer.d2t)), persistent=False)

    def forward(self, rows: Rows) -> torch.Tensor:
        """The loss of a part of a batch, summed over its tokens; the mean over passes by their weights."""
        taught = self._teacher(rows.ids, self._layers)
        num_rows = rows.ids.shape[1] - 1
        with torch.no_grad():
            scores = taught.logits.index_select(-1, self.get_buffer("target_ids"))
            known = F.pad(self.layer.t2d[taught.logits.argmax(-1)], (0, self._num_passes))
        learnt = F.pad(rows.learnt, (0, self._num_passes + 1))
        places = torch.arange(num_rows, device=rows.ids.device)
        drawn = self._drawn_rows(num_rows, rows.ids.device)
        total = torch.zeros((), device=rows.ids.device)
        outputs = passes(self.layer, self._teacher, taught, rows.ids, self._num_passes, drawn)
        for index, normed in enumerate(outputs):
            if index == 1 and drawn is not None:
                places = drawn
            chosen = learnt[:, places + 2 + index] & known[:, places + 1 + index]
            wanted = scores[:, (places + 1 + index).clamp_max(num_rows)][chosen].float().softmax(-1)
            log_probs = self.layer.lm_head(normed[chosen]).float().log_softmax(-1)
            weight = self._decay**index * num_rows / len(places)
            total = total - weight * (wanted * log_probs).sum()
        return total / sum(self._decay**index for index in range(self._num_passes))

    def _drawn_rows(self, num_rows: int, device: torch.device) -> torch.Tensor | None:
        """[K] rows, ascending, of later passes; None = all. All of them are measured on."""
        num = max(1, round(self._later_share * num_rows))
        if not self.training or num == num_rows:
            return None
        return torch.randperm(num_rows)[:num].sort().values.to(device)

    @torch.no_grad()
    def accepted(self, sample: Sample, rows: Rows) -> tuple[list[int], torch.Tensor]:
        """Lengths of chains that would be accepted, by the place of the last committed token, and hits by pass.

        Returns:
            [T] tokens; [passes, 2] right and all guesses of each pass, given the tokens before are the text's.
        """
        taught = self._teacher(rows.ids, self._layers)
        length = len(sample.ids)
        right = torch.zeros(self._num_passes, length, dtype=torch.bool)
        counts = torch.zeros(self._num_passes, 2)
        for index, normed in enumerate(passes(self.layer, self._teacher, taught, rows.ids, self._num_passes)):
            count = length - 2 - index
            if count < 1:
                break
            guesses = self.get_buffer("target_ids")[self.layer.lm_head(normed[0, :count]).argmax(-1)]
            hits = (guesses == rows.ids[0, 2 + index : length]).cpu()
            right[index, 1 : 1 + count] = hits
            answer = hits[max(0, sample.prompt_length - 1) :]
            counts[index] += torch.tensor([float(answer.sum()), float(len(answer))])
        return right.cumprod(0).sum(0).tolist(), counts


def frequent_ids(samples: Sequence[Sample], vocab_size: int, num: int) -> torch.Tensor:
    """The `num` ids [num] that answers hold most often, ascending; of equals the lowest."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.ids[sample.prompt_length :]), minlength=vocab_size)
    return torch.sort(counts, descending=True, stable=True).indices[:num].sort().values


def make_layer(teacher: Teacher, target_ids: torch.Tensor, mlp_size: int | None) -> Eagle3Layer:
    """A fresh layer that says what the target says, of the token before the one it is to foresee.

    It begins as the target's last layer on what that takes in, where shapes fit, else as nothing but its residual.
    """
    config = teacher.config
    num_layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = EagleShape(
        version=3,
        hidden_size=config.hidden_size,
        intermediate_size=mlp_size or config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=teacher.head.weight.shape[0],
        draft_vocab_size=len(target_ids),
        target_hidden_size=config.hidden_size,
        max_context=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=dict(config.rope_parameters),
        state_layers=(min(2, num_layers), num_layers // 2, num_layers - 1),
    )
    layer = Eagle3Layer(shape)
    with torch.no_grad():
        if not _begin_as_last_layer(layer, teacher):
            layer.midlayer.self_attn.o_proj.weight.zero_()
            layer.midlayer.mlp.down_proj.weight.zero_()
        layer.fc.weight.zero_()
        layer.fc.weight[:, -config.hidden_size :].fill_diagonal_(1.0)
        layer.lm_head.weight.copy_(teacher.head.weight[target_ids])
        if (norm := getattr(teacher.model.base_model, "norm", None)) is not None:
            layer.norm.weight.copy_(norm.weight)
        layer.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        layer.t2d.zero_()[target_ids] = True
    return layer.to(teacher.device)


def _begin_as_last_layer(layer: Eagle3Layer, teacher: Teacher) -> bool:
    """Copy the target's last layer, embeddings left aside; False and nothing done where names or shapes differ."""
    layers = getattr(teacher.model.base_model, "layers", None)
    theirs = dict(layers[-1].named_parameters()) if layers else {}
    middle, size = layer.midlayer, layer.shape.hidden_size
    ours = {name: param for name, param in middle.named_parameters() if "layernorm" not in name}
    ours["input_layernorm.weight"] = ours.pop("hidden_norm.weight")
    ours["post_attention_layernorm.weight"] = middle.post_attention_layernorm.weight
    states = {name: param[:, -size:] if name.endswith(_ON_STATES) else param for name, param in ours.items()}
    if theirs.keys() != states.keys() or any(theirs[name].shape != part.shape for name, part in states.items()):
        return False
    for name, part in states.items():
        ours[name].zero_()
        part.copy_(theirs[name])
    return True


def save_layer(layer: Eagle3Layer, folder: Path, target: str, num_target_layers: int) -> None:
    """Write config.json and bfloat16 safetensors, embeddings left to the target."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = layer.shape
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "base_model_name_or_path": target,
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": dict(shape.rope),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.states_of(num_target_layers)),
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in layer.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
