"""Schemas by drafters and temperatures, through all three services: valid where complete, the same whatever drafts."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from betoken.bench.schemas import Case, load_cases
from betoken.bench.schemas.matrix import DRAFTERS, Cells, fill
from tests.e2e.in_process import save_pair, services
from tests.e2e.schemas import random_schema

CASES = load_cases()


def random_cases(num: int) -> list[Case]:
    rng = random.Random(3)
    return [Case(f"random: {index}", random_schema(rng)) for index in range(num)]


async def filled(folder: Path, cases: Sequence[Case]) -> Cells:
    save_pair(folder)
    async with services(folder, verify_options={"attached_drafters": ("grammar",)}) as client:
        return await fill(client, cases)


def check(cells: Cells, num_cases: int) -> None:
    assert not [fault for cell in cells.values() for fault in (*cell.invalid, *cell.unequal)]
    for (drafter, temperature), cell in cells.items():
        assert cell.num_complete + cell.num_cut == num_cases
        assert cell.num_complete >= 0.8 * num_cases, f"{drafter} at {temperature}: or next to nothing was validated"
        assert (cell.num_accepted_tokens > 0) == (drafter != "none"), "drafts were verified under grammars"


def test_there_are_two_hundred_schemas_and_ten_are_realistic() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 200
    assert [case.name.partition(":")[0] for case in CASES[:11]].count("realistic") == 10


async def test_complete_answers_are_valid_and_the_same_whatever_drafts(tmp_path: Path) -> None:
    cases = [*CASES[:10:2], *CASES[10::60], *random_cases(2)]
    check(await filled(tmp_path, cases), len(cases))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_complete_answers_to_all_schemas_are_valid_and_the_same_whatever_drafts(tmp_path: Path) -> None:
    cases = [*CASES, *random_cases(50)]
    check(await filled(tmp_path, cases), len(cases))


async def test_an_invalid_answer_and_an_unequal_one_are_counted(tmp_path: Path) -> None:
    """A schema that the answers were not kept to, and tokens of another seed, show."""
    save_pair(tmp_path)
    case = Case("bounded", {"type": "integer", "minimum": 10, "maximum": 99})
    async with services(tmp_path, verify_options={"attached_drafters": ("grammar",)}) as client:
        cells = await fill(client, [case], {"none": DRAFTERS["none"]}, [0.8])
        (cell,) = cells.values()
        assert (cell.num_complete, cell.invalid, cell.unequal) == (1, [], [])
        answer, other = [
            await client.complete("x", constraint={"json_schema": case.schema}, temperature=1.0, seed=seed)
            for seed in (1, 2)
        ]
    assert answer.output_ids != other.output_ids
    cell.add(Case("other", {"type": "string"}), answer, other)
    assert cell.unequal == ["other"] and len(cell.invalid) == 1 and "is not of type 'string'" in cell.invalid[0]
