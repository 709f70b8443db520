import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from betoken.drafters.medusa.layouts import check_base, lay_out
from betoken.engine.weights.tensor_files import open_tensors
from betoken.training import medusa
from betoken.training.batches import pad
from betoken.training.medusa_heads import TrainableHeads, load_heads, save_heads
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher


def train(pair: Path, out: Path, *further: str) -> Path:
    options = [
        "--target",
        str(pair / "target"),
        "--out",
        str(out),
        "--run-dir",
        f"{out}_run",
        "--device",
        "cpu",
        "--compile",
        "off",
    ]
    options += ["--texts", str(pair / "texts.jsonl"), "--num-held-out", "4", "--max-length", "64", "--batch-rows", "4"]
    medusa.main([*options, "--tokens", "6000", "--threads", "1", "--num-heads", "2", *further])
    return out


@pytest.mark.parametrize("kind", ["shared head", "own heads", "backbone"])
def test_heads_learn_and_lie_in_the_published_layout(tiny_pair: Path, tmp_path: Path, kind: str) -> None:
    further = {"shared head": [], "own heads": ["--no-share-head"], "backbone": ["--backbone-lora", "2"]}[kind]
    out = train(tiny_pair, tmp_path / "heads", *further)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "medusa_lm_head.safetensors")
    names = {f"{head}.0.linear.{part}" for head in (0, 1) for part in ("weight", "bias")}
    if kind == "own heads":
        names |= {"0.1.weight", "1.1.weight"}
    assert tensors.keys() == names and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert config["version"] == ("1" if kind == "own heads" else "2")
    assert "guess 1" in (out / "README.md").read_text() and (out / "loss.png").stat().st_size > 1000
    layout = lay_out(open_tensors(out / "medusa_lm_head.safetensors"), hidden_size=32, vocab_size=512)
    assert layout.num_heads == 2 and len(layout.output_layers) == (2 if kind == "own heads" else 0)
    check_base(config, {"target"})
    assert ((out / "target" / "config.json").exists()) == (kind == "backbone")


@torch.no_grad()
def test_a_fresh_head_says_what_the_targets_own_head_says(tiny_pair: Path) -> None:
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    rows = pad([Sample(tuple(range(40, 60)), 0)])
    hidden = teacher.hidden(rows.ids)
    for head in (None, teacher.head.weight):
        trainee = medusa.MedusaTrainee(teacher, TrainableHeads(2, 2, 32, head), medusa.LossWeights(), None)
        torch.testing.assert_close(trainee.head_logits(hidden, 1), teacher.head(hidden))


@torch.no_grad()
def test_ranks_belong_to_the_round_whose_last_token_is_known(tiny_pair: Path) -> None:
    """The round after id c reads the state at c - 1; head i guesses id c + 1 + i."""
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    heads = TrainableHeads(2, 1, 32, None)
    torch.manual_seed(0)
    for param in heads.parameters():
        param.normal_()
    trainee = medusa.MedusaTrainee(teacher, heads, medusa.LossWeights(), None)
    sample = Sample((5, 9, 300, 7, 7, 120), 2)
    found = medusa.head_guesses(trainee, sample, torch.device("cpu"))
    hidden = teacher.hidden(pad([sample]).ids)[0]
    for last in (1, 2, 3):
        for index in range(2):
            wanted = last + 1 + index
            if wanted < 6:
                order = trainee.head_logits(hidden[last - 1], index).float().argsort(descending=True).tolist()
                assert int(found.ranks[last, index]) == min(10, order.index(sample.ids[wanted]))
    assert found.ranks[5].tolist() == [10, 10]
    shares = medusa.rank_accuracies([found], [sample])
    assert [len(row) for row in shares] == [medusa.NUM_RANKS] * 2
    for index, row in enumerate(shares):
        found_there = found.ranks[2 : 6 - index - 1, index].tolist()
        assert row == pytest.approx([found_there.count(rank) / len(found_there) for rank in range(medusa.NUM_RANKS)])


def test_kept_heads_are_read_again(tmp_path: Path) -> None:
    heads = TrainableHeads(3, 2, 16, torch.randn(24, 16))
    save_heads(heads, tmp_path, "base")
    again = load_heads(tmp_path)
    assert (len(again), again.num_layers, again.is_sharing) == (3, 2, False)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16).float())
