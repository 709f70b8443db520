"""A verify worker process: listen, load the target on its own thread, then serve links until stopped."""

import asyncio
import logging
from dataclasses import replace
from importlib.metadata import version

from betoken import common, engine, kernels, verify_worker
from betoken.common.errors import FailedPreconditionError, InternalError
from betoken.drafters.drafter import Drafter
from betoken.drafters.host.feed import FeatureFeed
from betoken.drafters.host.making import DrafterMaker, source_infos
from betoken.drafters.registry import SPECS, predicting_drafters
from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.step_costs import StepCost, kept_step_costs, measure_step_costs
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError, RankLostError
from betoken.engine.model_thread import ModelThread
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.fingerprint import hash_sources
from betoken.engine.weights.memory import large_buffers_returned
from betoken.kernels.build import give_up
from betoken.rpc.constraints import Grammars
from betoken.rpc.early_end import at_end
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.hello import worker_hello
from betoken.rpc.link import LinkServicer, LoadingServicer, OutboxLimits
from betoken.rpc.link.delay_line import delayed
from betoken.rpc.memory import other_bytes
from betoken.rpc.progress import LoadProgress
from betoken.rpc.server import Service, freeze_loaded, listening
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1 import verify_pb2_grpc
from betoken.v1.types_pb2 import WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkRequest, VerifyLinkResponse
from betoken.verify_worker.attached import AttachedDrafters
from betoken.verify_worker.attached_models import AttachedModels
from betoken.verify_worker.built_in import with_built_in
from betoken.verify_worker.commands import VerifyCommand
from betoken.verify_worker.core import VerifyCore
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.handler import MODES, VerifyLinkHandler, VerifyResults
from betoken.verify_worker.ranks import start_ranks
from betoken.verify_worker.scheduler import Scheduler, prefill_rows
from betoken.verify_worker.settings import VerifyWorkerSettings
from betoken.verify_worker.synthetic import simulated

logger = logging.getLogger(__name__)


async def run(settings: VerifyWorkerSettings) -> None:
    """Listen, load, then serve until SIGTERM or SIGINT; links are rejected with the progress while it loads.

    Raises:
        FailedPreconditionError: the model cannot be served, the address cannot be bound, or cores not be kept awake.
        InternalError: the model thread has ended, or hangs.
    """
    results = VerifyResults(settings.one_way_delay_s)
    hello = WorkerHello()
    grammars: list[Grammars] = []
    progress = LoadProgress(settings.ready_file)
    thread: ModelThread[VerifyCommand] = ModelThread(
        lambda: _load(settings, results, hello, grammars, progress, thread), "target-model"
    )
    early = LoadingServicer(lambda: progress.error)
    service = Service("betoken.v1.VerifyService", early, verify_pb2_grpc.add_VerifyServiceServicer_to_server)
    async with listening([service], settings) as listener:
        try:
            await asyncio.wrap_future(thread.start())
        except ModelRefusedError as error:
            raise FailedPreconditionError(f"--model = {settings.model}: {error}") from error
        except RankLostError as error:
            raise InternalError(str(error)) from error
        freeze_loaded()
        early.loaded(_servicer(settings, thread, results, hello, grammars))
        async with thread.running(settings.watchdog_timeout_s) as failure:
            await listener.serve(on_drain=early.drain, failure=failure)


def _servicer(
    settings: VerifyWorkerSettings,
    thread: ModelThread[VerifyCommand],
    results: VerifyResults,
    hello: WorkerHello,
    grammars: list[Grammars],
) -> LinkServicer[VerifyLinkRequest, VerifyLinkResponse]:
    """The servicer of a loaded worker."""
    submit = delayed(thread.submit, settings.one_way_delay_s)
    handler = VerifyLinkHandler(submit, results, hello, *grammars)
    return LinkServicer(
        lambda: hello,
        handler,
        VerifyLinkResponse,
        max_links=settings.max_links,
        limits=OutboxLimits(max_message_bytes=settings.max_message_bytes),
    )


def _load(
    settings: VerifyWorkerSettings,
    results: VerifyResults,
    hello: WorkerHello,
    grammars: list[Grammars],
    progress: LoadProgress | None = None,
    thread: ModelThread[VerifyCommand] | None = None,
) -> VerifyCore:
    """The core, the completed hello, and the model's grammars if supported; runs on the model thread, `thread`."""
    fast_wake = FastWake(settings.fast_wake)  # first: it may be refused
    progress = progress or LoadProgress(settings.ready_file)
    at_end(give_up)
    settings = with_built_in(settings, progress)
    config = start_ranks(settings, engine_config(settings), thread, progress)
    runner = _runner(settings, config, progress)
    names = settings.attached_drafters
    drafters = _drafters(settings, runner, progress)
    try:
        with large_buffers_returned():
            grammars.append(Grammars(runner.info.tokenizer_text()))
    except FailedPreconditionError as error:
        logger.warning("requests with a constraint are refused: %s", error)
    progress("measuring step times", 0.95)
    code = hash_sources(common, engine, kernels, verify_worker)[:12]
    step_costs = _step_costs(settings, runner, code)
    hello.CopyFrom(
        worker_hello(
            "verify",
            settings.worker_id,
            runner.info,
            step_costs,
            max_sequences=settings.max_sequences,
            tensor_parallel_degree=settings.tensor_parallel_degree,
            pipeline_parallel_degree=settings.pipeline,
            verification_modes=tuple(MODES),
            supports_trees=True,
            supports_constraints=bool(grammars),
            drafters=names,
            sources=source_infos(SPECS[name] for name in names),
            predicting_drafters=predicting_drafters(names),
            max_draft_tokens=settings.max_draft_tokens,
            page_size=settings.page_size,
            is_synthetic=bool(settings.synthetic),
            weight_bytes=runner.weight_bytes,
            kv_bytes=runner.kv_bytes,
            other_bytes=other_bytes(runner.weight_bytes if config.device == "cpu" else 0),
            sequence_state_bytes=runner.state_bytes,
            snapshot_limit_bytes=runner.snapshot_limit_bytes,
            media_token_ids=runner.info.media_token_ids,
            numerics=f"{runner.numerics}, llguidance {version('llguidance')}, code {code}",
        )
    )
    max_prefill_tokens = settings.max_prefill_tokens
    if max_prefill_tokens is None:
        max_prefill_tokens = prefill_rows(step_costs, USUAL_PREFILL_ROWS, settings.max_num_batched_tokens // 2)
    scheduler = Scheduler(runner.page_table, settings.max_num_batched_tokens, max_prefill_tokens)
    feed = FeatureFeed.of_attached(settings, runner)
    attached = AttachedDrafters(drafters, runner.info.vocab_size, settings.max_draft_tokens, feed)
    return VerifyCore(runner, scheduler, results, settings.max_sequences, step_costs, fast_wake, attached)


def _drafters(settings: VerifyWorkerSettings, runner: ModelRunner, progress: LoadProgress) -> dict[str, Drafter]:
    """The attached drafters, with their models."""
    maker = DrafterMaker(settings, settings.attached_drafters, runner)
    maker.models = AttachedModels(settings, runner, progress)
    return maker.make()


def _runner(settings: VerifyWorkerSettings, config: EngineConfig, progress: LoadProgress) -> ModelRunner:
    """The model, or a simulated one with its description."""
    simulation = settings.simulation
    if simulation is None:
        return load_runner(config, progress)
    config = replace(config, compile="off", self_check=False)
    return simulated(load_runner(config, progress), simulation.times)


def _step_costs(settings: VerifyWorkerSettings, runner: ModelRunner, code: str) -> list[StepCost]:
    """The measured step times; on a CPU of an earlier start, since there they take seconds."""
    if settings.devices[0] != "cpu" or settings.synthetic:
        return measure_step_costs(runner)
    split = (settings.tensor_parallel_degree, settings.pipeline)
    key = (runner.info.weights_fingerprint, runner.numerics, runner.feature_layers, code, *split)
    return kept_step_costs(runner, KeptResult(settings.cache_dir, "step-times", *key))
