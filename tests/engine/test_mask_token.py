"""The mask token of a PARD checkpoint is read from config.json, and a wrong one is refused by field and value."""

import pytest

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.mask_token import mask_token_of


@pytest.mark.parametrize(
    ("config", "mask_token_id"),
    [
        ({}, None),
        ({"pard_token": None}, None),
        ({"spd_type": "other"}, None),
        ({"pard_token": 0}, 0),
        ({"pard_token": 100, "spd_type": "pard"}, 100),
        ({"pard_token": 7, "spd_type": "pard2", "pard2": True, "pard2_target_layers": [2, 16, 29]}, 7),
    ],
)
def test_the_mask_token_of_a_checkpoint_is_that_of_its_config(config, mask_token_id) -> None:
    assert mask_token_of(config, 101) == mask_token_id


@pytest.mark.parametrize("token_id", [-1, 101, 2**70, "5", 5.0, True, [5], {}])
def test_a_pard_token_outside_the_vocabulary_is_refused_by_value_and_limit(token_id) -> None:
    with pytest.raises(ModelRefusedError, match="pard_token: .* is not an integer in") as refused:
        mask_token_of({"pard_token": token_id}, 101)
    assert repr(token_id) in str(refused.value) and "[0, 101)" in str(refused.value)


@pytest.mark.parametrize("config", [{"spd_type": "pard"}, {"spd_type": "pard2"}, {"pard2": True}])
def test_a_pard_checkpoint_without_a_pard_token_is_refused(config) -> None:
    with pytest.raises(ModelRefusedError, match="pard_token: is missing"):
        mask_token_of(config, 101)


@pytest.mark.parametrize("kind", ["pard3", 2, ""])
def test_an_unknown_spd_type_of_a_pard_checkpoint_is_refused(kind) -> None:
    with pytest.raises(ModelRefusedError, match=f"spd_type: {kind!r} is not one of pard, pard2"):
        mask_token_of({"pard_token": 5, "spd_type": kind}, 101)
