"""Linear recurrences of a flat ragged batch, chains and trees: Gated DeltaNet, Mamba and the like in one op.

One arithmetic serves prefill and decoding: row after row, in float32. A sequence has one committed state; inputs of
tokens that a result may still reject wait in a ring and are applied by the forward after it. It knows no models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.cpu import CPU_DTYPES
from betoken.kernels.cpu.recurrent import load_recurrent_kernels
from betoken.kernels.linear_recurrence.reference import linear_recurrence_reference
from betoken.kernels.linear_recurrence.rule import Recurrence, RecurrentPool
from betoken.kernels.state_conv import columns_of
from betoken.kernels.state_rows import StateRows

__all__ = [
    "Recurrence",
    "RecurrentPool",
    "linear_recurrence",
    "linear_recurrence_native",
    "linear_recurrence_reference",
]

_TRITON = dispatch.triton("betoken.kernels.linear_recurrence.kernel", "linear_recurrence_triton")


def linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    pool: RecurrentPool,
    rows: StateRows,
    rule: Recurrence,
    rates: Tensor | None = None,
) -> Tensor:
    """Run each row's recurrence along its own path, and advance the committed states.

    For every head with state S [D, E] (at first zero) and inputs q, k, v, log decay g [F] and beta:

        S <- exp(g) * S                               decay per row of S if F = D, one for all if F = 1
        u  = v - S^T k  with the delta rule, else v
        S <- S + k (beta * u)^T
        out = S^T (scale * q)

    With rates r each element of the state has its own decay; step t [E] replaces the gates:

        S <- exp(r * t) * S + k (t * v)^T             k v^T if the rule does not weigh

    Sums over D run in float32, in an order that depends on D alone: ascending on a CPU; the squares of a length run in
    sixteen sums, each of every sixteenth number, which are then added by halves. Head h reads key head h * G // H. A
    row depends on its path alone: in a prefill chunk, after a draft or as a node of a tree it has the same bits.

    Args:
        query: [R, G, D]. key: [R, G, D]. value: [R, H, E]; one dtype; H a multiple of G. Each may be a part of wider
            rows.
        gates: [R, H, F + 1] float32: log decays (at most 0), then beta. F is 1 or D. With rates: [R, H, E], steps.
        pool: states and rings. W is at least the number of slots after `rows.committed`.
        rows: positions of the rows and slots of their states.
        rule: which of the rules.
        rates: [H, D, E] float32, dense: log decays of a step of 1, at most 0; not with the delta rule.

    Returns:
        [R, H, E] float32.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.

    Source:
        Yang et al., "Gated Delta Networks", arXiv:2412.06464, equation 10; Dao and Gu, "Transformers are SSMs",
        arXiv:2405.21060, equation 6 (k = B, q = C, v = x, beta = dt, g = dt * A); with rates Gu and Dao, "Mamba",
        arXiv:2312.00752, algorithm 2 (t = dt, r = A), and De et al., "Griffin", arXiv:2402.19427, section 2.4.
    """
    _check(query, key, value, gates, pool)
    _check_rates(gates, pool, rule, rates)
    table: dict[dispatch.PathName, Callable[..., Tensor]] = {
        "reference": linear_recurrence_reference,
        "triton": _TRITON,
    }
    if value.device.type == "cpu" and value.dtype in CPU_DTYPES and load_recurrent_kernels() is not None:
        table["native"] = linear_recurrence_native
    _, implementation = dispatch.select(value.device, table)
    return implementation(query, key, value, gates, pool, rows, rule, rates)


def linear_recurrence_native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    pool: RecurrentPool,
    rows: StateRows,
    rule: Recurrence,
    rates: Tensor | None = None,
) -> Tensor:
    """`linear_recurrence` by the CPU kernels, which must have been loaded."""
    out: Tensor = torch.ops.betoken.recur_over(query, key, value, gates, *pool, *columns_of(rows), rates, *rule)
    return out


def _check(query: Tensor, key: Tensor, value: Tensor, gates: Tensor, pool: RecurrentPool) -> None:
    if query.dim() != 3 or query.shape != key.shape or value.dim() != 3 or len(value) != len(query):
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} do not fit")
    (num_rows, num_key_heads, key_size), (_, num_heads, value_size) = query.shape, value.shape
    if num_heads % num_key_heads:
        raise ValueError(f"{num_heads} value heads are not a multiple of {num_key_heads} key heads")
    if gates.dim() != 3 or gates.shape[:2] != (num_rows, num_heads):
        raise ValueError(f"gates {list(gates.shape)} must be [{num_rows}, {num_heads}, ...]")
    lead = pool.keys.shape[:2]
    expected = {
        "state": (lead[0], num_heads, key_size, value_size),
        "keys": (*lead, num_key_heads, key_size),
        "values": (*lead, num_heads, value_size),
        "gates": (*lead, num_heads, gates.shape[2]),
    }
    for name, shape in expected.items():
        tensor: Tensor = getattr(pool, name)
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"pool.{name} is {list(tensor.shape)}, must be dense {list(shape)}")
    if not query.dtype == key.dtype == value.dtype == pool.keys.dtype == pool.values.dtype:
        raise ValueError("query, key, value and their rings must be of one dtype")
    if not gates.dtype == pool.gates.dtype == pool.state.dtype == torch.float32:
        raise ValueError("gates and states must be float32")


def _check_rates(gates: Tensor, pool: RecurrentPool, rule: Recurrence, rates: Tensor | None) -> None:
    num_heads, key_size, value_size = pool.state.shape[1:]
    sizes = (2, key_size + 1) if rates is None else (value_size,)
    if gates.shape[2] not in sizes:
        raise ValueError(f"gates {list(gates.shape)} must be of {' or '.join(map(str, sizes))} numbers a head")
    if rates is None:
        if not rule.weighs:
            raise ValueError("values without weights are for rates alone")
        return
    if rates.shape != (num_heads, key_size, value_size) or rates.dtype != torch.float32 or not rates.is_contiguous():
        raise ValueError(
            f"rates {list(rates.shape)} {rates.dtype} must be dense float32 {[num_heads, key_size, value_size]}"
        )
    if rule.is_delta:
        raise ValueError("the delta rule has no rates")
