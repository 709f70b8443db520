"""The drafter table's command line refuses what cannot run, before anything starts."""

import pytest

from betoken.bench.drafters_options import parse_options
from betoken.bench.matrix import DRAFTERS
from betoken.bench.sides import HOSTED
from betoken.cli.local_services import LocalServicesConfig, embedded_models

MODELS = ["--target", "t", "--draft", "d"]


def test_the_drafter_table_measures_every_drafter_that_can_be_hosted() -> None:
    options = parse_options([*MODELS, "--prompts", "a/x.jsonl", "--prompts", "a/y.jsonl"])
    assert {side.drafter for side in options.drafters} == set(DRAFTERS)
    assert set(options.hosted(HOSTED)) == set(DRAFTERS)
    assert [path.name for path in options.prompts] == ["x.jsonl", "y.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--target must be given"),
        (["--target", "t"], "--draft must be given"),
        (MODELS, "--prompts must be given"),
        ([*MODELS, "--prompts", "a/x.jsonl", "--prompts", "b/x.jsonl"], "kept by file name"),
        ([*MODELS, "--prompts", "x", "--drafters", "fused,ngram"], "two are needed"),
        ([*MODELS, "--prompts", "x", "--drafters", "fused,ngram,ngram/max_branches=1"], "two are needed"),
        ([*MODELS, "--prompts", "x", "--drafters", "fused/--a=1,ngram,model"], "with the same options"),
        ([*MODELS, "--prompts", "x", "--drafters", "ngram,ngram"], "each once"),
        ([*MODELS, "--prompts", "x", "--drafters", "ngram,none"], "none is what they are compared with"),
        ([*MODELS, "--prompts", "x", "--drafters", ","], "at least one"),
        ([*MODELS, "--prompts", "x", "--drafters", "ngram/max_branches"], "must be setting=value"),
        ([*MODELS, "--prompts", "x", "--repeats", "0"], "at least 1"),
        ([*MODELS, "--prompts", "x", "--drafters", "medusa"], "medusa: needs weights for this target: --medusa DIR"),
    ],
)
def test_bad_options_of_the_drafter_table_are_rejected_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert message in capsys.readouterr().err


def test_attached_drafters_of_the_embedded_target_have_the_weights_of_the_repository() -> None:
    folder = embedded_models()
    models = ["--target", str(folder / "target"), "--draft", "d"]
    options = parse_options([*models, "--prompts", "x", "--drafters", "medusa,eagle3,ngram"])
    assert options.weights == {name: str(folder / name) for name in ("medusa", "eagle3")}
    given = parse_options([*models, "--prompts", "x", "--drafters", "medusa", "--medusa", "heads"])
    assert given.weights == {"medusa": "heads"}


def test_sides_that_differ_in_worker_options_have_services_of_their_own() -> None:
    drafters = "early_exit,ngram,ngram/max_branches=1,early_exit/--early-exit-layers=4,staged/--model=target"
    options = parse_options([*MODELS, "--prompts", "x", "--drafters", drafters])
    plain, deep, large = map(options.services, options.variants)
    device = ["--device", "cpu"]
    assert (plain.drafters, plain.draft_options) == (["early_exit", "ngram"], device)
    assert (deep.drafters, deep.draft_options) == (["early_exit"], [*device, "--early-exit-layers", "4"])
    assert (large.drafters, large.draft_options) == (["staged"], [*device, "--model", "t"])
    replica = options_of_default_lookahead()
    assert replica.drafters == ["lookahead"] and list(replica.draft_options)[-2:] == ["--lookahead-model", "t"]


def test_an_attached_side_has_services_without_a_draft_worker() -> None:
    drafters = "model,ngram,ngram@attached,ngram@attached/max_branches=1,ngram@attached/--max-context=64"
    options = parse_options([*MODELS, "--prompts", "x", "--drafters", drafters])
    hosted, attached, longer = map(options.services, options.variants)
    assert (hosted.drafters, list(hosted.attached_drafters)) == (["model", "ngram"], [])
    assert (attached.drafters, list(attached.attached_drafters)) == ([], ["ngram"])
    assert list(longer.verify_options)[-2:] == ["--max-context", "64"] and "--max-context" not in longer.draft_options


def test_attached_drafters_are_given_their_weights() -> None:
    drafters = "ngram,ngram@attached,medusa,fused@attached,eagle3/--max-adapters=2"
    weights = ["--medusa", "a/heads", "--eagle3", "a/layer"]
    options = parse_options([*MODELS, "--prompts", "x", "--drafters", drafters, *weights])
    hosted, attached, apart = map(options.services, options.variants)
    assert "--medusa" not in (*hosted.verify_options, *hosted.draft_options)
    assert list(attached.attached_drafters) == ["ngram", "medusa", "fused"]
    assert list(attached.verify_options)[-2:] == ["--medusa", "a/heads"]
    assert list(apart.verify_options)[-4:] == ["--eagle3", "a/layer", "--max-adapters", "2"]
    assert options.decisive()["weights"] == {"medusa": "heads", "eagle3": "layer"}


def options_of_default_lookahead() -> LocalServicesConfig:
    options = parse_options([*MODELS, "--prompts", "x"])
    (variant,) = options.variants[1:]
    return options.services(variant)


def test_workers_take_the_longest_draft_asked_for() -> None:
    short = parse_options([*MODELS, "--prompts", "x", "--num-draft-tokens", "16"]).services(HOSTED)
    assert "--max-draft-tokens" not in (*short.verify_options, *short.draft_options)
    drafters = "ngram/num_draft_tokens=60,early_exit/--early-exit-layers=4"
    options = parse_options([*MODELS, "--prompts", "x", "--drafters", drafters])
    for services in map(options.services, options.variants):
        assert list(services.verify_options)[2:4] == ["--max-draft-tokens", "60"]
        assert list(services.draft_options)[2:4] == ["--max-draft-tokens", "60"]


def test_all_models_are_on_the_requested_device() -> None:
    options = parse_options([*MODELS, "--prompts", "x", "--device", "cuda:0"])
    for services in map(options.services, options.variants):
        assert list(services.verify_options) == ["--device", "cuda:0", "--kv-memory-fraction", "0.5"]
        assert list(services.draft_options)[:2] == ["--device", "cuda:0"]
    assert options.decisive() != parse_options([*MODELS, "--prompts", "x"]).decisive()


def test_a_report_of_the_drafter_table_needs_only_its_folder() -> None:
    assert parse_options(["--report", "--out", "somewhere"]).out.name == "somewhere"


def test_how_much_is_measured_is_not_what_decides_speeds() -> None:
    few = parse_options([*MODELS, "--prompts", "x", "--limit", "2", "--repeats", "3", "--minutes", "9"])
    many = parse_options([*MODELS, "--prompts", "x", "--prompts", "y"])
    assert few.decisive() == many.decisive()
    assert few.decisive() != parse_options([*MODELS, "--prompts", "x", "--verify-threads", "1"]).decisive()


def test_the_number_of_samples_decides_speeds_of_the_drafter_table() -> None:
    one, five = [parse_options([*MODELS, "--prompts", "x", *more]) for more in ([], ["--samples", "5"])]
    assert five.samples == 5 and one.decisive() != five.decisive()
    assert "samples" not in one.decisive(), "stores of earlier results lack it"
