"""The limits of a `GenerateRequest`: what can be said without a model, then what needs the prompt's ids.

Knows no drafter by name and no tokenizer.
"""

from collections.abc import Sequence

from betoken.common.errors import InvalidArgumentError
from betoken.common.float32 import shortest
from betoken.rpc.validation.checks import check_count, check_enum, check_float, check_ids, check_range, check_text
from betoken.v1.generation_pb2 import (
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    Infill,
    Speculation,
    TokenizeRequest,
)
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_TYPICAL,
    DrafterChoice,
    OpenSequence,
    SamplingParams,
    VerificationMode,
)

MAX_TENANT_BYTES = 128
MAX_DRAFTER_NAME_BYTES = 256  # the path of a class may be long
MAX_DRAFTER_SETTINGS = 32
MAX_DRAFTER_SETTING_BYTES = 256
MAX_CHAT_ROLE_BYTES = 64
MAX_CHAT_MESSAGES = 16384
MAX_TOOLS = 1024
MAX_INFILL_FILES = 1024
MAX_FILE_NAME_BYTES = 4096
MAX_MODEL_ID_BYTES = 512
MAX_POSTERIOR_ALPHA = 10.0
MAX_DETOKENIZED_IDS = 1 << 20
MAX_SYSTEM_FINGERPRINT_BYTES = 128

_PROMPT = "must be set: one of prompt, prompt_ids, messages, infill"


def validate_generate(request: GenerateRequest) -> None:
    """Check the fields except `sampling` and the ids: see `validate_sampling`, `validate_prompt_ids`,
    `validate_resume_ids`.

    How long a draft and a prompt may be the workers know.

    Raises:
        InvalidArgumentError: a field outside its limits, or a reserved field that is set.
    """
    match request.WhichOneof("input"):
        case "prompt":
            pass  # an empty one may start from BOS
        case "prompt_ids":
            check_count("prompt_ids.ids", len(request.prompt_ids.ids), 1, 2**32)
        case "messages":
            _check_messages(request.messages)
        case "infill":
            _check_infill(request.infill)
        case _:
            raise InvalidArgumentError("input", "absent", _PROMPT)
    _check_added_tokens(request)
    check_text("model", request.model, MAX_MODEL_ID_BYTES)
    check_text("tenant", request.tenant, MAX_TENANT_BYTES)
    check_text("system_fingerprint", request.system_fingerprint, MAX_SYSTEM_FINGERPRINT_BYTES)
    _check_speculation(request.speculation)
    if request.HasField("constraint") and request.sampling.ignore_eos:
        raise InvalidArgumentError("sampling.ignore_eos", True, "must be false with a constraint, which EOS ends")
    if request.HasField("n") and request.n < 1:
        raise InvalidArgumentError("n", request.n, "must be at least 1")
    if request.n > 1 and request.resume_ids:
        raise InvalidArgumentError("n", request.n, "must be 1 with resume_ids, which belong to one answer")
    if request.HasField("prediction"):
        _check_prediction(request)


def validate_tokenize(request: TokenizeRequest) -> None:
    """Check a `TokenizeRequest`; an empty prompt is fine here.

    Raises:
        InvalidArgumentError: no input, or messages that are none.
    """
    match request.WhichOneof("input"):
        case "messages":
            _check_messages(request.messages)
        case None:
            raise InvalidArgumentError("input", "absent", "must be set: one of prompt, messages")
    _check_added_tokens(request)


def validate_detokenize(request: DetokenizeRequest, vocab_size: int) -> None:
    """Check a `DetokenizeRequest`.

    Raises:
        InvalidArgumentError: no ids, too many, or one outside the vocabulary.
    """
    check_count("ids", len(request.ids), 1, MAX_DETOKENIZED_IDS)
    check_ids("ids", request.ids, vocab_size)


def validate_prompt_ids(
    prompt_ids: Sequence[int], *, vocab_size: int, max_context: int, field: str = "prompt_ids.ids"
) -> None:
    """Check the prompt as ids: at least one, each in the vocabulary, room for one output token.

    `field` names what the caller sent: `prompt` or `messages` when the ids come from text.

    Raises:
        InvalidArgumentError: the prompt is empty, too long, or holds an id outside the vocabulary.
    """
    if not prompt_ids:
        raise InvalidArgumentError(field, "0 tokens", "must be at least one token")
    if len(prompt_ids) >= max_context:
        limit = f"must be at most {max_context - 1} (the context of {max_context} less one output token)"
        raise InvalidArgumentError(field, f"{len(prompt_ids)} tokens", limit)
    check_ids(field, prompt_ids, vocab_size)


def check_is_text(prompt_ids: Sequence[int], media_token_ids: Sequence[int], field: str = "prompt_ids.ids") -> None:
    """Refuse ids that stand for images, sound or video, which are not served.

    Raises:
        InvalidArgumentError: the prompt holds one of `media_token_ids`.
    """
    if media := set(media_token_ids).intersection(prompt_ids):
        index, value = next((index, value) for index, value in enumerate(prompt_ids) if value in media)
        limit = "must be a token of text, and this one stands for an image, sound or video"
        raise InvalidArgumentError(f"{field}[{index}]", value, limit)


def validate_resume_ids(
    resume_ids: Sequence[int], *, vocab_size: int, max_new_tokens: int, temperature: float, has_seed: bool
) -> None:
    """Check `resume_ids` against the resolved sampling.

    `has_seed`: whether the request itself carries a seed; without one a sampled answer cannot be continued.

    Raises:
        InvalidArgumentError: too many ids, an id outside the vocabulary, or a missing seed.
    """
    if not resume_ids:
        return
    if len(resume_ids) > max_new_tokens:
        limit = f"must be at most sampling.max_new_tokens = {max_new_tokens}"
        raise InvalidArgumentError("resume_ids", f"{len(resume_ids)} tokens", limit)
    check_ids("resume_ids", resume_ids, vocab_size)
    if temperature != 0 and not has_seed:
        limit = "must be set to the first stream's seed, since resume_ids are given and temperature is not 0"
        raise InvalidArgumentError("sampling.seed", "absent", limit)


def check_num_received(field: str, num_sent: int, sampling: SamplingParams, prompt_length: int) -> None:
    """Check the number of prompt logprobs already received; must be 0 if none are requested."""
    if num_sent and not sampling.HasField("prompt_logprobs"):
        raise InvalidArgumentError(field, num_sent, "must be 0 without sampling.prompt_logprobs")
    check_range(field, num_sent, 0, prompt_length - 1)


def check_drafter(field: str, drafter: DrafterChoice) -> None:
    """Sizes only; names and settings are the draft worker's to know."""
    check_text(f"{field}.name", drafter.name, MAX_DRAFTER_NAME_BYTES)
    check_count(f"{field}.settings", len(drafter.settings), 0, MAX_DRAFTER_SETTINGS)
    for key, value in drafter.settings.items():
        check_text(f"{field}.settings", key, MAX_DRAFTER_SETTING_BYTES)
        check_text(f"{field}.settings[{key}]", value, MAX_DRAFTER_SETTING_BYTES)


def _check_prediction(request: GenerateRequest) -> None:
    if request.prediction.WhichOneof("kind") is None:
        raise InvalidArgumentError("prediction", "absent", "must have one of text, ids")
    if request.speculation.off:
        raise InvalidArgumentError("prediction", "set", "must be absent where speculation.off is set")


def _check_added_tokens(request: GenerateRequest | TokenizeRequest) -> None:
    if request.HasField("add_special_tokens") and request.WhichOneof("input") != "prompt":
        raise InvalidArgumentError("add_special_tokens", request.add_special_tokens, "must be absent without prompt")


def _check_infill(infill: Infill) -> None:
    check_count("infill.files", len(infill.files), 0, MAX_INFILL_FILES)
    for index, file in enumerate(infill.files):
        check_text(f"infill.files[{index}].name", file.name, MAX_FILE_NAME_BYTES)


def _check_messages(messages: ChatMessages) -> None:
    check_count("messages.messages", len(messages.messages), 1, MAX_CHAT_MESSAGES)
    for index, message in enumerate(messages.messages):
        field = f"messages.messages[{index}].role"
        check_count(field, len(message.role.encode("utf-8", "surrogatepass")), 1, MAX_CHAT_ROLE_BYTES, "bytes")
    check_count("messages.tools", len(messages.tools), 0, MAX_TOOLS)


def check_typical(prefix: str, message: Speculation | OpenSequence, *, is_typical: bool) -> None:
    """`posterior_threshold` and `posterior_alpha` of a message: in range, and absent but in the mode TYPICAL."""
    for name, high in (("posterior_threshold", 1.0), ("posterior_alpha", MAX_POSTERIOR_ALPHA)):
        if message.HasField(name):
            value = getattr(message, name)
            if not is_typical:
                raise InvalidArgumentError(
                    f"{prefix}.{name}", shortest(value), "must be absent but in the mode TYPICAL"
                )
            check_float(f"{prefix}.{name}", value, 0, high)


def _check_speculation(speculation: Speculation) -> None:
    check_drafter("speculation.drafter", speculation.drafter)
    if speculation.HasField("num_draft_tokens") and speculation.num_draft_tokens < 1:
        raise InvalidArgumentError("speculation.num_draft_tokens", 0, "must be at least 1")
    check_enum("speculation.mode", speculation.mode, VerificationMode.values())
    check_typical("speculation", speculation, is_typical=speculation.mode == VERIFICATION_MODE_TYPICAL)
    if speculation.off:
        _check_off(speculation)


def _check_off(speculation: Speculation) -> None:
    limit = "must be absent where speculation.off is set"
    if speculation.drafter.name:
        raise InvalidArgumentError("speculation.drafter.name", speculation.drafter.name, limit)
    if speculation.drafter.settings:
        raise InvalidArgumentError("speculation.drafter.settings", dict(speculation.drafter.settings), limit)
    if speculation.HasField("num_draft_tokens"):
        raise InvalidArgumentError("speculation.num_draft_tokens", speculation.num_draft_tokens, limit)
