"""Limits equal the proto comments: one row per field and edge, each refusal naming field, value and limit."""

import math
import re
from pathlib import Path

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.rpc.validation import (
    BlockLimits,
    validate_block,
    validate_commit,
    validate_draft_request,
    validate_frame,
    validate_generate,
    validate_open,
    validate_prompt_ids,
    validate_resume_ids,
    validate_sampling,
    validate_tokenize,
)
from betoken.rpc.validation import sampling as sampling_limits
from betoken.v1 import types_pb2
from betoken.v1.draft_pb2 import Commit, DraftRequest, DraftTerms
from betoken.v1.generation_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    Speculation,
    TokenIds,
    TokenizeRequest,
)
from betoken.v1.types_pb2 import DrafterChoice, LogitBias, OpenSequence, SamplingParams, SparseDistribution
from betoken.v1.verify_pb2 import DraftBlock

VOCAB, CONTEXT = 64, 32


def check(sampling: SamplingParams) -> None:
    validate_sampling(sampling, vocab_size=VOCAB, max_context=CONTEXT, prompt_length=10)


ACCEPTED_SAMPLING = [
    {},
    *({"temperature": value} for value in (0.0, 1e-6, 0.01, 0.8, 100.0)),
    *({"top_k": value} for value in (0, 1, VOCAB)),
    *({"top_p": value} for value in (1e-6, 0.95, 1.0)),
    *({"min_p": value} for value in (0.0, 1.0)),
    *({"repetition_penalty": value} for value in (0.001, 10.0)),
    *({"presence_penalty": value} for value in (-2.0, 2.0)),
    *({"frequency_penalty": value} for value in (-2.0, 2.0)),
    {"logit_bias": [LogitBias(token_id=63, bias=-100.0), LogitBias(token_id=0, bias=100.0)]},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"max_new_tokens": 1},
    {"max_new_tokens": 22},
    {"max_new_tokens": 5, "min_new_tokens": 5},
    {"stop": ["x" * 256] * 16},
    {"stop_token_ids": [63] * 64},
    {"ignore_eos": True},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20, "max_new_tokens": 0},
]
REFUSED_SAMPLING = [
    ({"temperature": -1.0}, "sampling.temperature = -1.0: must be 0 to 100"),
    ({"temperature": 100.5}, "sampling.temperature = 100.5: must be 0 to 100"),
    ({"temperature": math.nan}, "sampling.temperature = nan: must be 0 to 100"),
    ({"temperature": math.inf}, "sampling.temperature = inf: must be 0 to 100"),
    ({"top_k": 65}, "sampling.top_k = 65: must be 0 to 64"),
    ({"top_p": 0.0}, "sampling.top_p = 0.0: must be above 0 and at most 1"),
    ({"top_p": 1.01}, "sampling.top_p = 1.01: must be above 0 and at most 1"),
    ({"top_p": math.nan}, "sampling.top_p = nan: must be above 0 and at most 1"),
    ({"min_p": -0.1}, "sampling.min_p = -0.1: must be 0 to 1"),
    ({"min_p": 1.1}, "sampling.min_p = 1.1: must be 0 to 1"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty = 0.0: must be 0.001 to 10"),
    ({"repetition_penalty": 1e-38}, "sampling.repetition_penalty = 1e-38: must be 0.001 to 10"),
    ({"repetition_penalty": 10.1}, "sampling.repetition_penalty = 10.1: must be 0.001 to 10"),
    ({"presence_penalty": -2.1}, "sampling.presence_penalty = -2.1: must be -2 to 2"),
    ({"frequency_penalty": math.inf}, "sampling.frequency_penalty = inf: must be -2 to 2"),
    (
        {"logit_bias": [LogitBias(token_id=64)]},
        "sampling.logit_bias[0].token_id = 64: must be below",
    ),
    ({"logit_bias": [LogitBias(token_id=1)] * 2}, "sampling.logit_bias[1].token_id = 1: must be unique"),
    ({"logit_bias": [LogitBias(bias=math.nan)]}, "sampling.logit_bias[0].bias = nan: must be -100 to 100"),
    ({"logit_bias": [LogitBias(bias=100.5)]}, "sampling.logit_bias[0].bias = 100.5: must be -100 to 100"),
    ({"logit_bias": [LogitBias()] * 1025}, "sampling.logit_bias = 1025 entries: must be at most 1024"),
    ({"max_new_tokens": 0}, "sampling.max_new_tokens = 0: must be 1 to 22"),
    ({"max_new_tokens": 23}, "sampling.max_new_tokens = 23: must be 1 to 22"),
    ({"min_new_tokens": 23}, "sampling.min_new_tokens = 23: must be 0 to 22"),
    ({"max_new_tokens": 5, "min_new_tokens": 6}, "sampling.min_new_tokens = 6: must be 0 to 5"),
    ({"stop": ["x"] * 17}, "sampling.stop = 17 entries: must be at most 16"),
    ({"stop": ["x", ""]}, "sampling.stop[1] = 0 bytes: must be at least 1"),
    ({"stop": ["ä" * 129]}, "sampling.stop[0] = 258 bytes: must be at most 256"),
    ({"stop_token_ids": [1, 64]}, "sampling.stop_token_ids[1] = 64: must be below the vocabulary size 64"),
    ({"stop_token_ids": [1] * 65}, "sampling.stop_token_ids = 65 entries: must be at most 64"),
    ({"logprobs": 21}, "sampling.logprobs = 21: must be 0 to 20"),
    ({"prompt_logprobs": 21}, "sampling.prompt_logprobs = 21: must be 0 to 20"),
    ({"prompt_logprobs": 0, "max_new_tokens": 23}, "sampling.max_new_tokens = 23: must be 0 to 22"),
    (
        {"prompt_logprobs": 0, "max_new_tokens": 0, "min_new_tokens": 1},
        "sampling.min_new_tokens = 1: must be 0 to 0",
    ),
]


@pytest.mark.parametrize("fields", ACCEPTED_SAMPLING, ids=str)
def test_sampling_is_accepted(fields):
    check(SamplingParams(**fields))


@pytest.mark.parametrize(("fields", "text"), REFUSED_SAMPLING, ids=[text for _, text in REFUSED_SAMPLING])
def test_sampling_is_refused(fields, text):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        check(SamplingParams(**fields))


def test_limits_equal_the_comments_of_the_proto():
    proto = Path(types_pb2.__file__).with_name("types.proto").read_text()
    for pattern, value in {
        r"below ([\d.]+) = greedy; at most 100\.": sampling_limits.MIN_TEMPERATURE,
        r"([\d.]+) to \d+\. Neutral: 1\.\n  optional float repetition": sampling_limits.MIN_REPETITION_PENALTY,
        r"to (\d+)\. Neutral: 1\.\n  optional float repetition": sampling_limits.MAX_REPETITION_PENALTY,
        r"unique ids, at most (\d+) entries": sampling_limits.MAX_LOGIT_BIASES,
        r"first match; at most (\d+), each": sampling_limits.MAX_STOP_STRINGS,
        r"each 1 to (\d+) bytes": sampling_limits.MAX_STOP_STRING_BYTES,
        r"in addition to EOS; at most (\d+)": sampling_limits.MAX_STOP_TOKEN_IDS,
        r"besides the token itself; 0 to (\d+)": sampling_limits.MAX_LOGPROBS,
        r"finite, -100 to (\d+)": sampling_limits.MAX_LOGIT_BIAS,
    }.items():
        found = re.search(pattern, proto)
        assert found, pattern
        assert float(found[1]) == value, pattern


REFUSED_REQUESTS = [
    (GenerateRequest(), "input = absent: must be set"),
    (GenerateRequest(prompt_ids=TokenIds()), "prompt_ids.ids = 0 entries: must be at least 1"),
    (GenerateRequest(messages=ChatMessages()), "messages.messages = 0 entries: must be at least 1"),
    (
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="user")]), add_special_tokens=True),
        "add_special_tokens = True: must be absent without prompt",
    ),
    (
        GenerateRequest(prompt_ids=TokenIds(ids=[1]), add_special_tokens=False),
        "add_special_tokens = False: must be absent without prompt",
    ),
    (
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(content="x")])),
        "messages.messages[0].role = 0 bytes: must be at least 1",
    ),
    (
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="r" * 65)])),
        "messages.messages[0].role = 65 bytes: must be at most 64",
    ),
    (
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="user")] * 16385)),
        "messages.messages = 16385 entries: must be at most 16384",
    ),
    (GenerateRequest(prompt="x", model="m" * 513), "model = 513 bytes: must be at most 512"),
    (GenerateRequest(prompt="x", system_fingerprint="f" * 129), "system_fingerprint = 129 bytes: must be at most 128"),
    (GenerateRequest(prompt="x", tenant="t" * 129), "tenant = 129 bytes: must be at most 128"),
    (
        GenerateRequest(prompt="x", constraint={"json_object": True}, sampling={"ignore_eos": True}),
        "sampling.ignore_eos = True: must be false with a constraint, which EOS ends",
    ),
    (GenerateRequest(prompt="x", speculation=Speculation(mode=9)), "speculation.mode = 9: must be one of 0, 1, 2, 3"),
    (
        GenerateRequest(prompt="x", speculation=Speculation(num_draft_tokens=0)),
        "speculation.num_draft_tokens = 0: must be at least 1",
    ),
    (
        GenerateRequest(prompt="x", speculation=Speculation(drafter=DrafterChoice(name="d" * 257))),
        "speculation.drafter.name = 257 bytes: must be at most 256",
    ),
    (
        GenerateRequest(
            prompt="x", speculation=Speculation(drafter=DrafterChoice(settings={str(i): "" for i in range(33)}))
        ),
        "speculation.drafter.settings = 33 entries: must be at most 32",
    ),
    (
        GenerateRequest(prompt="x", speculation=Speculation(drafter=DrafterChoice(settings={"s" * 257: "1"}))),
        "speculation.drafter.settings = 257 bytes: must be at most 256",
    ),
    (
        GenerateRequest(prompt="x", speculation=Speculation(off=True, drafter=DrafterChoice(name="ngram"))),
        "speculation.drafter.name = ngram: must be absent where speculation.off is set",
    ),
    (
        GenerateRequest(prompt="x", speculation=Speculation(off=True, drafter=DrafterChoice(settings={"a": "1"}))),
        "speculation.drafter.settings = {'a': '1'}: must be absent where speculation.off is set",
    ),
    (
        GenerateRequest(prompt="x", speculation=Speculation(off=True, num_draft_tokens=4)),
        "speculation.num_draft_tokens = 4: must be absent where speculation.off is set",
    ),
]


@pytest.mark.parametrize(("request_", "text"), REFUSED_REQUESTS, ids=[text for _, text in REFUSED_REQUESTS])
def test_a_generate_request_is_rejected_by_field(request_, text):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        validate_generate(request_)


LONGEST_DRAFTER = DrafterChoice(name="d" * 256, settings={f"{i:0256}": "v" * 256 for i in range(32)})


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompt="x", tenant="t" * 128, model="m" * 512, system_fingerprint="f" * 128),
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="r" * 64)] * 16384)),
        GenerateRequest(prompt="x", speculation=Speculation(num_draft_tokens=1, drafter=LONGEST_DRAFTER)),
        GenerateRequest(prompt_ids=TokenIds(ids=[1])),
        GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="user")])),
        GenerateRequest(prompt="x", speculation=Speculation(num_draft_tokens=16, mode=1)),
        GenerateRequest(prompt="x", speculation=Speculation(mode=1, off=True)),
    ],
    ids=lambda request_: str(request_)[:80],
)
def test_a_generate_request_is_accepted(request_):
    validate_generate(request_)


def test_a_tokenize_request_needs_an_input():
    validate_tokenize(TokenizeRequest(prompt=""))
    with pytest.raises(InvalidArgumentError, match="input = absent"):
        validate_tokenize(TokenizeRequest())


def test_prompt_ids_are_checked_against_the_vocabulary_and_the_context():
    validate_prompt_ids([63] * 31, vocab_size=VOCAB, max_context=CONTEXT)
    with pytest.raises(InvalidArgumentError, match=r"prompt_ids.ids = 0 tokens: must be at least one"):
        validate_prompt_ids([], vocab_size=VOCAB, max_context=CONTEXT)
    with pytest.raises(InvalidArgumentError, match=r"prompt = 32 tokens: must be at most 31"):
        validate_prompt_ids([1] * 32, vocab_size=VOCAB, max_context=CONTEXT, field="prompt")
    with pytest.raises(InvalidArgumentError, match=r"prompt_ids.ids\[1\] = 64: must be below the vocabulary size 64"):
        validate_prompt_ids([1, 64, 99], vocab_size=VOCAB, max_context=CONTEXT)


def test_resume_ids_are_checked_against_the_vocabulary_and_the_length():
    limits = {"vocab_size": VOCAB, "max_new_tokens": 4}
    validate_resume_ids([], **limits, temperature=1.0, has_seed=False)
    validate_resume_ids([1] * 4, **limits, temperature=0.0, has_seed=False)
    validate_resume_ids([1], **limits, temperature=1.0, has_seed=True)
    with pytest.raises(InvalidArgumentError, match="resume_ids = 5 tokens: must be at most"):
        validate_resume_ids([1] * 5, **limits, temperature=0.0, has_seed=True)
    with pytest.raises(InvalidArgumentError, match="sampling.seed = absent: must be set"):
        validate_resume_ids([1], **limits, temperature=1.0, has_seed=False)
    with pytest.raises(InvalidArgumentError, match=r"resume_ids\[0\] = 64"):
        validate_resume_ids([64], **limits, temperature=0.0, has_seed=True)


def opened(**changes) -> OpenSequence:
    fields = {"sequence_id": 1, "prompt_ids": [1, 2], "max_length": 8, "sampling": SamplingParams(seed=1)}
    return OpenSequence(**{**fields, **changes})


REFUSED_OPENS = [
    ({"sequence_id": 0}, "open.sequence_id = 0: must be at least 1"),
    ({"prompt_ids": []}, "open.prompt_ids = 0 tokens: must be at least 1"),
    ({"prompt_ids": [1] * 32}, "open.prompt_ids = 32 tokens: must be at most 31"),
    ({"prompt_ids": [64]}, "open.prompt_ids[0] = 64: must be below"),
    ({"committed_ids": [0, 64]}, "open.committed_ids[1] = 64: must be below"),
    ({"max_length": 2}, "open.max_length = 2: must be 3"),
    ({"max_length": 33}, "open.max_length = 33: must be 3"),
    ({"committed_ids": [1] * 6}, "open.max_length = 8: must be 9"),
    ({"sampling": SamplingParams(seed=1, temperature=-1)}, "open.sampling.temperature = -1.0"),
    ({"sampling": SamplingParams()}, "open.sampling.seed = absent"),
    ({"sampling": SamplingParams(seed=1, min_new_tokens=7)}, "open.sampling.min_new_tokens = 7: must be 0 to 6"),
    ({"mode": 4}, "open.mode = 4: must be one of 0, 1, 2, 3"),
    ({"eos_token_ids": range(81)}, "open.eos_token_ids = 81 entries: must be at most 80"),
    ({"eos_token_ids": [64]}, "open.eos_token_ids[0] = 64"),
    ({"traceparent": "t" * 257}, "open.traceparent = 257 bytes"),
    ({"drafter": DrafterChoice(name="d" * 257)}, "open.drafter.name = 257 bytes"),
    ({"tenant_hash": b"t" * 65}, "open.tenant_hash = 65 bytes: must be at most 64"),
    ({"num_prompt_logprobs_sent": 1}, "open.num_prompt_logprobs_sent = 1: must be 0 without sampling.prompt_logprobs"),
    (
        {"num_prompt_logprobs_sent": 2, "sampling": SamplingParams(seed=1, prompt_logprobs=0)},
        "open.num_prompt_logprobs_sent = 2: must be 0 to 1",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED_OPENS, ids=[text for _, text in REFUSED_OPENS])
def test_an_open_is_refused(changes, text):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        validate_open(opened(**changes), vocab_size=VOCAB, max_context=CONTEXT)


def test_an_open_is_accepted():
    for entry in (
        opened(traceparent="t" * 256, eos_token_ids=range(64)),
        opened(committed_ids=[1] * 5),
        opened(sampling=SamplingParams(temperature=0, min_new_tokens=6)),
        opened(sampling=SamplingParams(seed=1, prompt_logprobs=5, max_new_tokens=0), num_prompt_logprobs_sent=1),
    ):
        validate_open(entry, vocab_size=VOCAB, max_context=CONTEXT)


def blocked(**changes) -> DraftBlock:
    return DraftBlock(**{"sequence_id": 1, "base_length": 3, "draft_ids": [5, 6], **changes})


REFUSED_BLOCKS = [
    ({"sequence_id": 0}, "block.sequence_id = 0"),
    ({"base_length": 0}, "block.base_length = 0: must be at least 1"),
    ({"draft_ids": [1] * 17}, "block.draft_ids = 17 entries: must be at most 16"),
    ({"draft_ids": [1, 64]}, "block.draft_ids[1] = 64: must be below"),
    ({"num_plain_steps": 1025}, "block.num_plain_steps = 1025: must be 0 to 1024"),
    ({"parents": [-1]}, "block.parents = 1 entries: must be absent or one per draft token, 2"),
    ({"parents": [-1, 1]}, "block.parents[1] = 1: must be -1 to 0"),
    ({"parents": [-2, 0]}, "block.parents[0] = -2: must be -1 to -1"),
    ({"parents": [-1, -1]}, "block.parents[1] = -1: must be 0, as this worker takes chains only"),
    ({"draft_probs": [SparseDistribution()]}, "block.draft_probs = 1 entries"),
    ({"draft_probs": [SparseDistribution()] * 2}, "block.draft_probs[0].token_ids = 0 entries: must be at least 1"),
    ({"draft_probs": [SparseDistribution(token_ids=[1])] * 2}, "block.draft_probs[0].probs = 0 entries"),
    (
        {"draft_probs": [SparseDistribution(token_ids=[1, 1], probs=[0.5, 0.5])] * 2},
        "block.draft_probs[0].token_ids = a repeated id: must be unique",
    ),
    (
        {"draft_probs": [SparseDistribution(token_ids=range(65), probs=[1 / 65] * 65)] * 2},
        "block.draft_probs[0].token_ids = 65 entries: must be at most 64",
    ),
    (
        {"draft_probs": [SparseDistribution(token_ids=[1], probs=[math.nan])] * 2},
        "block.draft_probs[0].probs[0] = nan: must be finite",
    ),
    (
        {"draft_probs": [SparseDistribution(token_ids=[1], probs=[0.5])] * 2},
        "block.draft_probs[0].probs = a sum of 0.5: must sum to 1",
    ),
    (
        {"draft_probs": [SparseDistribution(token_ids=[1, 5], probs=[1.0, 0.0])] * 2},
        "block.draft_probs[0].token_ids = 5: the draft token must have a probability above 0",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED_BLOCKS, ids=[text for _, text in REFUSED_BLOCKS])
def test_a_block_is_refused(changes, text):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        validate_block(blocked(**changes), BlockLimits(VOCAB, 16))


def test_a_block_is_accepted():
    chains, trees = BlockLimits(VOCAB, 16), BlockLimits(VOCAB, 16, supports_trees=True)
    validate_block(blocked(), chains)
    validate_block(blocked(draft_ids=[], num_plain_steps=1024), chains)
    validate_block(blocked(parents=[-1, 0]), chains)
    validate_block(blocked(parents=[-1, -1]), trees)
    probs = [SparseDistribution(token_ids=[1, 2], probs=[0.25, 0.75])] * 2
    validate_block(blocked(draft_ids=[1, 2], draft_probs=probs), chains)
    probs = [SparseDistribution(token_ids=range(64), probs=[1 / 64] * 64)] * 2
    validate_block(blocked(draft_probs=probs), chains)


def test_entries_of_a_frame_are_bounded():
    validate_frame(range(1 << 16), range(1 << 16))
    with pytest.raises(InvalidArgumentError, match="frame = 65537 entries: must be at most 65536 of a kind"):
        validate_frame([], range((1 << 16) + 1))


@pytest.mark.parametrize(
    ("commit", "text"),
    [
        (Commit(base_length=1, ids=[1]), "commit.sequence_id = 0"),
        (Commit(sequence_id=1, base_length=1), "commit.ids = 0 tokens"),
        (Commit(sequence_id=1, base_length=0, ids=[1]), "commit.base_length = 0: must be 1 to 31"),
        (Commit(sequence_id=1, base_length=32, ids=[1]), "commit.base_length = 32: must be 1 to 31"),
        (Commit(sequence_id=1, base_length=1, ids=[64]), "commit.ids[0] = 64"),
    ],
)
def test_a_commit_is_refused(commit, text):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        validate_commit(commit, vocab_size=VOCAB, max_context=CONTEXT)


def check_draft_request(**changes):
    fields = {"sequence_id": 1, "base_length": 7, "next_id": 3, "num_tokens": 5} | changes
    validate_draft_request(DraftRequest(**fields), max_draft_tokens=16, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_tokens": 0}, "request.num_tokens = 0: must be 1 to 16"),
        ({"num_tokens": 17}, "request.num_tokens = 17: must be 1 to 16"),
        ({"base_length": 0}, "request.base_length = 0: must be at least 1"),
        ({"next_id": VOCAB}, f"request.next_id = {VOCAB}: must be 0 to {VOCAB - 1}"),
        ({"num_outcomes": 17}, "request.num_outcomes = 17: must be 0 to 16"),
    ],
)
def test_a_draft_request_is_checked(changes, text):
    check_draft_request(num_tokens=16, next_id=VOCAB - 1)
    with pytest.raises(InvalidArgumentError, match=text):
        check_draft_request(**changes)


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"max_tokens": 4}, "request.terms.max_tokens = 4: must be 5 to 16"),
        ({"max_tokens": 17}, "request.terms.max_tokens = 17: must be 5 to 16"),
        ({"row_price": -0.5}, "request.terms.row_price = -0.5: must be at least 0"),
        ({"row_price": math.nan}, "request.terms.row_price = nan: must be at least 0"),
        ({"min_gain": -1.0}, "request.terms.min_gain = -1.0: must be at least 0"),
    ],
)
def test_terms_of_a_draft_request_are_checked(terms, text):
    def check(**changes):
        fields = {"max_tokens": 5, "row_price": 0.1, "min_gain": 0.5} | changes
        check_draft_request(terms=DraftTerms(**fields))

    check()
    check(row_price=0.0, min_gain=0.0)
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
        check(**terms)
