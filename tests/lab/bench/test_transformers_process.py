"""Arguments that the baseline process passes to `generate()`."""

from types import SimpleNamespace

import pytest

from betoken.bench.transformers_process import Models


@pytest.mark.parametrize(
    ("own", "template", "ignore_eos", "expected"),
    [
        (0, "chat", False, {"pad_token_id": 0, "eos_token_id": [0, 2]}),
        ([3, 2], "chat", False, {"pad_token_id": 3, "eos_token_id": [3, 2]}),
        (0, None, False, {"pad_token_id": 0, "eos_token_id": [0]}),
        (None, None, False, {"pad_token_id": 0}),
        ([3, 2], "chat", True, {"pad_token_id": 3, "eos_token_id": [99]}),
    ],
)
def test_answers_of_the_baseline_end_where_ours_do(own, template, ignore_eos, expected) -> None:
    target = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own), config=SimpleNamespace(vocab_size=99))
    models = Models(target, None, SimpleNamespace(chat_template=template, eos_token_id=2))
    assert models._end({"ignore_eos": ignore_eos}) == expected
