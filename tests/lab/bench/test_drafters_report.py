"""The drafter table's figures from made-up runs, and no figures if a sequence differed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made_up_runs import made_up_run  # noqa: E402

from betoken.bench.drafters import main  # noqa: E402
from betoken.bench.drafters_report import is_single_drafter, markdown, ratios_per_prompt, summarize  # noqa: E402
from betoken.bench.drafters_store import DraftersStore, LeftOut, PromptRun  # noqa: E402
from betoken.bench.identity_check import IdentityCount  # noqa: E402

DRAFTERS = ["model", "fused", "ngram/max_branches=1"]
SPEEDS = {
    "none": 100.0,
    "model": 200.0,
    "ngram/max_branches=1": 150.0,
    "fused": 180.0,
    "transformers_generate": 50.0,
    "transformers_assisted": 80.0,
    "transformers_prompt_lookup": 70.0,
}


def store_of(folder: Path, runs: list[PromptRun]) -> DraftersStore:
    store = DraftersStore.open_for(folder, {"drafters": DRAFTERS}, {})
    for run in runs:
        store.append(run)
    return store


def test_rows_hold_medians_ratios_and_totals(tmp_path: Path) -> None:
    runs = [made_up_run(i, {name: speed * (1 + i) for name, speed in SPEEDS.items()}) for i in range(3)]
    result = summarize(store_of(tmp_path, runs))
    (group,) = result["groups"]
    assert (group["num_prompts"], group["num_tokens"], group["num_left_out"]) == (3, 300, 0)
    sides = {side["side"]: side for side in group["sides"]}
    assert list(sides) == ["none", "model", "ngram/max_branches=1", "fused", *list(SPEEDS)[4:]]
    assert sides["model"] == {
        "side": "model",
        "tokens_per_s": 400.0,
        "ratio_to_plain": 2.0,
        "predicted": 1.9,
        "block_efficiency": 4.0,
        "acceptance_rate": 0.75,
        "draft_forwards_per_round": 5.0,
        "drafting_ms": 2.0,
        "first_drafting_ms": 10.0,
        "waiting_ms": 3.0,
        "num_rounds": 75,
        "num_failed_drafts": 0,
    }
    assert sides["transformers_assisted"] == {
        "side": "transformers_assisted",
        "tokens_per_s": 160.0,
        "ratio_to_plain": 0.8,
    }
    assert (result["identical"], result["compared"], result["commits"]) == (18, 18, ["abc123"])


@pytest.mark.parametrize(
    ("fused", "num_prompts", "verdict"),
    [(198.0, 15, "within 5 %"), (180.0, 15, "not within 5 %"), (198.0, 14, "undecided")],
)
def test_fused_is_held_against_the_best_single_drafter(
    tmp_path: Path, fused: float, num_prompts: int, verdict: str
) -> None:
    """`transformers` may be faster, but is not one of our drafters."""
    speeds = SPEEDS | {"fused": fused, "transformers_assisted": 900.0}
    found = summarize(store_of(tmp_path, [made_up_run(i, speeds) for i in range(num_prompts)]))
    comparison = found["groups"][0]["fused_to_best"]
    assert (comparison["best"], comparison["num_pairs"]) == ("model", num_prompts)
    assert comparison["ratio"] == pytest.approx(fused / 200, abs=1e-4)
    assert comparison["verdict"] == verdict


def test_passes_over_a_prompt_are_one_pair(tmp_path: Path) -> None:
    runs = [
        made_up_run(i, SPEEDS | {"fused": 200.0 * factor}, repeat=repeat)
        for i in range(8)
        for repeat, factor in enumerate((0.9, 1.0, 3.0))
    ]
    assert ratios_per_prompt(runs, "fused", "model") == pytest.approx([1.0] * 8)
    result = summarize(store_of(tmp_path, runs))
    assert (result["repeats"], result["num_prompts"]) == (3, 8)
    comparison = result["groups"][0]["fused_to_best"]
    assert (comparison["num_pairs"], comparison["verdict"]) == (8, "undecided")


def test_a_file_of_several_categories_is_also_reported_as_a_whole(tmp_path: Path) -> None:
    runs = [made_up_run(i, SPEEDS, category="qa" if i % 2 else "rag") for i in range(4)]
    runs.append(made_up_run(0, SPEEDS, prompts="other.jsonl"))
    store = store_of(tmp_path, runs)
    left_out = [("file.jsonl", "rag", 5), ("file.jsonl", "long", 3), ("other.jsonl", "code", 0)]
    store.save_left_out([LeftOut(*entry) for entry in left_out])
    result = summarize(store)
    groups = result["groups"]
    names = [tuple(group[name] for name in ("prompts", "category", "num_prompts", "num_left_out")) for group in groups]
    assert names == [
        ("file.jsonl", "rag", 2, 5),
        ("file.jsonl", "qa", 2, 0),
        ("file.jsonl", "all", 4, 8),
        ("other.jsonl", "code", 1, 0),
    ]
    assert result["left_out"] == [{"prompts": "file.jsonl", "category": "long", "count": 3}]
    assert "fused_to_best" not in groups[2]
    assert "5 left out" in markdown(groups[0])


def test_a_category_of_which_nothing_fits_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path, [made_up_run(0, SPEEDS)]).save_left_out([LeftOut("file.jsonl", "rag", 40)])
    assert main(["--report", "--out", str(tmp_path)]) == 0
    assert "**file.jsonl, rag**: all 40 prompts left out" in capsys.readouterr().out


def test_markdown_is_a_table_with_its_verdict(tmp_path: Path) -> None:
    (group,) = summarize(store_of(tmp_path, [made_up_run(i, SPEEDS) for i in range(20)]))["groups"]
    text = markdown(group)
    lines = text.splitlines()
    assert lines[0] == "**file.jsonl, code** (20 prompts)"
    assert lines[4] == "| none (plain decoding) | 100.0 | 1.00 |  |  |  |  |  |  |  |"
    assert lines[5] == "| `model` | 200.0 | 2.00 | 1.90 | 4.00 | 0.75 | 5.00 | 2.00 | 10.0 | 3.00 |"
    assert lines[8] == "| transformers generate | 50.0 | 0.50 |  |  |  |  |  |  |  |"
    assert len({line.count("|") for line in lines[2:11]}) == 1
    assert lines[-1] == (
        "`fused` to the best single drafter, `model`: 0.900 [0.900, 0.900] over 20 pairs: not within 5 %"
    )


def test_no_speeds_where_one_sequence_differed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = IdentityCount(compared=6, identical=5, differences=["model: prompt 1: differs at output position 4"])
    store_of(tmp_path, [made_up_run(0, SPEEDS), made_up_run(1, SPEEDS, identity=identity)])
    assert main(["--report", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "file.jsonl, model: prompt 1: differs at output position 4" in printed
    assert "no speeds" in printed
    assert "200" not in printed and '"groups"' not in printed


def test_a_report_without_measurements_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", "--out", str(tmp_path / "absent")]) == 2
    assert "holds no measurements" in capsys.readouterr().err


def test_single_drafters_are_ours_and_neither_fused_nor_none() -> None:
    names = ["none", "ngram", "fused", "fused/a=1", "transformers_assisted", "my.module:Mine"]
    assert [name for name in names if is_single_drafter(name)] == ["ngram", "my.module:Mine"]
