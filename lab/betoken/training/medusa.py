"""Medusa heads for a target: `betoken train medusa --target DIR --prompts FILE --tokens N --out DIR --run-dir DIR`.

Medusa-1 trains the heads alone. Medusa-2 (`--backbone-lora`) also adapts the target by LoRA, held to what it was by
self-distillation; the result is then another target, written next to the heads.

Source: Cai et al., arXiv:2401.10774, sections 2.2 and 2.3.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from betoken.training.batches import Batches, Rows, pad
from betoken.training.block_efficiency import Rounds, accepted_of, best_first, ranks_of
from betoken.training.distill import forward_divergence
from betoken.training.feature_cache import FeatureCache
from betoken.training.frozen_head import frozen_cross_entropy
from betoken.training.loop import Progress, Step, run_loop
from betoken.training.medusa_heads import TrainableHeads, save_heads
from betoken.training.model_card import table
from betoken.training.optimizer import PairOptimizer
from betoken.training.part_gradients import autocast, gradients_of, held_out_loss
from betoken.training.recipe import Data, Recipe, recipe_parser, run_recipe
from betoken.training.recipe_card import Card, write_card
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher

log = logging.getLogger("betoken.training")

NUM_RANKS = 10
"""Guesses of a head that a tree may take, as in the paper."""
NODES = (4, 8, 16, 32, 64)
"""Sizes of trees that are measured."""


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Coefficients of the loss."""

    heads: float = 1.0
    """Factor of all heads; with a backbone 0.2, the backbone's own loss having 1."""
    decay: float = 0.8
    """Head i counts decay^i."""
    distillation: float = 1.0
    """Factor of KL(target || adapted target)."""


class MedusaTrainee(nn.Module):
    """The heads, and for Medusa-2 the adapted target."""

    def __init__(self, teacher: Teacher, heads: TrainableHeads, weights: LossWeights, lora_rank: int | None) -> None:
        super().__init__()
        self.heads = heads
        self._teacher, self._weights = teacher, weights
        self.adapted: Any = None
        self.cache: FeatureCache | None = None
        """Hidden states of the training samples, if the target is not trained."""
        if lora_rank is not None:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.05, target_modules="all-linear")
            self.adapted = get_peft_model(teacher.model, config)

    def head_logits(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [N, V] of head `index` on hidden states [N, H]."""
        result = self.heads(hidden.float(), index)
        logits: torch.Tensor = self._teacher.head(result.to(hidden.dtype)) if self.heads.is_sharing else result
        return logits

    def _loss(self, hidden: torch.Tensor, index: int, labels: torch.Tensor) -> torch.Tensor:
        head = self._teacher.head
        if (
            not self.heads.is_sharing
            or type(head) is not nn.Linear
            or head.bias is not None
            or head.weight.requires_grad
        ):
            return F.cross_entropy(self.head_logits(hidden, index).float(), labels, reduction="sum")
        return frozen_cross_entropy(self.heads(hidden.float(), index), head.weight, labels)

    def hidden(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states [B, T, H] that heads read, and the backbone's own loss, summed."""
        if self.cache is not None and rows.indices:
            return self.cache.padded(rows), torch.zeros(())
        if self.adapted is None:
            return self._teacher.hidden(rows.ids), torch.zeros(())
        with torch.no_grad(), self.adapted.disable_adapter():
            original = self._teacher.head(self._teacher.hidden(rows.ids))
        hidden = self._teacher.model.base_model(input_ids=rows.ids, use_cache=False).last_hidden_state
        before = rows.learnt[:, 1:]
        logits = self._teacher.head(hidden)[:, :-1][before]
        own = F.cross_entropy(logits.float(), rows.ids[:, 1:][before], reduction="sum")
        divergence = forward_divergence(original[:, :-1][before][None], logits[None]) * len(logits)
        return hidden, own + self._weights.distillation * divergence

    def forward(self, rows: Rows) -> torch.Tensor:
        """The loss of a part of a batch, summed over its tokens."""
        hidden, total = self.hidden(rows)
        for index in range(len(self.heads)):
            inputs, labels = pairs(hidden, rows, index)
            loss = self._loss(inputs, index, labels)
            total = total + self._weights.heads * self._weights.decay**index * loss
        return total


def pairs(hidden: torch.Tensor, rows: Rows, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [N, H] that head `index` reads and the ids [N] it should say: those index + 2 places on."""
    ahead = index + 2
    learnt = rows.learnt[:, ahead:]
    return hidden[:, :-ahead][learnt], rows.ids[:, ahead:][learnt]


@dataclass(frozen=True, slots=True)
class HeadGuesses:
    """The guesses of all heads along one sample.

    Row c belongs to the round whose last committed token is id c: its heads read the hidden state before.
    """

    ranks: torch.Tensor
    """Rank [T, heads] of the right token among a head's guesses, at most NUM_RANKS, as beyond the end of the ids."""
    shares: torch.Tensor
    """Probabilities [T, heads, NUM_RANKS] of a head's first guesses, likeliest first."""


@torch.no_grad()
def head_guesses(trainee: MedusaTrainee, sample: Sample, device: torch.device) -> HeadGuesses:
    """The candidates of all heads at every place of a sample."""
    trainee.eval()
    rows = pad([sample]).to(device)
    num_heads, length = len(trainee.heads), len(sample.ids)
    ranks = torch.full((length, num_heads), NUM_RANKS, dtype=torch.int64)
    shares = torch.zeros(length, num_heads, NUM_RANKS)
    with autocast(device):
        hidden = trainee.hidden(rows)[0][0]
        for index in range(num_heads):
            ahead = index + 2
            logits = trainee.head_logits(hidden[:-1], index).float()
            shares[1:, index] = logits.softmax(-1).topk(NUM_RANKS).values.cpu()
            if length > ahead:
                found = ranks_of(logits[: length - ahead], rows.ids[0, ahead:])
                ranks[1 : length - ahead + 1, index] = found.clamp_max(NUM_RANKS).cpu()
    trainee.train()
    return HeadGuesses(ranks, shares)


def rank_accuracies(guesses: Sequence[HeadGuesses], samples: Sequence[Sample]) -> list[list[float]]:
    """For each head the share of answer tokens that are its first, second, ... guess."""
    heads: list[list[float]] = []
    for index in range(guesses[0].ranks.shape[1]):
        found = [
            one.ranks[max(1, sample.prompt_length) : len(sample.ids) - index - 1, index]
            for one, sample in zip(guesses, samples, strict=True)
        ]
        counts = torch.bincount(torch.cat(found), minlength=NUM_RANKS + 1)
        heads.append((counts[:NUM_RANKS] / max(1, int(counts.sum()))).tolist())
    return heads


def tree_rounds(
    guesses: Sequence[HeadGuesses], samples: Sequence[Sample], num_nodes: Sequence[int]
) -> dict[int, Rounds]:
    """Rounds by the number of nodes, of trees grown best first from what the heads say at each place."""
    rounds = {num: Rounds() for num in num_nodes}
    for one, sample in zip(guesses, samples, strict=True):
        first = max(1, sample.prompt_length)
        orders = [best_first(shares, max(num_nodes)) for shares in one.shares[first:].tolist()]
        ranks = one.ranks[first:].tolist()
        for num, counted in rounds.items():
            depths = [accepted_of(row, paths[:num]) for row, paths in zip(ranks, orders, strict=True)]
            counted.add([0] * first + depths, first, len(sample.ids))
    return rounds


def make_trainee(options: argparse.Namespace, teacher: Teacher) -> MedusaTrainee:
    """Fresh heads as the options say."""
    head = None if options.share_head else teacher.head.weight.float()
    heads = TrainableHeads(options.num_heads, options.num_layers, teacher.config.hidden_size, head).to(teacher.device)
    is_joint = options.backbone_lora is not None
    weights = LossWeights(heads=0.2 if is_joint else 1.0, decay=options.decay)
    return MedusaTrainee(teacher, heads, weights, options.backbone_lora)


def make_optimizer(trainee: MedusaTrainee, options: argparse.Namespace) -> PairOptimizer:
    """AdamW, or Muon for the blocks."""
    if options.optimizer == "adamw":
        return PairOptimizer(trainee, 0.0, options.lr, 0.0, lambda name, param: False, max_grad_norm=1.0)
    return PairOptimizer(
        trainee, options.lr, options.lr / 10, options.weight_decay, lambda name, param: ".linear.weight" in name
    )


def run(options: argparse.Namespace) -> None:
    """Train, measure and write.

    Raises:
        OSError, ValueError: a file or an option is not as it has to be.
    """
    recipe = Recipe("medusa", options)
    data = recipe.data()
    teacher = Teacher.load(options.target, options.dtype, options.device)
    trainee = make_trainee(options, teacher)
    if trainee.adapted is None:
        trainee.cache = FeatureCache(options.run_dir / "features.bin", data.training, teacher)
    batches = Batches(data.training, options.batch_rows, options.seed)

    def gradients(step: int, fraction: float) -> Step:
        torch.manual_seed((options.seed << 32) + step)  # dropout
        return gradients_of(trainee, batches(step).to(teacher.device))

    progress = run_loop(
        trainee,
        make_optimizer(trainee, options),
        gradients,
        recipe.loop_settings,
        recipe.checkpoint,
        lambda model: held_out_loss(model, data.held_out[:32], teacher.device),
    )
    finish(recipe, trainee, teacher, data, progress)


def finish(recipe: Recipe, trainee: MedusaTrainee, teacher: Teacher, data: Data, progress: Progress) -> None:
    """Measure on held-out sequences and write heads, target, card and plot."""
    options = recipe.options
    guesses = [head_guesses(trainee, sample, teacher.device) for sample in data.held_out]
    accuracies = rank_accuracies(guesses, data.held_out)
    base = options.target
    if trainee.adapted is not None:
        base = str(options.out / "target")
        trainee.adapted.merge_and_unload().save_pretrained(base)
        recipe.tokenizer().save_pretrained(base)
    save_heads(trainee.heads, options.out, base)
    heads = table(
        ["the right token is", *(f"guess {rank}" for rank in (1, 2, 3, 4)), f"one of {NUM_RANKS}"],
        [
            [f"head {index + 1}, {index + 2} ahead", *(f"{share:.3f}" for share in row[:4]), f"{sum(row):.3f}"]
            for index, row in enumerate(accuracies)
        ],
    )
    efficiency = tree_rounds(guesses, data.held_out, NODES)
    trees = table(
        ["drafted nodes, trees grown best first", *(str(num) for num in efficiency)],
        [["tokens a forward", *(f"{rounds.block_efficiency:.2f}" for rounds in efficiency.values())]],
    )
    version = "sharing the target's output layer" if trainee.heads.is_sharing else "each with an output layer"
    kind = "Medusa-1" if trainee.adapted is None else "Medusa-2, with the adapted target in `target/`"
    card = Card(
        title="Medusa heads",
        summary=f"{len(trainee.heads)} heads of {trainee.heads.num_layers} residual block(s), {version}, for"
        f" `{options.target}` ({kind}). `config.json` holds the rank accuracies of held-out answers.",
        data=data.described(),
        loss=f"cross-entropy of the token i + 2 places on, head i counting {options.decay:g}^i;"
        f" {options.optimizer}, peak rate {options.lr:g}, linear to zero from 40 %.",
        tables=[heads, trees],
    )
    write_card(card, recipe, progress)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = recipe_parser("betoken.training.medusa", "Train Medusa heads for a target.")
    add = parser.add_argument
    add("--num-heads", type=int, default=4)
    add("--num-layers", type=int, default=1, help="residual blocks a head")
    add("--share-head", action=argparse.BooleanOptionalAction, default=True, help="use the target's output layer")
    add("--weight-decay", type=float, default=0.0, help="of the blocks, with muon")
    add("--decay", type=float, default=0.8, help="head i counts so much to the power of i")
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--backbone-lora", type=int, metavar="RANK", help="Medusa-2: adapt the target, too, by LoRA of this rank")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run every stage that is not done yet."""
    run_recipe("betoken.training.medusa", run, parse_arguments(arguments))


if __name__ == "__main__":
    main()
