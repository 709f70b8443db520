"""Prompts to make answers from: `python -m betoken.training.prompts --out prompts.jsonl ...`.

Cut out of text files, or invented by a chat model, which given the beginning of a user's turn says what a user might
(Magpie, Xu et al., arXiv:2406.08464). Neither takes a benchmark's questions, which are for evaluation.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampling import SamplingParams
from betoken.training.answers import generate
from betoken.training.corpus import load_corpus
from betoken.training.recipe import faults_in_a_line
from betoken.training.samples import Sample

log = logging.getLogger("betoken.training")

MAX_INVENTED_TOKENS = 128
MAX_MISSES = 1000
"""Cuts in a row that give no piece, and answers in a row that give no new prompt, before it is given up."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(prog="betoken.training.prompts", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--num", type=int, default=4000, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--cut", type=Path, help="cut them out of the Python files of a folder")
    way.add_argument("--cut-stdlib", action="store_true", help="cut them out of the pair's training files")
    parser.add_argument("--held-out", action="store_true", help="take the files that are held out from training")
    parser.add_argument("--as-text", action="store_true", help="write `text` to learn from instead of `prompt`")
    way.add_argument("--invent", metavar="MODEL", help="let this chat model invent them")
    parser.add_argument("--min-chars", type=int, default=80, help="shortest cut, characters")
    parser.add_argument("--max-chars", type=int, default=900, help="longest cut, characters")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    return parser.parse_args(arguments)


def cut(texts: list[str], num: int, seed: int, min_chars: int, max_chars: int) -> Iterator[str]:
    """Pieces of texts that begin and end with a line.

    Raises:
        ValueError: the lengths are none, or the texts hold hardly a piece of them.
    """
    if not 0 < min_chars <= max_chars:
        raise ValueError(f"min_chars, max_chars: {min_chars}, {max_chars}: must be 1 or more, in that order")
    rng = random.Random(seed)
    weights = [len(text) for text in texts]
    num_misses = 0
    while num > 0:
        text = rng.choices(texts, weights)[0]
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        end = text.find("\n", start + rng.randint(min_chars, max_chars)) + 1
        if end and len(piece := text[start:end]) <= 2 * max_chars:
            yield piece
            num, num_misses = num - 1, 0
        elif (num_misses := num_misses + 1) == MAX_MISSES:
            raise ValueError(f"the texts hold hardly a piece of {min_chars} to {max_chars} characters in whole lines")


def user_turn(tokenizer: Any) -> list[int]:
    """Ids of a chat up to the start of the user's text.

    Raises:
        ValueError: the tokenizer has no chat template, or its template changes the users' text.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the model has no chat template")
    marker = "0123456789"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    if marker not in text:
        raise ValueError("the chat template changes what users say")
    return list(tokenizer.encode(text.partition(marker)[0], add_special_tokens=False))


def invent(runner: ModelRunner, tokenizer: Any, num: int, seed: int) -> Iterator[str]:
    """Distinct words of users, up to the end of their turn; those without an end are left out.

    Raises:
        ValueError: the model says hardly anything new, or see `user_turn`.
    """
    before = user_turn(tokenizer)
    eos = runner.info.eos_token_ids
    found: dict[int, str] = {}
    seen: set[str] = set()

    def keep(index: int, sample: Sample) -> None:
        words = list(sample.ids[sample.prompt_length :])
        if words[-1] in eos:
            found[index] = tokenizer.decode(words[:-1], skip_special_tokens=True).strip()

    def params_of(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0,
            top_p=0.95,
            seed=(seed << 32) + index,
            max_new_tokens=MAX_INVENTED_TOKENS,
            eos_token_ids=eos,
        )

    first = num_misses = 0
    while len(seen) < num:
        size = num - len(seen) + 16
        found.clear()
        generate(runner, [before] * size, lambda index, first=first: params_of(first + index), keep)  # type: ignore[misc]
        first += size
        num_before = len(seen)
        for _, text in sorted(found.items()):
            if len(text) >= 10 and text not in seen and len(seen) < num:
                seen.add(text)
                yield text
        log.info("%d of %d prompts", len(seen), num)
        num_misses = num_misses + size if len(seen) == num_before else 0
        if num_misses >= MAX_MISSES:
            raise ValueError(f"the model says nothing new after {len(seen)} of {num} prompts")


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    options = parse_arguments(arguments)
    with faults_in_a_line("betoken.training.prompts"):
        write_prompts(options)


def write_prompts(options: argparse.Namespace) -> None:
    """Write the file.

    Raises:
        OSError, ValueError, EngineError: a file, an option or the model is not as it has to be.
    """
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.invent:
        from transformers import AutoTokenizer

        runner = load_runner(EngineConfig(options.invent, num_threads=options.threads))
        tokenizer = AutoTokenizer.from_pretrained(options.invent)
        texts = invent(runner, tokenizer, options.num, options.seed)
        records = ({"messages": [{"role": "user", "content": text}]} for text in texts)
        lines = [json.dumps(record) + "\n" for record in records]
    else:
        corpus = load_corpus(None if options.cut_stdlib else options.cut)
        documents = corpus.held_out if options.held_out else corpus.training
        texts = cut([d.text for d in documents], options.num, options.seed, options.min_chars, options.max_chars)
        lines = [json.dumps({"text" if options.as_text else "prompt": text}) + "\n" for text in texts]
    options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
