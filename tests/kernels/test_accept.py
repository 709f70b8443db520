"""accept_block: hand cases, then random chains and trees against a brute-force walk."""

import random

from betoken.kernels.accept import accept_block


def run(
    blocks: list[tuple[list[int], list[int], list[int] | None]],
) -> list[tuple[list[int], int]]:
    """(path, next_id) per block of (target_ids, draft_ids, parents)."""
    return [accept_block(*block) for block in blocks]


def test_accepted_chains_by_hand() -> None:
    assert run(
        [
            ([5, 6, 9, 3], [5, 6, 7], None),  # recovered
            ([5, 6, 7, 3], [5, 6, 7], None),  # bonus
            ([8, 6, 7, 3], [5, 6, 7], None),  # refused at once: later agreement does not count
            ([4], [], None),  # K = 0: a plain step
            ([7, 7], [7], None),
        ]
    ) == [([0, 1], 9), ([0, 1, 2], 3), ([], 8), ([], 4), ([0], 7)]


def test_accepted_trees_by_hand() -> None:
    # Nodes:  0:5  1:6 (siblings)   2:7 under 0   3:7 under 1   4:8 under 3
    draft_ids, parents = [5, 6, 7, 7, 8], [-1, -1, 0, 1, 3]
    assert run([([6, 0, 7, 0, 8, 9], draft_ids, parents)]) == [([1, 3, 4], 9)]
    assert run([([5, 7, 0, 4, 0, 0], draft_ids, parents)]) == [([0, 2], 4)]
    assert run([([1, 7, 7, 7, 8, 9], draft_ids, parents)]) == [([], 1)]


def test_the_first_of_equal_siblings_is_accepted() -> None:
    assert run([([5, 9, 3, 0], [5, 5, 9], [-1, -1, 1])]) == [([0], 9)]


def test_a_chain_written_as_a_tree_is_accepted_alike() -> None:
    assert run([([5, 6, 9, 3], [5, 6, 7], [-1, 0, 1])]) == run([([5, 6, 9, 3], [5, 6, 7], None)])


def brute_force(target_ids: list[int], draft_ids: list[int], parents: list[int]) -> tuple[list[int], int]:
    """The longest root path whose every node equals the target's token at its parent; lowest indices win."""
    best: list[int] = []
    for leaf in range(len(draft_ids)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        agrees = all(draft_ids[node] == target_ids[parents[node] + 1] for node in path)
        if agrees and (len(path) > len(best) or (len(path) == len(best) and path < best)):
            best = path
    return best, target_ids[best[-1] + 1 if best else 0]


def unique_children(draft_ids: list[int], parents: list[int]) -> bool:
    return len(set(zip(draft_ids, parents, strict=True))) == len(draft_ids)


def test_random_trees_are_accepted_as_by_brute_force() -> None:
    rng = random.Random(0)
    lengths = []
    while len(lengths) < 400:
        size = rng.randrange(0, 12)
        parents = [rng.randrange(-1, i) for i in range(size)]
        draft_ids = [rng.randrange(3) for _ in range(size)]
        if not unique_children(draft_ids, parents):
            continue
        target_ids = [rng.randrange(3) for _ in range(size + 1)]
        path, next_id = brute_force(target_ids, draft_ids, parents)
        assert accept_block(target_ids, draft_ids, parents) == (path, next_id)
        lengths.append(len(path))
    assert max(lengths) >= 4
