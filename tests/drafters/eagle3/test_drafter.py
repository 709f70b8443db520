"""The drafter over pages, batches and results drafts what the literal reference does from the same states."""

import random
from collections import Counter

import pytest
import torch
from scipy import stats

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.drafter import DraftTerms
from betoken.drafters.eagle3.checkpoint import make_layer
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.features import FeatureSpan
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.page_table import PageTable
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from tests.drafters.eagle3.reference import LiteralEagle3
from tests.drafters.eagle3.tiny import FLAGS, tiny_layer, tiny_shape
from tests.drafters.rig import Rig
from tests.engine.tiny import save_tiny

STATES = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("target"), "llama")
    config = EngineConfig(
        model=path, dtype="float32", num_pages=64, compile="off", feature_layers=lambda num_layers: STATES
    )
    return load_runner(config)


class LayerRig(Rig):
    """A drafter over a tiny layer, and the target whose states it is reported."""

    def __init__(self, target, shape=None, num_pages=64, page_size=4, caching=True, max_rows=64, **settings):
        self.target = target
        self.layer = tiny_layer(shape or tiny_shape(hidden_size=64, state_layers=STATES))
        self.literal_weights = {name: tensor.clone() for name, tensor in self.layer.state_dict().items()}
        fits = TargetShape("tiny", vocab_size=101, hidden_size=64, num_layers=2)
        loaded = make_layer(self.layer.shape, dict(self.layer.state_dict()), fits)
        self.table = PageTable(num_pages, page_size, prefix_caching=caching)
        self.forward = LayerForward(loaded, target.parts, num_pages, page_size)
        pages = SharedPages(self.table, idle_grace_s=0.0)
        self.drafter = EagleDrafter(self.forward, pages, (0, 1, 2), 101, max_rows, EagleSettings(**settings))

    def literal(self, ids, first=0):
        shape = self.layer.shape
        reference = LiteralEagle3(
            self.literal_weights,
            self.target.parts.embed(torch.arange(101)),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.rms_norm_eps,
            theta=10000.0,
            flags=[flag for flag in FLAGS if getattr(shape, flag)],
        )
        reference.extend(self.states_of(ids)[first:-1], ids[first + 1 :])
        return reference


def ids_of(seed, length):
    return random.Random(seed).choices(range(1, 101), k=length)


def paths_of(draft_ids, parents):
    parents = range(-1, len(draft_ids) - 1) if parents is None else parents
    paths = []
    for token_id, parent in zip(draft_ids, parents, strict=True):
        paths.append((*paths[parent], token_id) if parent >= 0 else (token_id,))
    return paths


def assert_is_literal(rig, seq, drafted, num_nodes, branches, depth, first=0):
    draft_ids, parents, _ = rig.literal(seq.ids, first).tree(num_nodes, branches, depth)
    assert set(paths_of(drafted.draft_ids, drafted.parents)) == set(paths_of(draft_ids, parents))


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids="+".join)
@pytest.mark.parametrize("branches", [1, 3])
def test_eagle3_drafts_equal_the_literal_reference_after_every_verification(target, flags, branches):
    shape = tiny_shape(hidden_size=64, state_layers=STATES, **dict.fromkeys(flags, True))
    rig = LayerRig(target, shape, max_branches=branches, max_depth=4)
    seq = rig.open(ids_of(1, 9), takes_trees=True)
    rig.send([seq])
    for accepted in ([7], [3, 4, 5, 6], [9, 9]):
        (drafted,) = rig.draft([seq], 7)
        assert_is_literal(rig, seq, drafted, 7, branches, 4)
        rig.commit(seq, accepted)
    (drafted,) = rig.draft([seq], 7)
    assert_is_literal(rig, seq, drafted, 7, branches, 4)


def test_a_compiled_layer_drafts_the_literal_tree(target, tmp_path):
    rig = LayerRig(target, max_branches=3, max_depth=4)
    rig.forward.compile(tmp_path)
    assert rig.forward.is_compiled
    seq = rig.open(ids_of(1, 9), takes_trees=True)
    rig.send([seq])
    (drafted,) = rig.draft([seq], 7)
    assert_is_literal(rig, seq, drafted, 7, 3, 4)


def test_sequences_of_one_batch_draft_what_they_would_alone(target):
    rig = LayerRig(target, max_branches=3, max_depth=4, max_rows=16)
    seqs = [rig.open(ids_of(seed, 5 + 9 * seed), takes_trees=True) for seed in range(3)]
    rig.send(seqs)
    for seq, drafted in zip(seqs, rig.draft(seqs, 7), strict=True):
        assert_is_literal(rig, seq, drafted, 7, 3, 4)


def test_features_of_a_long_prompt_are_read_chunk_by_chunk(target):
    rig = LayerRig(target, max_branches=2, max_depth=3, num_pages=96, max_rows=48)
    seq = rig.open(ids_of(5, 200), takes_trees=True)
    for first in range(0, 199, 70):
        rig.send([seq], first, min(first + 70, 199))
        assert rig.drafter.has_work == (first + 70 <= 199)
        assert rig.drafter.step() == []
    (drafted,) = rig.draft([seq], 5)
    assert_is_literal(rig, seq, drafted, 5, 2, 3)


def test_eagle3_reads_few_tokens_at_once_in_the_first_draft_after_a_pause(target, monkeypatch):
    rig = LayerRig(target, max_branches=2, max_depth=3, num_pages=96, max_rows=80)
    seq = rig.open(ids_of(5, 200), takes_trees=True)
    num_rows, run = [], EagleDrafter._pass

    def counted(drafter, parts):
        num_rows.append(sum(len(part.segment.ids) for part in parts))
        return run(drafter, parts)

    monkeypatch.setattr(EagleDrafter, "_pass", counted)
    for first in range(0, 199, 5):  # no draft is requested
        rig.send([seq], first, min(first + 5, 199))
        if rig.drafter.has_work:
            assert rig.drafter.step() == []
    (drafted,) = rig.draft([seq], 5)
    assert max(num_rows) <= 64 + 5
    assert_is_literal(rig, seq, drafted, 5, 2, 3)


def test_without_features_of_the_last_tokens_eagle3_does_not_draft(target):
    rig = LayerRig(target)
    seq = rig.open(ids_of(6, 12), takes_trees=True)
    (drafted,) = rig.draft([seq], 5)
    assert drafted.draft_ids == []
    rig.send([seq], 0, 10)
    (drafted,) = rig.draft([seq], 5)
    assert drafted.draft_ids == []


def test_a_first_draft_that_tokens_depend_on_is_empty_whenever_it_is_requested(target):
    """The prompt may be computed by then or not."""
    rig = LayerRig(target)
    seq = rig.open(ids_of(35, 9), draft_affects_output=True)
    assert rig.draft([seq])[0].draft_ids == []
    rig.send([seq])
    assert rig.draft([seq])[0].draft_ids == []
    rig.commit(seq, [5])
    assert rig.draft([seq])[0].draft_ids


def test_an_unused_draft_is_made_again(target):
    rig = LayerRig(target, max_branches=2, max_depth=3)
    seq = rig.open(ids_of(7, 12), takes_trees=True)
    rig.send([seq])
    first, again = (rig.draft([seq], 5)[0] for _ in range(2))
    assert first.draft_ids == again.draft_ids and first.parents == again.parents


def test_features_that_are_reported_again_change_no_draft(target):
    """As after a preemption."""
    rig = LayerRig(target, max_branches=2, max_depth=3)
    seq = rig.open(ids_of(8, 30), takes_trees=True)
    rig.send([seq])
    rig.draft([seq], 5)
    rig.send([seq], 16)
    (drafted,) = rig.draft([seq], 5)
    assert_is_literal(rig, seq, drafted, 5, 2, 3)


def test_features_may_be_missing_at_the_beginning(target):
    """The target took over pages that others had computed: the draft is that of the text that is known."""
    rig = LayerRig(target, max_branches=2, max_depth=3)
    seq = rig.open(ids_of(9, 30), takes_trees=True)
    rig.send([seq], 12)
    (drafted,) = rig.draft([seq], 5)
    assert_is_literal(rig, seq, drafted, 5, 2, 3, first=12)


def test_a_text_with_a_cached_prefix_takes_over_its_features(target):
    rig = LayerRig(target, max_branches=2, max_depth=3)
    begin = ids_of(10, 24)
    first = rig.open([*begin, 5, 6], takes_trees=True)
    rig.send([first])
    rig.draft([first], 5)
    rig.drafter.close(first)
    second = rig.open([*begin, 7, 8, 9], takes_trees=True)
    rig.send([second], 20)  # as far as the target's own pages reach
    (drafted,) = rig.draft([second], 5)
    assert_is_literal(rig, second, drafted, 5, 2, 3)
    assert rig.table.num_free < rig.table.num_pages


def test_a_text_without_a_cached_prefix_takes_over_no_features(target):
    """The first row is of two tokens: the same ones after another first token are another text."""
    rig = LayerRig(target, max_branches=2, max_depth=3)
    rest = ids_of(11, 24)
    first = rig.open([1, *rest], takes_trees=True)
    rig.send([first])
    rig.draft([first], 5)
    rig.drafter.close(first)
    second = rig.open([2, *rest], takes_trees=True)
    rig.send([second])
    (drafted,) = rig.draft([second], 5)
    assert_is_literal(rig, second, drafted, 5, 2, 3)


def test_a_gap_between_known_and_reported_features_is_skipped(target):
    rig = LayerRig(target, max_branches=2, max_depth=3)
    begin = ids_of(12, 40)
    first = rig.open(begin[:14], takes_trees=True)
    rig.send([first])
    rig.draft([first], 5)
    rig.drafter.close(first)
    second = rig.open(begin, takes_trees=True)
    rig.send([second], 20)
    (drafted,) = rig.draft([second], 5)
    assert len(drafted.draft_ids) == 5
    rig.commit(second, [3, 4])
    assert len(rig.draft([second], 5)[0].draft_ids) == 5
    rig.drafter.close(second)
    third = rig.open(begin, takes_trees=True)  # nothing of the text with the hole was left for it
    rig.send([third])
    (drafted,) = rig.draft([third], 5)
    assert_is_literal(rig, third, drafted, 5, 2, 3)


def test_a_sequence_without_pages_goes_without_a_draft_and_comes_back(target):
    rig = LayerRig(target, num_pages=9, max_branches=1, max_depth=3, caching=False)  # 36 slots
    old, young = (rig.open(ids_of(seed, 20), takes_trees=True) for seed in (13, 14))
    rig.send([old, young])
    drafted = rig.draft([old, young], 3)
    assert [len(answer.draft_ids) for answer in drafted] == [3, 0]
    rig.drafter.close(old)
    rig.commit(young, [5, 6])
    (answer,) = rig.draft([young], 3)
    assert_is_literal(rig, young, answer, 3, 1, 3, first=19)


def test_an_old_sequence_takes_the_pages_of_a_young_idle_one(target):
    rig = LayerRig(target, num_pages=9, max_branches=1, max_depth=3, caching=False)
    old, young = (rig.open(ids_of(seed, 20), takes_trees=True) for seed in (15, 16))
    rig.send([young])
    assert len(rig.draft([young], 3)[0].draft_ids) == 3
    rig.send([old])
    (answer,) = rig.draft([old], 3)
    assert_is_literal(rig, old, answer, 3, 1, 3)


def test_closing_a_sequence_frees_all_pages_of_eagle3(target):
    rig = LayerRig(target)
    seq = rig.open(ids_of(17, 30), takes_trees=True)
    rig.send([seq])
    rig.draft([seq], 5)
    rig.drafter.close(seq)
    assert rig.table.num_free == rig.table.num_pages
    assert not rig.drafter.has_work


def test_a_failed_forward_leaves_the_page_accounting_right(target, monkeypatch):
    rig = LayerRig(target)
    seq = rig.open(ids_of(18, 30), takes_trees=True)
    rig.send([seq])
    monkeypatch.setattr(rig.drafter, "_forward", lambda batch, hidden: 1 / 0)
    rig.drafter.request(seq, 5)
    with pytest.raises(ZeroDivisionError):
        rig.drafter.step()
    rig.drafter.check_integrity()
    rig.drafter.close(seq)
    assert rig.table.num_free == rig.table.num_pages


def test_no_draft_token_follows_an_end_id(target):
    rig = LayerRig(target, max_branches=1, max_depth=6)
    seq = rig.open(ids_of(19, 12))
    rig.send([seq])
    ids = rig.draft([seq], 6)[0].draft_ids
    params = SamplingParams(temperature=0.0, eos_token_ids=(ids[2],))
    ending = rig.open(ids_of(19, 12), params)
    rig.send([ending])
    assert rig.draft([ending], 6)[0].draft_ids == ids[: ids.index(ids[2]) + 1]


def test_eagle3_drafts_chains_if_the_target_supports_no_trees(target):
    rig = LayerRig(target, max_branches=4, max_depth=4)
    seq = rig.open(ids_of(20, 12), takes_trees=False)
    rig.send([seq])
    (drafted,) = rig.draft([seq], 4)
    assert drafted.parents is None and len(drafted.draft_ids) == 4


@pytest.mark.parametrize("branches", [1, 3])
def test_under_terms_no_draft_token_is_proposed_that_does_not_pay_off(target, branches):
    rig = LayerRig(target, max_branches=branches, max_depth=6)
    seq = rig.open(ids_of(21, 12), takes_trees=True)
    rig.send([seq])
    scored = rig.literal(seq.ids).tree(30, branches, 6)
    probs = dict(zip(paths_of(scored[0], scored[1]), torch.tensor(scored[2]).exp().tolist(), strict=True))
    price = sorted(probs.values())[-3] - 1e-6
    seq.terms = DraftTerms(30, price, min_gain=-1.0)
    (drafted,) = rig.draft([seq], 1)
    assert set(paths_of(drafted.draft_ids, drafted.parents)) == {path for path in probs if probs[path] >= price}
    seq.terms = DraftTerms(30, 0.999)
    assert rig.draft([seq], 1)[0].draft_ids == []


def test_under_terms_no_forward_is_run_that_does_not_pay_off(target):
    rig = LayerRig(target, max_branches=1, max_depth=6)
    seq = rig.open(ids_of(21, 12), takes_trees=True)
    rig.send([seq])
    seq.terms = DraftTerms(6, 0.0)
    assert len(rig.draft([seq], 6)[0].draft_ids) == 6
    rig.drafter._price.add_pass(10**9)
    rig.drafter._price.begin_round(0)
    rig.drafter._price.add_tokens(1000)
    rig.drafter._price.begin_round(10**9)
    assert len(rig.draft([seq], 6)[0].draft_ids) == 1
    seq.terms = None
    assert len(rig.draft([seq], 6)[0].draft_ids) == 6


def test_accepted_tokens_calibrate_draft_probabilities(target):
    rig = LayerRig(target, max_branches=1, max_depth=4)
    seq = rig.open(ids_of(22, 12))
    rig.send([seq])
    before = rig.drafter._calibration.exponent
    rig.commit(seq, [*rig.draft([seq], 4)[0].draft_ids, 7])
    assert rig.drafter._calibration.exponent < before


def test_eagle3_settings_of_a_sequence_are_read_and_rejected_by_name(target):
    rig = LayerRig(target, max_branches=1, max_depth=6)
    seq = rig.open(ids_of(23, 12), takes_trees=True, settings={"max_branches": "3", "max_depth": "2"})
    rig.send([seq])
    (drafted,) = rig.draft([seq], 9)
    assert_is_literal(rig, seq, drafted, 9, 3, 2)
    with pytest.raises(InvalidArgumentError, match="max_branches"):
        rig.open(ids_of(23, 12), settings={"max_branches": "17"})
    with pytest.raises(InvalidArgumentError, match="must be one of max_branches, max_depth"):
        rig.open(ids_of(23, 12), settings={"depth": "3"})


SAMPLED = SamplingParams(temperature=0.9, seed=5)


def likelihoods(rig, ids, params, first=0):
    """Adjusted [1, V] scores of the literal reference after the text, -inf where the layer knows no id."""
    log_probs = rig.literal(ids, first).last[1]
    scores = torch.full((1, 101), -torch.inf)
    scores[0, torch.arange(40) + rig.literal_weights["d2t"]] = log_probs
    return scores


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 5}, {"top_p": 0.6}, {"logit_bias": tuple((token_id, 3.0) for token_id in range(50))}]
)
def test_under_sampling_the_first_draft_token_is_the_targets_choice_of_the_same_scores(target, fields):
    """The noise is the target's, by its own ids: equal scores are accepted in any case."""
    rig = LayerRig(target, max_branches=3, max_depth=1)
    for seed in range(20):
        params = SamplingParams(temperature=0.9, seed=seed, **fields)
        seq = rig.open(ids_of(seed, 9), params, takes_trees=True)
        rig.send([seq])
        (drafted,) = rig.draft([seq], 3)
        group = SampleGroup(params, seq.prompt_ids, seq.output_ids, ())
        expected = choose_tokens(likelihoods(rig, seq.ids, params), [group]).token_ids
        assert drafted.draft_ids[0] == expected[0]
        assert not drafted.draft_probs


def test_for_rejection_draft_tokens_come_with_their_distributions(target):
    rig = LayerRig(target, max_branches=3, max_depth=3)
    seq = rig.open(ids_of(30, 8), SAMPLED, [5], wants_probs=True, draft_affects_output=True)
    rig.send([seq])
    (drafted,) = rig.draft([seq], 3)
    assert drafted.parents is None and len(drafted.draft_probs) == len(drafted.draft_ids) == 3
    shares = (likelihoods(rig, seq.ids, SAMPLED)[0] / 0.9).softmax(-1)
    sparse = drafted.draft_probs[0]
    assert len(sparse.token_ids) == 40 and drafted.draft_ids[0] in sparse.token_ids
    for token_id, prob in zip(sparse.token_ids, sparse.probs, strict=True):
        assert prob == pytest.approx(shares[token_id].item(), rel=1e-3, abs=1e-6)


NUM_AT_ONCE = 6
"""Sequences that draft together."""


def test_draft_tokens_for_rejection_follow_their_reported_distributions(target):
    rig = LayerRig(target, max_branches=1, max_depth=1)
    counts, num_samples = Counter(), 1500
    for start in range(0, num_samples, NUM_AT_ONCE):
        sequences = []
        for seed in range(start, start + NUM_AT_ONCE):
            params = SamplingParams(temperature=0.9, top_k=8, seed=seed)
            seq = rig.open(ids_of(31, 8), params, [5], wants_probs=True, draft_affects_output=True)
            if seed == 0:
                rig.send([seq])
                rows = rig.states_of(seq.ids)[:-1]
            else:
                rig.drafter.observe([FeatureSpan(seq, 0, 0, 8)], rows)
            rig.drafter.request(seq, 1)
            sequences.append(seq)
        answers = []
        while len(answers) < NUM_AT_ONCE:
            answers += rig.drafter.step()
        for drafted in answers:
            counts[drafted.draft_ids[0]] += 1
        for seq in sequences:
            rig.drafter.close(seq)
    probs = dict(zip(drafted.draft_probs[0].token_ids, drafted.draft_probs[0].probs, strict=True))
    assert counts.keys() <= probs.keys()
    kept = [token_id for token_id in probs if probs[token_id] * num_samples >= 5]
    observed = [counts[token_id] for token_id in kept]
    expected = [probs[token_id] for token_id in kept]
    observed.append(num_samples - sum(observed))
    expected.append(max(1e-9, 1.0 - sum(expected)))
    if expected[-1] * num_samples < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    expected = [share * num_samples / sum(expected) for share in expected]
    assert stats.chisquare(observed, expected).pvalue > 1e-3
