"""Token maps equal the paper's definition; ids of either vocabulary stand for the same bytes after any commit."""

import json
import random

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from betoken.drafters.translated.sample import SAMPLE
from betoken.drafters.translated.translation import NONE, Translation
from betoken.drafters.translated.vocabulary import TokenizerFaultError, Vocabulary, incomplete_suffix
from tests.drafters.translated.pairs import TARGET_JSON, cut_tokenizer, trained_json
from tests.router.harness import byte_fallback_tokenizer_json, byte_tokenizer_json, with_special_tokens

OTHER_JSON = trained_json(SAMPLE + " \U0001f600 " * 9, 420, "<|endoftext|>", "<end>")
TARGET = Vocabulary(TARGET_JSON)


def translation(draft_json, is_by_token, target=TARGET, num_padding=0):
    draft = Vocabulary(draft_json)
    return Translation(target, draft, draft.size + num_padding, is_by_token)


def text_of(made, mixed_ids):
    """Bytes of mixed ids without special tokens."""
    ids = [made.draft_id(each) for each in mixed_ids]
    return made.draft.decode([each for each in ids if each not in made.draft.special_names])


def target_text(made, ids):
    return made.target.decode([each for each in ids if each not in made.target.special_names])


@pytest.mark.parametrize("draft_json", [OTHER_JSON, cut_tokenizer(TARGET_JSON, 900)[0]])
def test_the_map_of_tokens_equals_the_papers_definition(draft_json):
    """By string after the space signs are equal; `transformers` implements the definition."""
    fast = [PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text)) for text in (TARGET_JSON, draft_json)]
    expected = AssistantToTargetTranslator(*fast, target_vocab_size=TARGET.size)
    made = translation(draft_json, True, num_padding=7)
    own = [NONE if each == expected.SUPPRESS_TOKEN_ID else each for each in expected._assistant_to_target_input_ids]
    assert made.target_ids == [*map(int, own), *[NONE] * 7]
    of_target = {target_id: each for target_id, each in enumerate(made.draft_ids) if each != NONE}
    assert of_target == expected.target_to_assistant_input_ids


def test_tokens_with_different_space_signs_are_common():
    made = translation(byte_fallback_tokenizer_json(), True)
    space, letter = made.draft.ids_of_bytes[b" "], made.draft.ids_of_bytes[b"a"]
    assert made.target_ids[space] == TARGET.ids_of_bytes[b" "] and made.target_ids[letter] == TARGET.encode(b"a")[0]
    assert made.draft._fast.id_to_token(letter) == "a", "a token of text comes before a token of a byte"


def test_special_tokens_are_common_by_name_and_never_with_text():
    target = Vocabulary(with_special_tokens(byte_tokenizer_json(), "<a>", "word"))
    made = translation(with_special_tokens(trained_json("word " * 9, 300), "<a>"), True, target)
    special = {name: token_id for token_id, name in target.special_names.items()}
    assert made.draft.special_names[made.draft_ids[special["<a>"]]] == "<a>"
    assert made.draft_ids[special["word"]] == made.draft_ids[special["<eos>"]] == NONE
    assert b"word" in made.draft.ids_of_bytes


@pytest.mark.parametrize("is_by_token", [True, False])
@pytest.mark.parametrize("draft_json", [OTHER_JSON, byte_fallback_tokenizer_json(), byte_tokenizer_json()])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_ids_stand_for_the_targets_text_after_every_commit(is_by_token, draft_json, seed):
    """Commits may end in the middle of a character, hold special tokens, padding, and pieces that are not UTF-8."""
    rng = random.Random(seed)
    made = translation(draft_json, is_by_token)
    ids = TARGET.encode(SAMPLE.encode())[: rng.randrange(1, 60)]
    mixed = made.begin(ids)
    words = ["caf\u00e9", " \U0001f600", " moving_average", "  \n", "window", "\u0000", " the"]
    for _ in range(30):
        added = TARGET.encode(rng.choice(words).encode())[: rng.randrange(1, 4)]
        added += rng.choice([[], [], [0], [rng.randrange(TARGET.size + 9)]])
        num_replaced, tail = made.follow(mixed, added)
        mixed = [*mixed[: len(mixed) - num_replaced], *tail]
        ids += [each for each in added if each < TARGET.size]
        assert text_of(made, mixed) == target_text(made, ids)
        assert all(made.mixed_id(made.draft_id(each)) == each for each in mixed)


def test_common_tokens_are_translated_one_by_one():
    made = translation(OTHER_JSON, True)
    common = [target_id for target_id, draft_id in enumerate(made.draft_ids) if draft_id != NONE]
    assert made.follow([], common) == (0, [made.mixed_id(made.draft_ids[each]) for each in common])


def test_text_is_encoded_again_at_the_seam():
    """Two pieces of a word become one token, which replaces the ids that stood for the first piece."""
    made = translation(OTHER_JSON, False)
    word = max(made.draft.ids_of_bytes, key=lambda token: (token.isalpha(), len(token)))
    start, end = (TARGET.encode(part) for part in (word[:2], word[2:]))
    before = made.begin(start)
    num_replaced, tail = made.follow(before, end)
    assert num_replaced == len(before) and tail == [made.mixed_id(made.draft.ids_of_bytes[word])]


def test_a_commit_may_shorten_the_translation():
    """Three bytes of a character are three tokens; with the fourth byte they become one."""
    made = translation(OTHER_JSON, False)
    bytes_ids = [TARGET.ids_of_bytes[bytes([byte])] for byte in "\U0001f600".encode()]
    mixed = made.begin(bytes_ids[:3])
    num_replaced, tail = made.follow(mixed, bytes_ids[3:])
    assert len(mixed) - num_replaced + len(tail) < len(mixed)
    assert made.draft.decode([made.draft_id(each) for each in tail]).endswith("\U0001f600".encode())


def test_drafted_text_becomes_the_targets_own_encoding():
    made = translation(OTHER_JSON, False)
    text = SAMPLE.encode()[:400]
    for split in range(20, 380, 7):
        if incomplete_suffix(text[:split]):
            continue
        committed = TARGET.encode(text[:split])
        drafted = [made.mixed_id(each) for each in made.draft.encode(text[split:])]
        ids = made.to_target(committed, drafted)
        assert TARGET.decode(ids) == text[split:]
        whole = TARGET.encode(text)
        assert whole[: len(committed)] != committed or ids == whole[len(committed) :]


def test_a_draft_ends_at_a_special_token_and_before_half_a_character():
    made = translation(OTHER_JSON, False)
    ids = {name: token_id for token_id, name in made.draft.special_names.items()}
    mixed = [made.mixed_id(each) for each in made.draft.encode(b" the end")]
    known, unknown = (made.mixed_id(ids[name]) for name in ("<|endoftext|>", "<end>"))
    assert made.to_target([5], [*mixed, known, *mixed]) == [*made.to_target([5], mixed), 0]
    assert made.to_target([5], [*mixed, unknown, *mixed]) == made.to_target([5], mixed)
    half = [made.mixed_id(made.draft.ids_of_bytes[bytes([byte])]) for byte in "\U0001f600".encode()[:3]]
    assert made.to_target([5], [*mixed, *half]) == made.to_target([5], mixed)
    assert made.to_target([5], half) == made.to_target([5], []) == []


def test_a_prompt_without_text_has_a_translation():
    target = Vocabulary(with_special_tokens(byte_tokenizer_json(), "<a>"))
    made = translation(OTHER_JSON, False, target)
    (lone,) = made.begin([target.size - 1])
    assert 0 <= made.draft_id(lone) < made.draft.size
    assert made.follow([lone], [target.size - 1]) == (0, []), "an empty translation"


def test_the_draft_models_own_beginning_precedes_the_text():
    data = json.loads(OTHER_JSON)
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": "<end>", "type_id": 0}}
    end_id = Tokenizer.from_str(OTHER_JSON).token_to_id("<end>")
    special = {"<end>": {"id": "<end>", "ids": [end_id], "tokens": ["<end>"]}}
    data["post_processor"] = {
        **{"type": "TemplateProcessing", "single": [begin, piece], "pair": [begin, piece, piece]},
        "special_tokens": special,
    }
    made = translation(json.dumps(data), True)
    assert [made.draft_id(each) for each in made.begin(TARGET.encode(b"abc"))][0] == end_id


def test_padding_of_a_model_is_no_other_token():
    """151,936 and 152,064 rows of one vocabulary: the padding has no counterpart and the rest is complete."""
    made = translation(TARGET_JSON, None, num_padding=128)
    assert made.coverage == 1 and made.is_by_token and made.target_ids[-128:] == [NONE] * 128
    assert made.target_ids[: TARGET.size] == list(range(TARGET.size))


@pytest.mark.parametrize(("num_ids", "is_by_token"), [(3700, True), (1900, False)])
def test_the_coverage_of_a_sample_chooses_the_translation(num_ids, is_by_token):
    made = translation(cut_tokenizer(TARGET_JSON, num_ids)[0], None)
    ids = TARGET.encode(SAMPLE.encode())
    assert made.coverage == sum(made.draft_ids[each] != NONE for each in ids) / len(ids)
    assert made.is_by_token == is_by_token == (made.coverage >= 0.9) and made.reproduces_text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"model": 5}', "[" * 100_000, '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'],
)
def test_a_text_that_is_no_tokenizer_is_one_line(text):
    with pytest.raises(TokenizerFaultError) as caught:
        Vocabulary(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 200


def test_a_vocabulary_beyond_its_limit_is_rejected():
    data = json.loads(byte_tokenizer_json())
    data["model"]["vocab"]["a"] = 4_294_967_290
    with pytest.raises(TokenizerFaultError, match="4294967291 ids: must be 1 to 4194304"):
        Vocabulary(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", 0), (b"a", 0), (b"\xc3", 1), (b"\xc3\xa9", 0), (b"a\xf0\x9f", 2), (b"\xf0\x9f\x98", 3), (b"\x80\x80", 0)],
)
def test_an_incomplete_character_is_counted(text, expected):
    assert incomplete_suffix(text) == expected
