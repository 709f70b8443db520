"""Trees through whole models: every node's logits have the bits of its path run as a chain."""

import random
from pathlib import Path

import pytest
import torch

from betoken.common.tree import node_depths
from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath, place_nodes
from tests.engine.tiny import save_tiny


def load(directory: str, dtype: str, **settings: object) -> ModelRunner:
    options = {"num_pages": 128, "compile": "off", "self_check": False} | settings
    return load_runner(EngineConfig(directory, dtype=dtype, **options))  # type: ignore[arg-type]


def path_of(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def chain_logits(runner: ModelRunner, ids: list[int], num_logits: int) -> torch.Tensor:
    page_ids, _ = runner.page_table.allocate(ids)
    logits = runner.forward([Segment(page_ids, 0, ids, num_logits)]).logits.clone()
    runner.page_table.release(page_ids)
    return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "lfm2"])
def test_a_tree_node_has_the_logits_of_its_path(family: str, dtype: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, family), dtype)
    rng = random.Random(5)
    prompt = [rng.randrange(101) for _ in range(21)]
    parents = [max(-1, node - 1 - rng.randrange(4)) for node in range(17)]
    drafts = [rng.randrange(101) for _ in parents]
    other = [rng.randrange(101) for _ in range(9)]
    pages, _ = runner.page_table.allocate(range(len(prompt) + len(parents)))
    other_pages, _ = runner.page_table.allocate(other)
    runner.forward([Segment(pages, 0, prompt[:15], 0)])
    segments = [
        Segment(other_pages, 0, other, 1),
        Segment(pages, 15, prompt[15:] + drafts, len(drafts) + 1, parents),
    ]
    logits = runner.forward(segments).logits[1:]
    assert torch.equal(logits[:1], chain_logits(runner, prompt, 1))
    for node in range(len(parents)):
        path = path_of(parents, node)
        expected = chain_logits(runner, prompt + [drafts[i] for i in path], 1)
        assert torch.equal(logits[node + 1 : node + 2], expected)


def test_a_tree_may_grow_over_forwards(tmp_path: Path) -> None:
    """Nodes hang on nodes that earlier forwards wrote."""
    runner = load(save_tiny(tmp_path, "llama"), "bfloat16")
    rng = random.Random(6)
    prompt = [rng.randrange(101) for _ in range(11)]
    parents = [-1, -1, 0, 1, 1, 2, 4, 3, 6, 0]
    drafts = [rng.randrange(101) for _ in parents]
    pages, _ = runner.page_table.allocate(range(30))
    runner.forward([Segment(pages, 0, prompt, 0)])
    rows = []
    for first, end in ((0, 2), (2, 5), (5, 6), (6, 10)):
        segment = Segment(pages, len(prompt) + first, drafts[first:end], end - first, parents[:end])
        rows.append(runner.forward([segment]).logits.clone())
    for node, row in enumerate(torch.cat(rows)):
        ids = prompt + [drafts[i] for i in path_of(parents, node)]
        assert torch.equal(row, chain_logits(runner, ids, 1)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_after_compaction_a_tree_path_is_a_chain(dtype: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"), dtype)
    rng = random.Random(7)
    prompt = [rng.randrange(101) for _ in range(14)]
    parents = [-1, -1, 0, 1, 1, 2, 4, 3, 6, 0]
    drafts, after = ([rng.randrange(101) for _ in range(n)] for n in (len(parents), 5))
    for node in (0, 5, 8):
        path = path_of(parents, node)
        ids = prompt + [drafts[i] for i in path]
        pages, _ = runner.page_table.allocate(range(40))
        runner.forward([Segment(pages, 0, prompt + drafts, 1, parents)])
        runner.compact([KeptPath(pages, len(prompt), path)])
        logits = runner.forward([Segment(pages, len(ids), after, len(after))]).logits
        assert torch.equal(logits, chain_logits(runner, ids + after, len(after)))
        runner.page_table.release(pages)


def test_the_reference_forward_takes_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("betoken.engine.bring_up.prepare._kernels_for", lambda *given: None)
    runner = load(save_tiny(tmp_path, "llama"), "float32")
    pages, _ = runner.page_table.allocate(range(20))
    logits = runner.forward([Segment(pages, 0, [5, 6, 7, 8, 9, 10], 3, parents=[-1, -1, 0])]).logits
    for row, ids in enumerate(([5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8, 10])):
        assert torch.equal(logits[row], chain_logits(runner, ids, 1)[0])


def test_a_chain_with_parents_is_the_same_batch() -> None:
    plain = build_batch([Segment([3, 1], 5, [7, 8, 9], 2)], 4, 8)
    written = build_batch([Segment([3, 1], 5, [7, 8, 9], 2, parents=[-1, 0])], 4, 8)
    assert written.layout.tolist() == plain.layout.tolist() and not written.has_trees
    assert [part.tolist() for part in plain.parts()] == [[5, 6, 7], [0, 0, 0], [0, 2], [3, 1], [], []]


def test_a_batch_with_a_tree_by_hand() -> None:
    # Slots: 2 a chain's token, 3 and 4 its children, 5 a child of slot 3.
    batch = build_batch([Segment([9], 1, [7], 1), Segment([5, 6], 2, [1, 2, 3, 4], 4, [-1, -1, 0])], 4, 8)
    assert batch.positions == [1, 2, 3, 3, 4] and batch.has_trees
    parts = [part.tolist() for part in batch.parts()]
    assert parts == [[1, 2, 3, 3, 4], [0, 1, 1, 1, 1], [0, 1, 3], [9, 5, 6], [0, 0, 0, 0, 1, 2], [4, 5]]


def test_depths_and_paths_of_a_tree_by_hand() -> None:
    parents = [-1, 0, 1, 0, 3, -1, 5]
    assert node_depths(parents) == [0, 1, 2, 1, 2, 0, 1]
    assert place_nodes(parents, 10) == ([10, 11, 12, 11, 12, 10, 11], {3: [13], 4: [13, 14], 5: [15], 6: [15, 16]})
    assert place_nodes(parents, 10, first_node=5) == ([10, 11], {0: [15], 1: [15, 16]})


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([0], 0, [1, 2, 3], 1, parents=[-1, 1, 0]), r"parents\[1\]"),
        (Segment([0], 0, [1, 2, 3], 1, parents=[-2]), r"parents\[0\]"),
        (Segment([0], 0, [1, 2], 1, parents=[-1, 0, 1]), "3 nodes in 2 slots"),
    ],
)
def test_parents_that_are_not_a_tree_are_rejected(segment: Segment, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch([segment], 16, 8)
