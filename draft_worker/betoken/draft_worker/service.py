"""A draft worker process: listen, load its drafters on their own thread, then serve links until stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from betoken.common.errors import InternalError
from betoken.draft_worker.commands import DraftCommand
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.handler import DraftLinkHandler, DraftResults, GrammarOf
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.settings import DEFAULT_MAX_CONTEXT, DraftWorkerSettings
from betoken.drafters.host.making import source_infos
from betoken.drafters.registry import SPECS, predicting_drafters
from betoken.engine.errors import RankLostError
from betoken.engine.model_thread import ModelThread
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.hello import worker_hello
from betoken.rpc.link import LinkServicer, LoadingServicer, OutboxLimits
from betoken.rpc.link.delay_line import delayed
from betoken.rpc.memory import other_bytes
from betoken.rpc.progress import LoadProgress
from betoken.rpc.server import Service, freeze_loaded, listening
from betoken.v1 import draft_pb2_grpc
from betoken.v1.draft_pb2 import DraftLinkRequest, DraftLinkResponse
from betoken.v1.types_pb2 import DraftTranslation, WorkerHello

if TYPE_CHECKING:
    from betoken.draft_worker.rules import RulesOf
    from betoken.drafters.translated.translation import Translation


async def run(settings: DraftWorkerSettings) -> None:
    """Listen, load, then serve until SIGTERM or SIGINT; links are rejected with the progress while it loads.

    Raises:
        FailedPreconditionError: a model or a plug-in cannot be served, the address cannot be bound, or cores not be
            kept awake.
        InternalError: the model thread has ended, or hangs.
    """
    results = DraftResults(settings.one_way_delay_s)
    hello = WorkerHello()
    grammar_of: list[GrammarOf] = []
    progress = LoadProgress(settings.ready_file)
    thread: ModelThread[DraftCommand] = ModelThread(
        lambda: _load(settings, results, hello, grammar_of, progress, thread), "draft-model"
    )
    early = LoadingServicer(lambda: progress.error)
    service = Service("betoken.v1.DraftService", early, draft_pb2_grpc.add_DraftServiceServicer_to_server)
    async with listening([service], settings) as listener:
        try:
            await asyncio.wrap_future(thread.start())
        except RankLostError as error:
            raise InternalError(str(error)) from error
        freeze_loaded()
        early.loaded(_servicer(settings, thread, results, hello, grammar_of))
        async with thread.running(settings.watchdog_timeout_s) as failure:
            await listener.serve(on_drain=early.drain, failure=failure)


def _servicer(
    settings: DraftWorkerSettings,
    thread: ModelThread[DraftCommand],
    results: DraftResults,
    hello: WorkerHello,
    grammar_of: list[GrammarOf],
) -> LinkServicer[DraftLinkRequest, DraftLinkResponse]:
    """The servicer of a loaded worker."""
    handler = DraftLinkHandler(
        delayed(thread.submit, settings.one_way_delay_s),
        results,
        settings.max_draft_tokens,
        hello.worker_id,
        max_context=hello.max_context,
        grammar_of=grammar_of[0] if grammar_of else None,
    )
    return LinkServicer(
        lambda: hello,
        handler,
        DraftLinkResponse,
        max_links=settings.max_links,
        limits=OutboxLimits(max_message_bytes=settings.max_message_bytes),
    )


def _load(
    settings: DraftWorkerSettings,
    results: DraftResults,
    hello: WorkerHello,
    grammar_of: list[GrammarOf],
    progress: LoadProgress | None = None,
    thread: ModelThread[DraftCommand] | None = None,
) -> DraftCore:
    """The core, the completed hello, and, if models draft, what makes grammars; runs on the model thread, `thread`."""
    fast_wake = FastWake(settings.fast_wake)  # first: it may be refused
    progress = progress or LoadProgress(settings.ready_file)
    hosted = load_drafters(settings, progress, thread)
    rules_of: RulesOf | None = None
    runner = hosted.runners[0] if hosted.runners else None
    if hosted.runners:
        from betoken.draft_worker import rules  # takes numpy, which n-grams do without

        rules_of = rules.rules_of
        texts = (runner.info.tokenizer_text() for runner in hosted.runners)
        translator = hosted.maker.translator
        text = next(filter(None, texts), "") if translator is None else translator.tokenizer_json
        if (maker := rules.grammar_maker(text)) is not None:
            grammar_of.append(maker)
    weight_bytes = sum(runner.weight_bytes for runner in hosted.runners)
    hello.CopyFrom(
        worker_hello(
            "draft",
            settings.worker_id,
            runner.info if runner is not None else None,
            max_sequences=settings.max_sequences,
            tensor_parallel_degree=len(settings.devices),
            drafters=settings.hosted_drafters,
            sources=source_infos(SPECS.values(), settings.hosted_drafters),
            predicting_drafters=predicting_drafters(settings.hosted_drafters),
            max_draft_tokens=settings.max_draft_tokens,
            page_size=settings.page_size,
            is_synthetic=bool(settings.synthetic),
            mask_token_id=hosted.mask_token_id,
            translation=_translation(hosted.maker.translation),
            weight_bytes=weight_bytes,
            kv_bytes=sum(runner.kv_bytes for runner in hosted.runners),
            other_bytes=other_bytes(weight_bytes if settings.devices[0] == "cpu" else 0),
        )
    )
    longest = max((runner.info.max_context for runner in hosted.runners), default=0)
    hello.max_context = settings.max_context or max(DEFAULT_MAX_CONTEXT, longest)
    # The first model may have come without a tokenizer, or with the longer context: one handshake speaks for all.
    hello.tokenizer_hash = hosted.tokenizer_hash
    hello.draft_context = min((runner.info.max_context for runner in hosted.runners), default=0)
    return DraftCore(hosted.drafters, hosted.page_tables, results, settings.max_sequences, fast_wake, rules_of)


def _translation(translation: Translation | None) -> DraftTranslation | None:
    """Description of a translation; None without one."""
    if translation is None:
        return None
    return DraftTranslation(is_by_token=translation.is_by_token, coverage=translation.coverage)
