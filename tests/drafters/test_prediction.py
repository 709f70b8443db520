"""A prediction is followed while the output says the same, and found again where the output went another way."""

import random

import pytest

from betoken.common.economy.terms import DraftTerms
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.ngram.prediction import Prediction
from betoken.engine.sampling import SamplingParams

PROMPT = [1, 2, 3]


def sequence_of(predicted_ids, output_ids=(), takes_trees=True, prompt_ids=PROMPT):
    params = SamplingParams(eos_token_ids=(0,))
    return DraftSequence(
        (1, 1), params, prompt_ids, list(output_ids), 10_000, takes_trees=takes_trees, predicted_ids=predicted_ids
    )


def longest_accepted(drafted, truth):
    """Tokens of the path that the target agrees with."""
    parents = drafted.parents if drafted.parents is not None else range(-1, len(drafted.draft_ids) - 1)
    node, num_accepted = -1, 0
    for index, (draft_id, parent) in enumerate(zip(drafted.draft_ids, parents, strict=True)):
        if parent == node and num_accepted < len(truth) and draft_id == truth[num_accepted]:
            node, num_accepted = index, num_accepted + 1
    return num_accepted


def rounds_of(truth, predicted_ids, num_tokens=8, **options):
    """Rounds until all of `truth` is there, and how many tokens came out of the prediction."""
    drafter, sequence = NgramDrafter(), sequence_of(predicted_ids, **options)
    drafter.open(sequence)
    num_rounds = num_predicted = 0
    while len(sequence.output_ids) < len(truth):
        rest = truth[len(sequence.output_ids) :]
        drafter.request(sequence, min(num_tokens, len(rest)))
        (drafted,) = drafter.step()
        drafted.check()
        num_accepted = min(longest_accepted(drafted, rest), len(rest) - 1)
        num_predicted += num_accepted * (drafted.sources == ["prediction"])
        ids = rest[: num_accepted + 1]
        sequence.ids.extend(ids)
        sequence.output_ids.extend(ids)
        drafter.commit(sequence, ids)
        num_rounds += 1
    return num_rounds, num_predicted


def edited(text, num_edits, rng):
    """`text` with so many places changed: replaced, left out, put in."""
    text, size = list(text), len(text) // (num_edits + 1)
    for number in range(num_edits, 0, -1):
        at, length = number * size, rng.randrange(1, 6)
        new = [1000 + rng.randrange(50) for _ in range(rng.randrange(4))]
        text[at : at + length] = new
    return text


@pytest.mark.parametrize("takes_trees", [True, False])
@pytest.mark.parametrize("num_edits", [0, 1, 3, 8])
def test_a_prediction_with_edits_takes_about_a_round_a_draft_and_few_for_each_edit(num_edits, takes_trees):
    rng = random.Random(num_edits)
    for _ in range(20):
        predicted = [rng.randrange(5, 60) for _ in range(400)]
        truth = edited(predicted, num_edits, rng)
        num_rounds, num_predicted = rounds_of(truth, predicted, takes_trees=takes_trees)
        assert num_rounds <= len(truth) / 9 + 9 * num_edits + 2
        assert num_predicted >= len(truth) - num_rounds - 12 * num_edits


def test_a_prediction_is_followed_from_the_first_token_and_after_other_words_of_the_model():
    predicted = list(range(10, 60))
    drafter, sequence = NgramDrafter(), sequence_of(predicted)
    drafter.open(sequence)
    drafter.request(sequence, 5)
    (drafted,) = drafter.step()
    assert (drafted.draft_ids, drafted.parents, drafted.sources) == (predicted[:5], None, ["prediction"])
    num_rounds, _ = rounds_of([*range(900, 912), *predicted], predicted)
    assert num_rounds <= 12 + 2 + len(predicted) / 9 + 1


def test_a_sequence_resumed_from_ids_continues_in_its_prediction():
    predicted, rng = [*range(100, 160)], random.Random(1)
    truth = edited(predicted, 3, rng)
    for num_kept in range(len(truth)):
        whole, resumed = Prediction(predicted), Prediction(predicted)
        for token_id in truth[:num_kept]:
            whole.follow([token_id])
        resumed.follow(truth[:num_kept])
        if whole._length and resumed._length:
            assert whole.places[0].position == resumed.places[0].position
        drafter, sequence = NgramDrafter(), sequence_of(predicted, truth[:num_kept])
        drafter.open(sequence)
        drafter.request(sequence, 4)
        assert len(drafter.step()) == 1


def test_a_longer_match_of_the_text_itself_precedes_the_prediction():
    text = [*range(20, 60)]
    drafter, sequence = NgramDrafter(), sequence_of([7, 8, 9], prompt_ids=[*text, *text[:20]])
    drafter.open(sequence)
    drafter.request(sequence, 4)
    (drafted,) = drafter.step()
    assert drafted.draft_ids == text[20:24] and drafted.sources == ["ngram"]


def test_the_end_of_a_prediction_is_its_end():
    drafter, sequence = NgramDrafter(), sequence_of([70, 71], output_ids=[70, 71])
    drafter.open(sequence)
    drafter.request(sequence, 4)
    assert drafter.step()[0].draft_ids == []


def test_after_a_difference_from_the_prediction_a_tree_of_continuations_is_drafted():
    predicted = [*range(100, 140)]
    drafter, sequence = NgramDrafter(), sequence_of(predicted, output_ids=[*predicted[:10], 7])
    drafter.open(sequence)
    drafter.request(sequence, 8)
    (drafted,) = drafter.step()
    roots = {token for token, parent in zip(drafted.draft_ids, drafted.parents, strict=True) if parent == -1}
    assert roots == {110, 111}, "what was replaced is over, or what came between is"


def test_under_terms_a_draft_of_a_prediction_is_as_long_as_pays_off():
    predicted = [*range(100, 400)]

    def size(row_price):
        drafter, sequence = NgramDrafter(), sequence_of(predicted, output_ids=predicted[:20])
        drafter.open(sequence)
        sequence.terms = DraftTerms(64, row_price)
        drafter.request(sequence, 4)
        return len(drafter.step()[0].draft_ids)

    sizes = [size(price) for price in (0.0, 0.4, 0.6, 0.9)]
    assert sizes[0] == 64 and sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[3]


def test_predictions_that_prove_wrong_are_drafted_from_less():
    rng, drafter = random.Random(0), NgramDrafter()
    sizes = []
    for number in range(200):
        sequence = sequence_of([rng.randrange(5, 900) for _ in range(50)])
        sequence.key = (1, number)
        drafter.open(sequence)
        sequence.terms = DraftTerms(16, 0.3)
        drafter.request(sequence, 4)
        sizes.append(len(drafter.step()[0].draft_ids))
        sequence.ids.append(3)
        sequence.output_ids.append(3)
        drafter.commit(sequence, [3])
        drafter.close(sequence)
    assert sum(sizes[-20:]) < sum(sizes[:20]) / 4
