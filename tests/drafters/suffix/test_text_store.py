"""A bounded store of documents by owner: matches equal a naive search over what it holds, whatever was evicted."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from betoken.drafters.suffix.recall import grow_continuations
from betoken.drafters.suffix.text_store import PAGE_TOKENS, TextStore
from tests.drafters.suffix.naive import longest_match, scores_of

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6)


def held(store, owner=b"a"):
    return [document.tolist() for document in store.documents(owner)]


def words(rng, num_ids, num_words=40):
    """Text of a few repeated words."""
    vocabulary = [[rng.randrange(1000) for _ in range(rng.randrange(2, 9))] for _ in range(num_words)]
    return [token_id for _ in range(num_ids) for token_id in rng.choice(vocabulary)][:num_ids]


def assert_finds_the_same(store, owner, tail, depth=6):
    found, expected = store.find(owner, tail, depth), longest_match(held(store, owner), tail, depth)
    assert (None if found is None else tuple(found)) == expected


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_longest_match_and_its_continuations_equal_a_search_over_all_documents(texts, tail):
    store = TextStore(4096)
    for text in texts:
        store.add(b"a", text)
    assert held(store) == [text for text in texts if len(text) > 2]
    assert_finds_the_same(store, b"a", tail)


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=2, max_size=8), st.integers(1, 5))
def test_scores_of_continuations_equal_products_of_conditional_frequencies(texts, tail, max_depth):
    store = TextStore(4096)
    for text in texts:
        store.add(b"a", text)
    if (match := store.find(b"a", tail, max_depth)) is None:
        return
    limits = {"num_nodes": 1000, "max_branches": 9, "max_depth": max_depth, "min_score": 0.0}
    draft_ids, parents, scores = grow_continuations(match, **limits)
    paths = []
    for token_id, parent in zip(draft_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    expected = scores_of(match.continuations, match.length, max_depth)
    assert dict(zip(paths, scores, strict=True)).keys() == expected.keys()
    assert all(abs(score - expected[path]) < 1e-9 for path, score in zip(paths, scores, strict=True))
    assert scores == sorted(scores, reverse=True)


def test_matches_stay_right_while_three_owners_evict_each_others_documents():
    rng = random.Random(0)
    store = TextStore(6 * PAGE_TOKENS)
    for turn in range(120):
        owner = rng.choice([b"a", b"b", b"b", b"c"])
        store.add(owner, words(rng, rng.randrange(900)))
        store.check_integrity()
        for name in (b"a", b"b", b"c"):
            texts = [text for text in held(store, name) if len(text) > 12]
            if texts and turn % 4 == 0:
                text = rng.choice(texts)
                place = rng.randrange(2, len(text))
                assert_finds_the_same(store, name, text[:place])
    assert store.num_evicted > 50 and store.num_documents == sum(len(held(store, name)) for name in store.owners)


def test_an_index_that_grows_and_shrinks_with_its_text_finds_every_place():
    rng = random.Random(1)
    store = TextStore(24 * PAGE_TOKENS)
    large = words(rng, 20 * PAGE_TOKENS, num_words=2000)
    store.add(b"large", large)
    for owner in (b"x", b"y", b"z"):
        for _ in range(40):
            store.add(owner, words(rng, 500, num_words=2000))
        for text in (held(store, b"large")[0], held(store, owner)[-1]):
            name = owner if text == held(store, owner)[-1] else b"large"
            for place in range(40, len(text), 997):
                assert_finds_the_same(store, name, text[place - 40 : place])
    store.check_integrity()


def test_an_owner_with_little_text_keeps_it_however_much_others_add():
    rng = random.Random(2)
    store = TextStore(8 * PAGE_TOKENS)
    small = words(rng, 300)
    store.add(b"small", small)
    for n in range(200):
        store.add(b"large" if n % 2 else b"other", words(rng, 700))
    assert held(store, b"small") == [small]
    sizes = [sum(map(len, held(store, name))) for name in (b"large", b"other")]
    assert min(sizes) > 2 * PAGE_TOKENS


def test_more_owners_than_pages_evict_the_one_that_was_not_used_for_longest():
    store = TextStore(4 * PAGE_TOKENS)
    for owner in (b"a", b"b", b"c", b"d"):
        store.add(owner, [1, 2, 3, 4])
    store.find(b"a", [1, 2], 1)
    store.add(b"e", [1, 2, 3, 4])
    assert store.owners == [b"c", b"d", b"a", b"e"]
    store.check_integrity()


def test_a_document_longer_than_the_store_keeps_its_end():
    store = TextStore(2 * PAGE_TOKENS)
    text = list(range(5 * PAGE_TOKENS))
    store.add(b"a", text)
    (kept,) = held(store)
    assert kept == text[-len(kept) :] and PAGE_TOKENS < len(kept) < 2 * PAGE_TOKENS
    assert_finds_the_same(store, b"a", text[-40:-3])


def test_a_known_beginning_of_a_document_is_not_stored_again():
    rng = random.Random(3)
    store, conversation = TextStore(64 * PAGE_TOKENS), []
    for _ in range(20):
        num_known = len(conversation) + 150
        conversation += [rng.randrange(1000) for _ in range(400)]
        store.add(b"a", conversation, num_known)
    assert store.num_tokens < 1.4 * len(conversation)
    before = store.num_tokens
    store.add(b"b", conversation, len(conversation))
    assert store.num_tokens == before + len(conversation) + 1, "of another owner nothing is known"
    assert_finds_the_same(store, b"a", conversation[:-5])


def test_a_beginning_that_was_evicted_is_stored_again():
    rng = random.Random(4)
    store = TextStore(4 * PAGE_TOKENS)
    prompt = [rng.randrange(1000) for _ in range(640)]
    store.add(b"a", prompt)
    for _ in range(10):
        store.add(b"a", [rng.randrange(1000) for _ in range(600)])
    store.add(b"a", [*prompt, 1, 2, 3], num_known=len(prompt))
    assert held(store)[-1] == [*prompt, 1, 2, 3]
