"""A request longer than its draft worker takes is answered plainly from there on, with the tokens it would have had."""

from pathlib import Path

import pytest

from tests.e2e.in_process import save_pair, services

MAX_CONTEXT = 24
TEXT = "the cat sat on the mat. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


async def test_drafts_end_where_the_workers_context_does_and_tokens_stay(folder: Path) -> None:
    options = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    async with services(folder, {"max_context": MAX_CONTEXT}) as client:
        short = await client.complete("abc", num_draft_tokens=4, **options)
        plain = await client.complete("abc", off=True, **options)
        assert short.output_ids == plain.output_ids
        assert 0 < short.speculation.num_drafts < 30  # it would be at least that many without the limit
        named = {"drafter": "ngram", "drafter_settings": {"max_ngram": 4}}
        for choice in ({}, named):
            long = await client.complete(TEXT * 2, **choice, **options)
            assert long.output_ids == (await client.complete(TEXT * 2, off=True, **options)).output_ids
            assert long.speculation.num_drafts == 0
        again = await client.complete("abc", num_draft_tokens=4, **options)
        assert again.speculation.num_drafts > 0, "the worker is not left alone for what it does not take"
