"""Good messages, of which mutants are made.

Knows the protocol; sends nothing.
"""

from __future__ import annotations

from google.protobuf.message import Message

from betoken.v1 import generation_pb2 as pb
from betoken.v1.draft_pb2 import Commit, DraftLinkRequest, DraftRequest, DraftTerms
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_REJECTION,
    VERIFICATION_MODE_TYPICAL,
    CloseSequence,
    DrafterChoice,
    LogitBias,
    OpenSequence,
    SamplingParams,
    SparseDistribution,
)
from betoken.v1.verify_pb2 import DraftBlock, VerifyLinkRequest

PROMPT_IDS = (5, 6, 7, 5, 6)

_SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=[LogitBias(token_id=3, bias=-1.0), LogitBias(token_id=9, bias=2.0)],
    seed=7,
    max_new_tokens=6,
    min_new_tokens=1,
    stop=["zz"],
    stop_token_ids=[3],
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
)
_PLAIN = SamplingParams(temperature=0.0, max_new_tokens=5)


def calls() -> dict[str, list[Message]]:
    """Requests of the public service by method."""
    drafter = pb.Speculation(drafter=DrafterChoice(name="ngram", settings={"max_ngram": "4"}), num_draft_tokens=3)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    ids = pb.TokenIds(ids=PROMPT_IDS)
    generates = [
        pb.GenerateRequest(prompt="def f(x):", sampling=_SAMPLING),
        pb.GenerateRequest(prompt_ids=ids, sampling=_PLAIN, speculation=drafter, tenant="t"),
        pb.GenerateRequest(messages=chat, sampling=_PLAIN, speculation=pb.Speculation(off=True)),
        pb.GenerateRequest(prompt_ids=ids, sampling=_SAMPLING, resume_ids=[8, 9]),
        pb.GenerateRequest(
            prompt_ids=ids, sampling=_SAMPLING, speculation=pb.Speculation(mode=VERIFICATION_MODE_REJECTION)
        ),
        pb.GenerateRequest(
            prompt_ids=ids, sampling=_SAMPLING, speculation=pb.Speculation(mode=VERIFICATION_MODE_TYPICAL)
        ),
    ]
    return {
        "Generate": list[Message](generates),
        "GetModelInfo": [pb.GetModelInfoRequest()],
        "Tokenize": [pb.TokenizeRequest(prompt="some text"), pb.TokenizeRequest(messages=chat)],
        "Detokenize": [pb.DetokenizeRequest(ids=PROMPT_IDS)],
    }


def _open(sequence_id: int, drafter: str = "") -> OpenSequence:
    entry = OpenSequence(
        sequence_id=sequence_id,
        prompt_ids=PROMPT_IDS,
        committed_ids=[8],
        sampling=_SAMPLING,
        eos_token_ids=[0],
        max_length=32,
        deadline_ms=20_000,
    )
    if drafter:
        entry.drafter.name = drafter
        entry.drafter.settings["max_ngram"] = "3"
    return entry


def verify_frames(first_id: int) -> list[Message]:
    """Frames of a router to a verify worker, to be sent in order; sequences are numbered from `first_id`."""
    length = len(PROMPT_IDS) + 1
    one, two, three = first_id, first_id + 1, first_id + 2
    certain = SparseDistribution(token_ids=[4, 5], probs=[0.25, 0.75])
    rejecting = _open(three)
    rejecting.mode = VERIFICATION_MODE_REJECTION
    return [
        VerifyLinkRequest(opens=[_open(one), _open(two)]),
        VerifyLinkRequest(
            blocks=[
                DraftBlock(sequence_id=one, base_length=length, draft_ids=[4, 5, 6], parents=[-1, 0, 0]),
                DraftBlock(sequence_id=two, base_length=length, num_plain_steps=4),
            ]
        ),
        VerifyLinkRequest(
            opens=[rejecting],
            blocks=[
                DraftBlock(
                    sequence_id=three,
                    base_length=length,
                    draft_ids=[5],
                    draft_probs=[certain],
                )
            ],
        ),
        VerifyLinkRequest(closes=[CloseSequence(sequence_id=one), CloseSequence(sequence_id=two)]),
    ]


def draft_frames(first_id: int) -> list[Message]:
    """The same towards a draft worker."""
    length = len(PROMPT_IDS) + 1
    one, two = first_id, first_id + 1
    terms = DraftTerms(max_tokens=5, row_price=0.1, min_gain=0.2)
    return [
        DraftLinkRequest(
            opens=[_open(one, "ngram"), _open(two)], requests=[DraftRequest(sequence_id=one, num_tokens=3)]
        ),
        DraftLinkRequest(requests=[DraftRequest(sequence_id=two, num_tokens=3, takes_trees=True, terms=terms)]),
        DraftLinkRequest(
            commits=[Commit(sequence_id=one, base_length=length, ids=[4, 5])],
            requests=[DraftRequest(sequence_id=one, num_tokens=2)],
        ),
        DraftLinkRequest(closes=[CloseSequence(sequence_id=one), CloseSequence(sequence_id=two)]),
    ]
