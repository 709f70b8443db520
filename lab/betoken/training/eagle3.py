"""An EAGLE-3 layer for a target: `betoken train eagle3 --target DIR --prompts FILE --tokens N --out DIR --run-dir DIR`.

The layer learns the target's whole distribution over the ids that it may propose, by training-time test.

Source: Li et al., arXiv:2503.01840; the layout is SafeAILab's and SpecForge's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from betoken.training.batches import Batches, pad
from betoken.training.block_efficiency import Rounds
from betoken.training.eagle3_layer import Eagle3Trainee, frequent_ids, make_layer, save_layer
from betoken.training.loop import Progress, Step, run_loop
from betoken.training.model_card import table
from betoken.training.optimizer import PairOptimizer
from betoken.training.part_gradients import gradients_of, held_out_loss, part_tokens
from betoken.training.recipe import Data, Recipe, recipe_parser, run_recipe
from betoken.training.recipe_card import Card, write_card
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher


def make_optimizer(trainee: Eagle3Trainee, options: argparse.Namespace) -> PairOptimizer:
    """AdamW as in the paper, or Muon for the matrices but the head."""
    if options.optimizer == "adamw":
        return PairOptimizer(trainee, 0.0, options.lr, 0.0, lambda name, param: False, max_grad_norm=0.5)
    return PairOptimizer(trainee, options.lr, options.lr / 10, 0.0)


@torch.no_grad()
def chain_accuracy(
    trainee: Eagle3Trainee, samples: Sequence[Sample], device: torch.device
) -> tuple[list[float], dict[int, Rounds]]:
    """How often each pass is right after the text's own tokens, and the rounds by the length of chains."""
    trainee.eval()
    counts = torch.zeros(0, 2)
    lengths: list[list[int]] = []
    for sample in samples:
        accepted, hits = trainee.accepted(sample, pad([sample]).to(device))
        counts = counts + hits if len(counts) else hits
        lengths.append(accepted)
    trainee.train()
    by_length: dict[int, Rounds] = {}
    for num in range(1, len(counts) + 1):
        rounds = by_length[num] = Rounds()
        for sample, accepted in zip(samples, lengths, strict=True):
            rounds.add([min(num, n) for n in accepted], max(1, sample.prompt_length), len(sample.ids))
    return (counts[:, 0] / counts[:, 1].clamp_min(1)).tolist(), by_length


def run(options: argparse.Namespace) -> None:
    """Train, measure and write.

    Raises:
        OSError, ValueError: a file or an option is not as it has to be.
    """
    if not 0 < options.later_share <= 1:
        raise ValueError(f"later_share {options.later_share}: must be above 0 and at most 1")
    recipe = Recipe("eagle3", options)
    data = recipe.data()
    teacher = Teacher.load(options.target, options.dtype, options.device)
    num_ids = min(options.draft_vocab_size or teacher.head.weight.shape[0], teacher.head.weight.shape[0])
    ids = frequent_ids(data.training, teacher.head.weight.shape[0], num_ids)
    trainee = Eagle3Trainee(
        teacher, make_layer(teacher, ids, options.mlp_size), options.length, options.decay, options.later_share
    )
    trainee.to(teacher.device)
    batches = Batches(data.training, options.batch_rows, options.seed)

    def gradients(step: int, fraction: float) -> Step:
        torch.manual_seed((options.seed << 32) + step)  # rows of later passes
        return gradients_of(trainee, batches(step).to(teacher.device), part_tokens(teacher.head.weight.shape[0]))

    progress = run_loop(
        trainee,
        make_optimizer(trainee, options),
        gradients,
        recipe.loop_settings,
        recipe.checkpoint,
        lambda model: held_out_loss(model, data.held_out[:32], teacher.device),
    )
    finish(recipe, trainee, teacher, data, progress)


def finish(recipe: Recipe, trainee: Eagle3Trainee, teacher: Teacher, data: Data, progress: Progress) -> None:
    """Measure on held-out sequences and write layer, card and plot."""
    options, shape = recipe.options, trainee.layer.shape
    save_layer(trainee.layer, options.out, options.target, teacher.config.num_hidden_layers)
    states = ", ".join(str(layer) for layer in shape.states_of(teacher.config.num_hidden_layers))
    shares, by_length = chain_accuracy(trainee, data.held_out, teacher.device)
    measured = table(
        ["pass", *(str(index + 1) for index in range(len(shares)))],
        [
            ["right, given the text's tokens before", *(f"{share:.3f}" for share in shares)],
            [
                "tokens a forward with chains of so many",
                *(f"{rounds.block_efficiency:.2f}" for rounds in by_length.values()),
            ],
        ],
    )
    card = Card(
        title="EAGLE-3 layer",
        summary=f"One layer for `{options.target}`: hidden {shape.hidden_size}, MLP {shape.intermediate_size}, "
        f"{shape.draft_vocab_size} of {shape.vocab_size} ids, states {states}."
        " Embeddings are the target's.",
        data=data.described(),
        loss=f"cross-entropy to the target's distribution over the layer's ids, training-time test of"
        f" {options.length} passes, pass k counting {options.decay:g}^k; {options.optimizer}, peak rate {options.lr:g},"
        " linear to zero from 40 %.",
        tables=[measured],
    )
    write_card(card, recipe, progress)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = recipe_parser("betoken.training.eagle3", "Train an EAGLE-3 layer for a target.")
    add = parser.add_argument
    add("--length", type=int, default=7, help="passes of the training-time test")
    add("--decay", type=float, default=0.8, help="pass k counts so much to the power of k")
    add(
        "--later-share",
        type=float,
        default=1.0,
        help="share of rows that passes after the first learn from, drawn anew",
    )
    add("--draft-vocab-size", type=int, help="ids that the layer may propose, the most frequent ones; default: all")
    add("--mlp-size", type=int, help="default: the target's")
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--lr", type=float, default=6e-4, help="peak learning rate")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run every stage that is not done yet."""
    run_recipe("betoken.training.eagle3", run, parse_arguments(arguments))


if __name__ == "__main__":
    main()
