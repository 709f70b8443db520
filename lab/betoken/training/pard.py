"""A PARD drafter for a target: `betoken train pard --target DIR --draft DIR --prompts FILE --tokens N ...`.

Fine-tunes a causal model to predict several tokens of the target's answers in one forward, by cross-entropy, with
conditional drop of rows. Without `--draft` it begins as some of the target's own layers. `pard_token` in the
config.json names the mask token.

Source: An et al., PARD, arXiv:2504.18583.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from betoken.engine.families import family_of
from betoken.training.batches import Batches, Rows
from betoken.training.block_efficiency import Rounds
from betoken.training.draft import initial_draft, save_draft
from betoken.training.loop import Step, run_loop
from betoken.training.model_card import table
from betoken.training.optimizer import PairOptimizer
from betoken.training.parallel_rows import ParallelRows, parallel_logits
from betoken.training.part_gradients import autocast, gradients_of, held_out_loss, part_tokens
from betoken.training.recipe import Recipe, recipe_parser, run_recipe
from betoken.training.recipe_card import Card, write_card
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher


class PardTrainee(nn.Module):
    """The drafter, and the rows that it learns from."""

    def __init__(self, draft: Any, mask_token_id: int, num_depths: int, keep_share: float, least_share: float) -> None:
        super().__init__()
        self.draft = draft
        self.mask_token_id, self.num_depths = mask_token_id, num_depths
        self._shares = keep_share, least_share
        self._generator = torch.Generator()

    def seed(self, number: int) -> None:
        """Seed the choice of rows of a step."""
        self._generator.manual_seed(number)

    def forward(self, rows: Rows) -> torch.Tensor:
        """The mean cross-entropy of the learnt rows, times the learnt tokens of a part of a batch."""
        text, num_learnt = rows.ids, rows.num_learnt
        length = text.shape[1]
        chosen = ParallelRows.drawn(length - 1, self.num_depths, *self._shares, self._generator).to(text.device)
        is_learnt = rows.learnt[:, chosen.positions + 1]
        logits = parallel_logits(self.draft, text[:, :-1], chosen, self.mask_token_id)[is_learnt]
        loss = nn.functional.cross_entropy(logits.float(), text[:, chosen.positions + 1][is_learnt])
        return loss * num_learnt


@torch.no_grad()
def parallel_rounds(draft: Any, mask_token_id: int, num_tokens: int, samples: Sequence[Sample]) -> Rounds:
    """Rounds with chains of `num_tokens` tokens on known answers."""
    draft.eval()
    rounds = Rounds()
    for sample in samples:
        text = torch.tensor([sample.ids], device=draft.device)
        length = text.shape[1] - 1
        rows = ParallelRows.all(length, num_tokens).to(text.device)
        with autocast(text.device):
            best = parallel_logits(draft, text[:, :-1], rows, mask_token_id)[0].argmax(-1)
        is_right = torch.zeros(num_tokens, length, dtype=torch.bool)
        is_right[rows.depths, rows.positions] = (best == text[0, rows.positions + 1]).cpu()
        accepted = [_num_leading(is_right, position) for position in range(length)]
        rounds.add(accepted, max(1, sample.prompt_length), len(sample.ids))
    draft.train()
    return rounds


def _num_leading(is_right: torch.Tensor, position: int) -> int:
    """Correct tokens of a draft after the text up to `position`, before the first wrong one."""
    diagonal = is_right[:, position:].diagonal().tolist()
    return diagonal.index(False) if False in diagonal else len(diagonal)


def choose_mask_token(wanted: int | None, tokenizer: Any, vocab_size: int) -> int:
    """Return the wanted id, by default the first id without a token.

    Raises:
        ValueError: the id is not in the vocabulary, or all ids are used.
    """
    if wanted is None and len(tokenizer) >= vocab_size:
        raise ValueError(f"mask_token: the tokenizer uses all {vocab_size} ids; name a rare one")
    token_id = len(tokenizer) if wanted is None else wanted
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"mask_token {token_id}: must be at least 0 and below {vocab_size}")
    return token_id


def run(options: argparse.Namespace) -> None:
    """Train, measure and write.

    Raises:
        OSError, ValueError: a file or an option is not as it has to be.
    """
    _check(options)
    recipe = Recipe("pard", options)
    data = recipe.data()
    teacher = Teacher.load(options.target, options.dtype, options.device)
    draft = initial_draft(options, teacher)
    check_layers(draft.config.model_type)
    vocab_size = draft.get_output_embeddings().weight.shape[0]
    mask_token_id = choose_mask_token(options.mask_token, recipe.tokenizer(), vocab_size)
    draft.config.pard_token, draft.config.spd_type = mask_token_id, "pard"
    trainee = PardTrainee(draft, mask_token_id, options.length, options.keep_share, options.least_share)
    before = parallel_rounds(draft, mask_token_id, options.length, data.held_out)
    batches = Batches(data.training, options.batch_rows, options.seed)
    max_tokens = max(1, part_tokens(vocab_size) // options.length)

    def gradients(step: int, fraction: float) -> Step:
        trainee.seed((options.seed << 32) + step)
        return gradients_of(trainee, batches(step).to(teacher.device), max_tokens)

    def evaluate(model: PardTrainee) -> float:
        model.seed(options.seed)
        return held_out_loss(model, data.held_out[:32], teacher.device)

    optimizer = PairOptimizer(trainee, options.lr, options.lr / 5, 0.0)
    progress = run_loop(trainee, optimizer, gradients, recipe.loop_settings, recipe.checkpoint, evaluate)
    save_draft(draft, options.out)
    recipe.tokenizer().save_pretrained(options.out)
    after = parallel_rounds(draft, mask_token_id, options.length, data.held_out)
    card = Card(
        title="PARD drafter",
        summary=f"A small model for `{options.target}`, begun as "
        + (f"`{options.draft}`" if options.draft else f"{options.num_layers} of its layers")
        + f", that drafts up to {options.length} tokens in one forward; mask token {mask_token_id}.",
        data=data.described(),
        loss=f"cross-entropy at {options.length} depths; depth i keeps {options.keep_share:g}^i of its rows, at least"
        f" {options.least_share:g}. Muon for matrices, AdamW for the rest, peak rate {options.lr:g}, linear to zero"
        " from 40 %.",
        tables=[rounds_table({"before": before, "after": after})],
    )
    write_card(card, recipe, progress)


def rounds_table(found: dict[str, Rounds]) -> str:
    """Tokens a forward, and accepted drafts by position."""
    rows = [
        [name, f"{rounds.block_efficiency:.2f}", ", ".join(f"{share:.2f}" for share in rounds.by_position)]
        for name, rounds in found.items()
    ]
    return table(["", "tokens a forward", "accepted, by position"], rows)


def _check(options: argparse.Namespace) -> None:
    if (options.draft is None) == (options.num_layers is None):
        raise ValueError("draft, num_layers: exactly one of them says what the drafter begins as")
    if not 2 <= options.length <= 64:
        raise ValueError(f"length {options.length}: must be 2 to 64")
    for name in ("keep_share", "least_share"):
        if not 0 < (value := getattr(options, name)) <= 1:
            raise ValueError(f"{name} {value}: must be above 0 and at most 1")


def check_layers(model_type: str) -> None:
    """Raises:
    ValueError: layers of this type of model do not take the mask that keeps drafts of one forward apart.
    """
    family = family_of(model_type)
    if family.layer_types or family.has_own_attention:
        raise ValueError(f"draft: layers of {model_type} cannot hold several drafts in one forward")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Options of the command."""
    parser = recipe_parser(prog, "Train a PARD drafter for a target.")
    add = parser.add_argument
    add("--draft", help="checkpoint to begin with, of the target's tokenizer")
    add("--num-layers", type=int, help="begin with so many of the target's layers instead, evenly spread")
    add("--length", type=int, default=8, help="tokens that one forward learns to predict")
    add("--mask-token", type=int, help="id of the mask token; default: the first that the tokenizer does not use")
    add("--keep-share", type=float, default=0.7, help="share of the rows of a depth that the next depth keeps")
    add("--least-share", type=float, default=0.2, help="least share of rows that a depth keeps")
    add("--lr", type=float, default=2e-3, help="peak learning rate of matrices; the rest has a fifth")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run every stage that is not done yet."""
    options = make_parser("betoken.training.pard").parse_args(arguments)
    run_recipe("betoken.training.pard", run, options)


if __name__ == "__main__":
    main()
