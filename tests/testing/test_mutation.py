"""Mutants are the same for the same seed, differ from what they are made of, and reach every field."""

from google.protobuf.empty_pb2 import Empty

from betoken.bench.fuzz import seeds
from betoken.testing.mutation import Mutator
from betoken.v1.generation_pb2 import GenerateRequest


def test_the_same_seed_gives_the_same_mutants():
    original = seeds.calls()["Generate"][0]
    first, again, other = (Mutator(seed) for seed in (5, 5, 6))
    mutants = [[mutator.mutant_bytes(original) for _ in range(50)] for mutator in (first, again, other)]
    assert mutants[0] == mutants[1] != mutants[2]


def test_most_mutants_differ_and_the_original_stays():
    original = seeds.calls()["Generate"][0]
    before = original.SerializeToString(deterministic=True)
    mutator = Mutator(1)
    mutants = [mutator.mutant(original).SerializeToString(deterministic=True) for _ in range(300)]
    assert original.SerializeToString(deterministic=True) == before
    assert sum(mutant != before for mutant in mutants) > 270


def test_every_field_is_set_and_cleared_by_some_mutant():
    mutator, originals = Mutator(2), seeds.calls()["Generate"]
    found: set[str] = set()
    for _ in range(3000):
        mutant = mutator.mutant(mutator.random.choice(originals))
        for prefix, message in (("", mutant), ("sampling.", mutant.sampling), ("speculation.", mutant.speculation)):
            found |= {prefix + field.name for field, _ in message.ListFields()}
    for prefix, descriptor in (
        ("", GenerateRequest.DESCRIPTOR),
        ("sampling.", GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].message_type),
        ("speculation.", GenerateRequest.DESCRIPTOR.fields_by_name["speculation"].message_type),
    ):
        assert {prefix + field.name for field in descriptor.fields} <= found


def test_some_mutants_are_no_message_and_one_without_fields_is_taken():
    mutator, num_broken = Mutator(3), 0
    for _ in range(500):
        try:
            GenerateRequest.FromString(mutator.mutant_bytes(seeds.calls()["Generate"][0]))
        except Exception:  # the library's own, of several classes
            num_broken += 1
    assert 10 < num_broken < 100
    assert mutator.mutant(Empty()) == Empty()
