import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from betoken.drafters.eagle3.checkpoint import load_layer
from betoken.drafters.side.files import TargetShape
from betoken.training import eagle3
from betoken.training.batches import pad
from betoken.training.eagle3_layer import Eagle3Trainee, make_layer, passes
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
    eagle3.main([*options, "--tokens", "6000", "--threads", "1", "--draft-vocab-size", "256", *further])
    return out


def test_a_layer_lies_in_the_published_layout_and_loads(tiny_pair: Path, tmp_path: Path) -> None:
    out = train(tiny_pair, tmp_path / "layer")
    tensors = load_file(out / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64) and tensors["fc.weight"].shape == (32, 96)
    assert tensors["d2t"].dtype == torch.int64 and int(tensors["t2d"].sum()) == 256
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    loaded = load_layer(out, TargetShape("target", vocab_size=512, hidden_size=32, num_layers=4))
    assert loaded.embedding is None and loaded.state_layers == (2, 2, 3)
    assert "tokens a forward" in (out / "README.md").read_text()


@torch.no_grad()
def test_a_fresh_layer_says_what_the_target_says(tiny_pair: Path) -> None:
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    target_ids = torch.arange(0, 512, 2)
    layer = make_layer(teacher, target_ids, None)
    ids = torch.randint(512, (2, 20), generator=torch.Generator().manual_seed(1))
    taught = teacher(ids, layer.shape.states_of(4))
    (normed,) = passes(layer, teacher, taught, ids, 1)
    torch.testing.assert_close(layer.lm_head(normed), taught.logits[:, :-1, target_ids], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_of_another_shape_than_the_targets_begins_as_its_residual(tiny_pair: Path) -> None:
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    layer = make_layer(teacher, torch.arange(512), 40)
    assert not layer.midlayer.mlp.down_proj.weight.any() and not layer.midlayer.self_attn.o_proj.weight.any()


@torch.no_grad()
def test_one_forward_says_what_drafting_step_by_step_says(tiny_pair: Path) -> None:
    """Rows one after the other, true states first, then the layer's own output, each meeting all keys before it."""
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    layer = make_layer(teacher, torch.arange(0, 512, 2), 40)
    torch.manual_seed(5)
    for param in layer.parameters():
        param.normal_(std=0.3)
    ids = torch.randint(512, (1, 12), generator=torch.Generator().manual_seed(6))
    taught = teacher(ids, layer.shape.states_of(4))
    at_once = [normed[0] for normed in passes(layer, teacher, taught, ids, 4)]
    states = torch.cat(taught.features, -1)[0]
    for start in (0, 3, 7):  # the row whose outcome is the first draft token's
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.append(key.repeat_interleave(2, -2))  # noqa: B023 (called in this turn)
            values.append(value.repeat_interleave(2, -2))  # noqa: B023
            shares = torch.stack([(query * key).sum(-1) for key in keys], -1) * query.shape[-1] ** -0.5  # noqa: B023
            return torch.einsum("hm,mhd->hd", shares.softmax(-1), torch.stack(values))  # noqa: B023

        for place in range(start + 1):
            embedded = teacher.embedding(ids[0, place + 1])
            normed, hidden = layer.run(embedded, layer.fuse(states[place]), torch.tensor(place), attend)
        for index in range(4):
            torch.testing.assert_close(at_once[index][start], normed, atol=1e-4, rtol=1e-4)
            if start + index + 2 < 12:
                embedded = teacher.embedding(ids[0, start + index + 2])
                normed, hidden = layer.run(embedded, hidden, torch.tensor(start + index + 1), attend)


@torch.no_grad()
def test_passes_on_some_rows_give_what_passes_on_all_give_there(tiny_pair: Path) -> None:
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    layer = make_layer(teacher, torch.arange(0, 512, 2), 40)
    torch.manual_seed(5)
    for param in layer.parameters():
        param.normal_(std=0.3)
    ids, chosen = torch.randint(512, (2, 14)), torch.tensor([0, 3, 4, 9, 12])
    taught = teacher(ids, layer.shape.states_of(4))
    on_all, on_some = list(passes(layer, teacher, taught, ids, 4)), list(passes(layer, teacher, taught, ids, 4, chosen))
    torch.testing.assert_close(on_some[0], on_all[0])
    for some, everything in zip(on_some[1:], on_all[1:], strict=True):
        torch.testing.assert_close(some, everything[:, chosen], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_loss_of_drawn_rows_is_on_average_that_of_all(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over every row drawn alone is exact, so no draw favours a row."""
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    torch.manual_seed(7)
    layer = make_layer(teacher, torch.arange(0, 512, 2), 40)
    layer.midlayer.mlp.down_proj.weight.normal_(std=0.3)
    rows = pad([Sample(tuple(torch.randint(512, (length,)).tolist()), prompt) for length, prompt in ((11, 3), (9, 0))])
    wanted = Eagle3Trainee(teacher, layer, 3, 0.8)(rows)
    trainee = Eagle3Trainee(teacher, layer, 3, 0.8, later_share=0.01).train()
    losses = []
    for row in range(10):
        monkeypatch.setattr(trainee, "_drawn_rows", lambda num_rows, device, row=row: torch.tensor([row]))
        losses.append(trainee(rows))
    assert len({float(loss) for loss in losses}) > 5
    torch.testing.assert_close(torch.stack(losses).mean(), wanted)


def test_rows_are_drawn_while_learning_alone(tiny_pair: Path) -> None:
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    trainee = Eagle3Trainee(teacher, make_layer(teacher, torch.arange(512), 40), 3, 0.8, later_share=0.5)
    drawn = trainee.train()._drawn_rows(20, torch.device("cpu"))
    assert drawn is not None and len(set(drawn.tolist())) == 10
    assert trainee.eval()._drawn_rows(20, torch.device("cpu")) is None
