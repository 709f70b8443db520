"""Trees of heads' guesses equal the paper's, written literally; grown ones hold the best of all paths."""

import itertools
import math
import random

import pytest

from betoken.drafters.medusa.choices import Branches, ChoiceTree, parse_paths
from betoken.drafters.medusa.tree import Grown, Guesses, grow

TOPK = 10


def random_guesses(rng: random.Random, num_heads: int, num_top: int = TOPK) -> list[Guesses]:
    """Distinct ids, and shares that add up to less than one."""
    guesses = []
    for _ in range(num_heads):
        shares = sorted((rng.random() for _ in range(num_top)), reverse=True)
        ids = rng.sample(range(1000), num_top)
        guesses.append(Guesses(ids, [math.log(share / (sum(shares) + 0.1)) for share in shares]))
    return guesses


def paths_of(grown: Grown) -> list[tuple[int, ...]]:
    """The ids from the root to every node."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(grown.draft_ids, grown.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    assert len(set(paths)) == len(paths)
    return paths


def literal_tree(choices: list[list[int]], guesses: list[Guesses]) -> list[tuple[int, ...]]:
    """The paper's tree: nodes are sorted by length, then path; a node of depth d and rank r is entry
    r + TOPK * (d - 1) + 1 of [root, ten of head 1, ten of head 2, ...]."""
    root = -7
    candidates = [root, *(token_id for head in guesses for token_id in head.token_ids)]
    ordered = sorted(choices, key=lambda path: (len(path), path))
    tree_indices = [0, *(path[-1] + TOPK * (len(path) - 1) + 1 for path in ordered)]
    tree = [candidates[index] for index in tree_indices]
    retrieved = []
    for path in ordered:
        places = [1 + ordered.index(path[: length + 1]) for length in range(len(path))]
        retrieved.append(tuple(tree[place] for place in places))
    return retrieved


def everything(guesses: list[Guesses], choices: Branches | ChoiceTree, **settings: object) -> Grown:
    options = {"num_nodes": 10**6, "min_log_score": -math.inf, "max_depth": 99} | settings
    return grow(guesses, choices, **options)  # type: ignore[arg-type]


def test_the_named_medusa_tree_is_the_papers() -> None:
    paths = parse_paths("mc_sim_7b_63")
    assert paths is not None and len(paths) == 63 and max(map(len, paths)) == 4
    assert [list(path) for path in paths[:3]] == [[0], [1], [2]] and (0, 0, 0, 1) in paths and (9, 0) in paths
    guesses = random_guesses(random.Random(1), 4)
    grown = everything(guesses, ChoiceTree(paths))
    assert sorted(paths_of(grown)) == sorted(literal_tree([list(path) for path in paths], guesses))


@pytest.mark.parametrize("seed", range(20))
def test_given_paths_make_the_papers_medusa_tree(seed: int) -> None:
    rng = random.Random(seed)
    paths: list[list[int]] = [[]]
    for _ in range(30):
        parent = rng.choice([path for path in paths if len(path) < 4])
        if (path := [*parent, rng.randrange(TOPK)]) not in paths:
            paths.append(path)
    text = str(rng.sample(paths[1:], len(paths) - 1))
    parsed = parse_paths(text)
    assert parsed is not None
    guesses = random_guesses(rng, 4)
    assert sorted(paths_of(everything(guesses, ChoiceTree(parsed)))) == sorted(literal_tree(paths[1:], guesses))


@pytest.mark.parametrize("seed", range(20))
def test_grown_trees_are_the_best_of_all_paths_and_of_those_that_choices_allow(seed: int) -> None:
    rng = random.Random(seed)
    guesses = random_guesses(rng, 3, num_top=4)
    ranks = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    scores = {path: sum(guesses[d].log_scores[rank] for d, rank in enumerate(path)) for path in ranks}
    ids = {path: tuple(guesses[d].token_ids[rank] for d, rank in enumerate(path)) for path in ranks}
    allowed = [path for path in ranks if all(rank < 3 for rank in path)]
    for num_nodes in (1, 2, 7, 30, 200):
        for choices, among in ((Branches(4), ranks), (Branches(3), allowed), (ChoiceTree(allowed), allowed)):
            best = sorted(among, key=lambda path: -scores[path])[:num_nodes]
            grown = everything(guesses, choices, num_nodes=num_nodes)
            assert [ids[path] for path in best] == paths_of(grown)
            assert grown.log_scores == pytest.approx([scores[path] for path in best])
            assert grown.ranks == [path[-1] for path in best]
    price = sorted(scores.values())[-9]
    assert len(everything(guesses, Branches(4), min_log_score=price).draft_ids) == 9
    assert len(everything(guesses, Branches(4), min_log_score=1.0).draft_ids) == 1, "the first is always tried"
    assert max(map(len, paths_of(everything(guesses, Branches(4), max_depth=2)))) == 2


def test_a_medusa_tree_with_one_branch_is_a_chain_and_no_node_follows_an_end_id() -> None:
    guesses = [Guesses([5, 6], [-0.1, -2.0]), Guesses([7, 8], [-0.1, -2.0]), Guesses([9, 4], [-0.1, -2.0])]
    chain = everything(guesses, Branches(1))
    assert (chain.draft_ids, chain.parents) == ([5, 7, 9], [-1, 0, 1])
    assert everything(guesses, Branches(1), end_ids=(7,)).draft_ids == [5, 7]
    masked = [Guesses([5, 0], [-0.1, -math.inf])]
    assert everything(masked, Branches(2)).draft_ids == [5]
    assert everything([], Branches(2)).draft_ids == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mc_sim", "must be auto, mc_sim_7b_63, or a JSON list"),
        ("[]", "1 to 512 paths"),
        ("[[]]", "1 to 32 ranks"),
        ("[[64]]", "each 0 to 63"),
        ("[[true]]", "each 0 to 63"),
        ("[[-1]]", "each 0 to 63"),
        ("[[0.5]]", "each 0 to 63"),
        ("[[0], [1, 0]]", r"must hold \[1\] too"),
        ("[" * 5000, "JSON list"),
        ("[[0]" + ", [0]" * 9000 + "]", "JSON list"),
    ],
)
def test_invalid_texts_of_a_medusa_tree_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_paths(text)
