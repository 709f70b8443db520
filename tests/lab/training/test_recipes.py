"""Properties of every recipe: an interrupted run ends like any other, invalid options are reported at once."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from betoken.training import draft, eagle3, loop, medusa, pard
from betoken.training.__main__ import main

RECIPES: dict[str, list[str]] = {
    "medusa": ["--num-heads", "2"],
    "medusa-2": ["--num-heads", "2", "--backbone-lora", "2"],
    "eagle3": ["--length", "3", "--draft-vocab-size", "200"],
    "draft": ["--source", "mix", "--renew-every", "3", "--temperatures", "1"],
    "pard": ["--length", "3", "--mask-token", "511", "--lr", "0.02"],
}


def arguments(pair: Path, out: Path, name: str) -> list[str]:
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
    options += ["--prompts", str(pair / "prompts.jsonl"), "--num-prompts", "24", "--max-new-tokens", "16"]
    options += ["--num-held-out", "4", "--batch-rows", "4", "--threads", "1", "--tokens", "500"]
    if name == "draft":
        options += ["--held-out-prompts", str(pair / "prompts.jsonl")]
    if name in ("draft", "pard"):
        options += ["--draft", str(pair / "draft")]
    return [name.partition("-")[0], *options, *RECIPES[name]]


def weights(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_gives_the_same_weights(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    main(arguments(tiny_pair, tmp_path / "whole", name))
    module = {"medusa": medusa, "medusa-2": medusa, "eagle3": eagle3, "draft": draft, "pard": pard}[name]
    with monkeypatch.context() as interrupted, pytest.raises(SystemExit):
        interrupted.setattr(module, "run_loop", stopping_after(4))
        main(arguments(tiny_pair, tmp_path / "parts", name))
    main(arguments(tiny_pair, tmp_path / "parts", name))
    found = weights(tmp_path / "parts")
    assert found == weights(tmp_path / "whole") and found


def stopping_after(num_steps: int) -> Callable[..., loop.Progress]:
    def run_loop(*args: object) -> loop.Progress:
        loop.run_loop(*args, stop_after_steps=num_steps)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    return run_loop


@pytest.mark.parametrize("name", ["medusa", "eagle3", "draft", "pard"])
def test_the_loss_falls(tiny_pair: Path, tmp_path: Path, name: str) -> None:
    options = arguments(tiny_pair, tmp_path / "out", name)
    losses = []
    if name == "draft":
        options += ["--renew-every", "20"]  # each renewal loads the draft into the engine
    else:  # text has more to learn than what an untrained target says
        options += ["--texts", str(tiny_pair / "texts.jsonl")]
    for tokens in ("1", "5000"):
        options[options.index("--tokens") + 1] = tokens
        options[options.index("--run-dir") + 1] = str(tmp_path / f"run{tokens}")
        main(options)
        state = torch.load(tmp_path / f"run{tokens}" / "checkpoint.pt", weights_only=True)
        losses.append(state["progress"]["held_out"][-1][1])
    assert losses[1] < 0.98 * losses[0]


@pytest.mark.parametrize(
    ("option", "value", "reported"),
    [
        ("tokens", "0", "tokens 0"),
        ("seed", "-1", "seed -1"),
        ("num-held-out", "13", "num_held_out 13"),
        ("device", "nonsense", "device nonsense"),
    ],
)
def test_a_bad_option_is_reported_by_name(
    tiny_pair: Path, tmp_path: Path, option: str, value: str, reported: str
) -> None:
    with pytest.raises(SystemExit, match=reported):
        main([*arguments(tiny_pair, tmp_path / "out", "medusa"), f"--{option}", value])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["prompts", "texts"])
def test_a_table_needs_every_kind_of_data(tiny_pair: Path, tmp_path: Path, missing: str) -> None:
    options = [*arguments(tiny_pair, tmp_path / "out", "draft")[1:], "--texts", str(tiny_pair / "texts.jsonl")]
    place = options.index(f"--{missing}")
    del options[place : place + 2]
    with pytest.raises(SystemExit, match=f"{missing}: needed"):
        main(["distill-table", *options])


def test_a_target_that_the_engine_refuses_is_reported_in_a_line(tiny_pair: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_pair / "target", target)
    options = arguments(tiny_pair, tmp_path / "out", "medusa")
    options[options.index("--target") + 1] = str(target)
    (target / "model.safetensors").write_bytes(b"none")
    with pytest.raises(SystemExit, match=r"betoken.training.medusa: .*header"):
        main(options)


def test_a_run_folder_of_another_recipe_is_refused(tiny_pair: Path, tmp_path: Path) -> None:
    main(arguments(tiny_pair, tmp_path / "out", "medusa"))
    with pytest.raises(SystemExit, match="made with lr"):
        main([*arguments(tiny_pair, tmp_path / "out", "medusa"), "--lr", "0.1"])


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(SystemExit, match="medusa"):
        main(["nonsense"])


def test_options_that_decide_nothing_may_change(tiny_pair: Path, tmp_path: Path) -> None:
    parsed = [
        medusa.parse_arguments([*arguments(tiny_pair, tmp_path / "out", "medusa")[1:], *further])
        for further in ([], ["--threads", "2", "--note", "elsewhere"])
    ]
    assert all(isinstance(options, argparse.Namespace) for options in parsed)
    for options in parsed:
        medusa.Recipe("medusa", options)
