"""Every name of a span, attribute, metric and log field, in one place.

RPC and `gen_ai.*` names follow the OpenTelemetry semantic conventions; nothing there covers speculation: ours are
`betoken.*`. Imports nothing.
"""

SCOPE = "betoken"

REMOTE_CALLER = "betoken-remote-caller"
"""Metadata of a call that a gateway makes for a client on another machine."""

# Spans.
SPAN_GENERATE = "betoken.generate"
SPAN_CLIENT_GENERATE = "betoken.client.generate"
SPAN_SEQUENCE = "betoken.worker.sequence"

# RPC attributes (semantic conventions).
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code"
RPC_SYSTEM_GRPC = "grpc"
ERROR_TYPE = "error.type"

# Generation attributes (semantic conventions).
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
PROVIDER_BETOKEN = "betoken"
OPERATION_TEXT_COMPLETION = "text_completion"
OPERATION_CHAT = "chat"

# Speculation attributes.
REQUEST_ID = "betoken.request_id"
SEQUENCE_ID = "betoken.sequence_id"
TENANT = "betoken.tenant"
WORKER_ROLE = "betoken.worker.role"
WORKER_ADDRESS = "betoken.worker.address"
WORKER_ID = "betoken.worker.id"
FINISH_REASON = "betoken.finish_reason"
DRAFTER = "betoken.drafter"
DRAFTER_ATTACHED = "betoken.drafter.attached"
SAMPLED = "betoken.sampled"
PREDICTED = "betoken.predicted"
NUM_DRAFT_TOKENS = "betoken.num_draft_tokens"
NUM_ACCEPTED = "betoken.num_accepted"
DRAFT_POSITION = "betoken.draft_position"
AHEAD_HIT = "betoken.ahead.hit"
AHEAD_USED = "betoken.ahead.used"
SYNTHETIC = "betoken.synthetic"
QUEUE_MS = "betoken.queue_ms"

PREDICTION = "prediction"
"""Source of draft tokens that a request expects; other sources are names of drafters."""

# Generation metrics (semantic conventions), seconds.
METRIC_REQUEST_DURATION = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"

# Speculation metrics: raw counters, in the schema vLLM set and llama.cpp copied.
METRIC_DRAFTS = "betoken.drafts"
METRIC_DRAFT_TOKENS = "betoken.draft_tokens"
METRIC_ACCEPTED_TOKENS = "betoken.accepted_tokens"
METRIC_ACCEPTED_TOKENS_PER_POSITION = "betoken.accepted_tokens_per_position"
METRIC_EMITTED_TOKENS = "betoken.emitted_tokens"
METRIC_INPUT_TOKENS = "betoken.input_tokens"
METRIC_CACHED_INPUT_TOKENS = "betoken.cached_input_tokens"
METRIC_OUTPUT_TOKENS = "betoken.output_tokens"
METRIC_FAILED_DRAFTS = "betoken.failed_drafts"
METRIC_AHEAD_DRAFTS = "betoken.ahead_drafts"
METRIC_AHEAD_TOKENS = "betoken.ahead_tokens"
METRIC_FAILOVERS = "betoken.failovers"
METRIC_SPECULATION_ON = "betoken.speculation.on"
METRIC_EXPECTED_SPEEDUP = "betoken.speculation.expected_speedup"
METRIC_REQUESTS = "betoken.requests"
METRIC_REQUESTS_RUNNING = "betoken.requests.running"
METRIC_REQUESTS_WAITING = "betoken.requests.waiting"
METRIC_QUEUE_DURATION = "betoken.queue.duration"
METRIC_ROUND_OVERHEAD = "betoken.round.overhead"
METRIC_REJECTED_KEY_FILES = "betoken.rejected_key_files"

# Workers as their router sees them.
METRIC_WORKER_READY = "betoken.worker.ready"
METRIC_WORKER_RUNNING = "betoken.worker.sequences.running"
METRIC_WORKER_WAITING = "betoken.worker.sequences.waiting"
METRIC_WORKER_PAGES_FREE = "betoken.worker.pages.free"
METRIC_WORKER_PAGES_LIMIT = "betoken.worker.pages.limit"
METRIC_WORKER_PREEMPTIONS = "betoken.worker.preemptions"
METRIC_WORKER_CACHED_TOKENS = "betoken.worker.cached_tokens"
METRIC_WORKER_SNAPSHOT_BYTES = "betoken.worker.snapshots.bytes"
METRIC_WORKER_MEMORY_DOCUMENTS = "betoken.worker.memory.documents"
METRIC_WORKER_MEMORY_TOKENS = "betoken.worker.memory.tokens"
METRIC_WORKER_MEMORY_HITS = "betoken.worker.memory.hits"
METRIC_WORKER_MEMORY_EVICTIONS = "betoken.worker.memory.evictions"

OTHER = "_OTHER"
"""Value of a client-chosen attribute beyond the maximum number of distinct values."""

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Histogram bounds for durations: as the conventions have them, and below 10 ms, where rounds live."""
SECONDS_METRICS = (
    METRIC_REQUEST_DURATION,
    METRIC_TIME_TO_FIRST_TOKEN,
    METRIC_TIME_PER_OUTPUT_TOKEN,
    METRIC_QUEUE_DURATION,
    METRIC_ROUND_OVERHEAD,
)
"""Metrics that take `SECONDS_BUCKETS`."""
