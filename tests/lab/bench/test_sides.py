"""Sides as they are written on the command line."""

import pytest

from betoken.bench.sides import PLAIN_DECODING, Side, hosted_drafters, parse_side
from betoken.client import Speculation


def test_settings_of_a_side_follow_its_drafter() -> None:
    assert parse_side("model") == Side("model", "model")
    side = parse_side("ngram/max_branches=1/num_draft_tokens=8")
    assert side == Side("ngram/max_branches=1/num_draft_tokens=8", "ngram", {"max_branches": "1"}, 8)
    deep = parse_side("early_exit/--early-exit-layers=4/x=1")
    assert (deep.worker_options, deep.settings) == ((("--early-exit-layers", "4"),), {"x": "1"})
    assert parse_side("my.module:Mine/a=b=c").settings == {"a": "b=c"}


def test_the_attached_one_of_two_of_a_name_is_asked_for_by_that_name() -> None:
    side = parse_side("ngram@attached/max_branches=1")
    assert (side.drafter, side.is_attached, side.settings) == ("ngram", True, {"max_branches": "1"})
    assert side.speculation(4) == Speculation(
        drafter="ngram", drafter_settings={"max_branches": "1"}, num_draft_tokens=4
    )
    assert side.variant != parse_side("ngram/max_branches=1").variant
    with pytest.raises(ValueError, match=r"model@attached: must be among .*ngram@attached"):
        parse_side("model@attached")


def test_a_sides_own_draft_length_wins() -> None:
    assert parse_side("ngram/num_draft_tokens=8").speculation(5).num_draft_tokens == 8
    assert parse_side("ngram").speculation(5) == Speculation(drafter="ngram", num_draft_tokens=5)
    assert parse_side("ngram/a=1").speculation(None) == Speculation(drafter="ngram", drafter_settings={"a": "1"})
    assert PLAIN_DECODING.speculation(5) == Speculation(off=True)


@pytest.mark.parametrize(
    "text", ["ngram/max_branches", "ngram/=1", "ngram/a=", "ngram/num_draft_tokens=0", "ngram/num_draft_tokens=x"]
)
def test_an_unknown_setting_of_a_side_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_side(text)


def test_a_drafter_is_hosted_once_however_often_it_is_asked_for() -> None:
    sides = [PLAIN_DECODING, *map(parse_side, ["ngram", "model", "ngram/max_branches=1"])]
    assert hosted_drafters(sides) == ["ngram", "model"]
