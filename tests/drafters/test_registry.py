"""Which drafters are hosted where nobody names them, and which model each uses."""

from types import SimpleNamespace

import pytest

from betoken.drafters.registry import SPECS, check_drafters, usual_drafters

MODELS = ("model", "early_exit_model", "lookahead_model")


def models(**given: str) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(MODELS, "") | given)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("ngram",)),
        ({"early_exit_model": "t", "lookahead_model": "l"}, ("ngram",)),
        ({"model": "d"}, ("fused", "model", "ngram", "staged")),
    ],
)
def test_the_usual_drafters_are_those_that_the_models_suffice_for(
    given: dict[str, str], names: tuple[str, ...]
) -> None:
    usual = usual_drafters(models(**given))
    assert usual == names
    check_drafters(usual, models(**given))  # raises where they cannot be hosted


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, None),
        ({"model": "d", "early_exit_model": "t"}, "model"),
        ({"early_exit_model": "t"}, "early_exit_model"),
        ({"model": "d", "early_exit_model": "t", "lookahead_model": "l"}, "lookahead_model"),
    ],
)
def test_lookahead_iterates_its_own_model_else_the_draft_model_else_the_target(
    given: dict[str, str], used: str | None
) -> None:
    assert SPECS["lookahead"].used(models(**given)) == used
