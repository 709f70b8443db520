"""The limits of `SamplingParams`, field by field, for requests and link entries. Knows three numbers of the model."""

from betoken.common.errors import InvalidArgumentError
from betoken.rpc.validation.checks import check_count, check_float, check_ids, check_range
from betoken.v1.types_pb2 import SamplingParams

MIN_TEMPERATURE = 0.01  # below it a request is greedy: logits over it would leave the range of their type
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.001  # logits over a much smaller one are infinite
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20


def validate_sampling(
    sampling: SamplingParams, *, vocab_size: int, max_context: int, prompt_length: int, prefix: str = "sampling"
) -> None:
    """Check every field that is set.

    Args:
        vocab_size: rows of the output layer.
        max_context: largest prompt + output, tokens.
        prompt_length: tokens of the prompt; `max_new_tokens` is at most what it leaves of the context.
        prefix: path of the message, for the text.

    Raises:
        InvalidArgumentError: the first field outside its limits.
    """
    _check_distribution(sampling, vocab_size, prefix)
    _check_penalties(sampling, vocab_size, prefix)
    _check_length(sampling, max_context - prompt_length, prefix)
    check_count(f"{prefix}.stop", len(sampling.stop), 0, MAX_STOP_STRINGS)
    for index, text in enumerate(sampling.stop):
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        check_count(f"{prefix}.stop[{index}]", num_bytes, 1, MAX_STOP_STRING_BYTES, "bytes")
    check_count(f"{prefix}.stop_token_ids", len(sampling.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
    check_ids(f"{prefix}.stop_token_ids", sampling.stop_token_ids, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(name):
            check_range(f"{prefix}.{name}", getattr(sampling, name), 0, MAX_LOGPROBS)


def _check_distribution(sampling: SamplingParams, vocab_size: int, prefix: str) -> None:
    if sampling.HasField("temperature"):
        check_float(f"{prefix}.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if sampling.HasField("top_k"):
        check_range(f"{prefix}.top_k", sampling.top_k, 0, vocab_size)
    if sampling.HasField("top_p"):
        check_float(f"{prefix}.top_p", sampling.top_p, 0, 1, above_low=True)
    if sampling.HasField("min_p"):
        check_float(f"{prefix}.min_p", sampling.min_p, 0, 1)


def _check_penalties(sampling: SamplingParams, vocab_size: int, prefix: str) -> None:
    if sampling.HasField("repetition_penalty"):
        field, value = f"{prefix}.repetition_penalty", sampling.repetition_penalty
        check_float(field, value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    if sampling.HasField("presence_penalty"):
        check_float(f"{prefix}.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.HasField("frequency_penalty"):
        check_float(f"{prefix}.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_count(f"{prefix}.logit_bias", len(sampling.logit_bias), 0, MAX_LOGIT_BIASES)
    seen: set[int] = set()
    for index, entry in enumerate(sampling.logit_bias):
        field = f"{prefix}.logit_bias[{index}]"
        if entry.token_id >= vocab_size:
            limit = f"must be below the vocabulary size {vocab_size}"
            raise InvalidArgumentError(f"{field}.token_id", entry.token_id, limit)
        if entry.token_id in seen:
            raise InvalidArgumentError(f"{field}.token_id", entry.token_id, "must be unique")
        seen.add(entry.token_id)
        check_float(f"{field}.bias", entry.bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_length(sampling: SamplingParams, room: int, prefix: str) -> None:
    if sampling.HasField("max_new_tokens"):
        field, value = f"{prefix}.max_new_tokens", sampling.max_new_tokens
        least = 0 if sampling.HasField("prompt_logprobs") else 1  # an empty answer is useful only with the prompt's
        if not least <= value <= room:
            limit = f"must be {least} to {room}, what the prompt leaves of the context"
            raise InvalidArgumentError(field, value, limit if room > 0 else "no room is left")
        room = value
    if sampling.HasField("min_new_tokens"):
        check_range(f"{prefix}.min_new_tokens", sampling.min_new_tokens, 0, room)
