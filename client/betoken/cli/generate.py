"""`betoken generate`: streams one answer, coloured on a terminal, plain into a pipe, or as JSON.

Knows the client and how to show what it gives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from betoken.cli import connection as c
from betoken.cli import provenance, report
from betoken.cli.generate_options import GenerateOptions
from betoken.client import BetokenError, ChatMessage, Client, Completion, Generation, ModelInfo, SourceInfo

_INFO_TIMEOUT_S = 2.0


def generate(options: GenerateOptions) -> None:
    """Stream an answer; on a terminal each token has the colour of its source."""
    sampling, speculation, question = options.sampling(), options.speculation(), options.question()
    constraint = options.constraint()
    with c.reported_errors(options, options.json_), options.client() as client:
        if isinstance(question, str) and not options.is_raw and client.model_info(wait=False).has_chat_template:
            question = [ChatMessage(role="user", content=question)]
        generation = client.generate(
            question,
            sampling=sampling,
            speculation=speculation,
            constraint=constraint,
            prediction=options.predicted_text(),
            suffix=options.suffix,
            n=options.num_answers,
            model=options.model,
            tenant=options.tenant,
            **options.prompt_options(),
        )
        start = time.monotonic()
        if options.num_answers > 1:
            _show_all(generation.results(), time.monotonic() - start, options.json_)
        elif options.json_:
            completion = generation.result()
            print(json.dumps(report.as_json(completion, time.monotonic() - start)))
        elif sys.stdout.isatty():
            info = _info(client)
            _stream_coloured(generation, info.sources if info is not None else ())
        else:
            for piece in generation:
                print(piece, end="", flush=True)
            print()


def _show_all(completions: Sequence[Completion], elapsed_s: float, as_json: bool) -> None:
    """Several answers: as JSON objects in a list, or their texts, each under its seed."""
    if as_json:
        print(json.dumps([report.as_json(completion, elapsed_s) for completion in completions]))
        return
    for completion in completions:
        print(f"--- seed {completion.seed}\n{provenance.visible(completion.text)}")


def _stream_coloured(generation: Generation, sources: Sequence[SourceInfo]) -> None:
    console = Console()
    shown = provenance.Provenance(console, sources)
    start = time.monotonic()
    for piece in generation:
        shown.show(piece)
    elapsed_s = time.monotonic() - start
    completion = generation.result()
    console.print("\n")
    console.print(shown.legend(completion.tokens))
    console.print()
    console.print(report.table(completion, elapsed_s))


def _info(client: Client) -> ModelInfo | None:
    """The served model; None if it is not available quickly: the answer does not need it."""
    try:
        return client.model_info(timeout_s=_INFO_TIMEOUT_S)
    except BetokenError:
        return None
