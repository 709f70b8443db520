"""The conditions on a request or a link entry, exactly as the proto comments say; refusals name field, value and limit.

The router checks requests at the edge, workers check every entry again: neither trusts the other. Knows no services.
"""

from betoken.rpc.validation.checks import check_count, check_range
from betoken.rpc.validation.constraint import validate_constraint
from betoken.rpc.validation.entries import (
    CONTEXT_FIELDS,
    BlockLimits,
    validate_block,
    validate_commit,
    validate_distribution,
    validate_draft_request,
    validate_frame,
    validate_open,
)
from betoken.rpc.validation.request import (
    check_is_text,
    check_num_received,
    validate_detokenize,
    validate_generate,
    validate_prompt_ids,
    validate_resume_ids,
    validate_tokenize,
)
from betoken.rpc.validation.sampling import validate_sampling

__all__ = [
    "CONTEXT_FIELDS",
    "BlockLimits",
    "check_count",
    "check_is_text",
    "check_range",
    "check_num_received",
    "validate_block",
    "validate_commit",
    "validate_constraint",
    "validate_detokenize",
    "validate_distribution",
    "validate_draft_request",
    "validate_frame",
    "validate_generate",
    "validate_open",
    "validate_prompt_ids",
    "validate_resume_ids",
    "validate_sampling",
    "validate_tokenize",
]
