"""The extraction bench: its schemas are supported by grammars, and each side is counted from its tokens."""

from __future__ import annotations

import json

import pytest

from betoken.bench.structured import EXTRACTIONS, Answers, num_valid, parse_options, schema_of
from betoken.client import Completion, Piece
from betoken.rpc.constraints import Grammars
from betoken.v1 import generation_pb2 as pb
from betoken.v1.types_pb2 import TOKEN_ORIGIN_ACCEPTED, Constraint
from tests.router.harness import byte_tokenizer_json

GOOD = {"name": "Mia", "age": 7, "city": "Oslo", "country": "Norway", "item": "mug", "quantity": 2, "status": "shipped"}
GOOD |= {"title": "Open day", "date": "2026-05-09", "is_public": True}


def completion(text: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> Completion:
    stats = pb.SpeculationStats(num_verify_forwards=3, num_draft_tokens=5, num_accepted_tokens=4)
    told = pb.GeneratedToken(id=7, origin=TOKEN_ORIGIN_ACCEPTED, source="grammar", num_chars=len(text))
    piece = Piece.from_proto(pb.GenerateTokens(tokens=[told], text=text))
    finish = pb.GenerateFinish(reason=reason, speculation=stats)
    return Completion.from_proto(pb.GenerateStart(seed=1), [piece], finish, 0)


def test_every_schema_is_one_that_grammars_keep() -> None:
    grammars = Grammars(byte_tokenizer_json())
    for _, properties in EXTRACTIONS:
        grammars.compile(Constraint(json_schema=json.dumps(schema_of(properties))))


def test_whole_answers_are_held_against_their_schemas() -> None:
    answers = [completion(json.dumps({name: GOOD[name] for name in properties})) for _, properties in EXTRACTIONS]
    assert num_valid(Answers(answers, 1.0)) == len(EXTRACTIONS)
    cut = [completion("{", pb.FINISH_REASON_LENGTH), *answers[1:]]
    assert num_valid(Answers(cut, 1.0)) == len(EXTRACTIONS) - 1
    for text in ('{"name": "Mia"}', '{"name"'):
        assert num_valid(Answers([completion(text), *answers[1:]], 1.0)) == len(EXTRACTIONS) - 1


def test_a_row_adds_up_its_answers() -> None:
    row = Answers([completion("a"), completion("b")], 2.0).row()
    assert row == {"tokens": 2, "forwards": 6, "drafted": 10, "accepted": 8, "forced": 2, "tokens_per_s": 1.0}


def test_temperatures_out_of_range_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--target", "t", "--temperature", "-1"])
    assert "argument --temperature: -1 is not" in capsys.readouterr().err
