"""Every name of a span, attribute, metric and log field, in one place.

RPC and `gen_ai.*` names follow the OpenTelemetry semantic conventions; nothing there covers speculation: ours are
`foretoken.*`. Imports nothing.
"""

SCOPE = "foretoken"

# Spans.
SPAN_GENERATE = "foretoken.generate"
SPAN_CLIENT_GENERATE = "foretoken.client.generate"
SPAN_SEQUENCE = "foretoken.worker.sequence"

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
PROVIDER_FORETOKEN = "foretoken"
OPERATION_TEXT_COMPLETION = "text_completion"
OPERATION_CHAT = "chat"

# Speculation attributes.
REQUEST_ID = "foretoken.request_id"
SEQUENCE_ID = "foretoken.sequence_id"
TENANT = "foretoken.tenant"
WORKER_ROLE = "foretoken.worker.role"
WORKER_ADDRESS = "foretoken.worker.address"
DRAFTER = "foretoken.drafter"
NUM_DRAFT_TOKENS = "foretoken.num_draft_tokens"
NUM_ACCEPTED = "foretoken.num_accepted"
DRAFT_POSITION = "foretoken.draft_position"
QUEUE_MS = "foretoken.queue_ms"

# Generation metrics (semantic conventions), seconds.
METRIC_REQUEST_DURATION = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"

# Speculation metrics: raw counters, in the schema vLLM set and llama.cpp copied.
METRIC_DRAFTS = "foretoken.drafts"
METRIC_DRAFT_TOKENS = "foretoken.draft_tokens"
METRIC_ACCEPTED_TOKENS = "foretoken.accepted_tokens"
METRIC_ACCEPTED_TOKENS_PER_POSITION = "foretoken.accepted_tokens_per_position"
METRIC_EMITTED_TOKENS = "foretoken.emitted_tokens"
METRIC_FAILED_DRAFTS = "foretoken.failed_drafts"
METRIC_FAILOVERS = "foretoken.failovers"
METRIC_REQUESTS = "foretoken.requests"
METRIC_REQUESTS_RUNNING = "foretoken.requests.running"
METRIC_REQUESTS_WAITING = "foretoken.requests.waiting"
METRIC_QUEUE_DURATION = "foretoken.queue.duration"
METRIC_ROUND_OVERHEAD = "foretoken.round.overhead"

# Workers as their router sees them.
METRIC_WORKER_READY = "foretoken.worker.ready"
METRIC_WORKER_RUNNING = "foretoken.worker.sequences.running"
METRIC_WORKER_WAITING = "foretoken.worker.sequences.waiting"
METRIC_WORKER_PAGES_FREE = "foretoken.worker.pages.free"
METRIC_WORKER_PAGES_LIMIT = "foretoken.worker.pages.limit"
METRIC_WORKER_PREEMPTIONS = "foretoken.worker.preemptions"
METRIC_WORKER_CACHED_TOKENS = "foretoken.worker.cached_tokens"

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
