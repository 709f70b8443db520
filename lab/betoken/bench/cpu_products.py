"""How long products of quantised weights take on a CPU, exact and with int8 activations, against reading the weights.

    python -m betoken.bench.cpu_products [--types Q4_K Q6_K] [--rows 1 6 32] [--threads 2] [--rounds 7]

Weights are random, of the shapes of a model of 1.5B parameters, and more than caches hold. Exact products are compared
with the torch reference, int8 products with the reference of rounded rows, and rows in a batch with rows alone; a
difference prints no speed. Times are minima over rounds in which all sides take turns, with one thread CPU time, which
other processes affect less. The floor is the bytes over the rate at which memory is summed up here. The last stdout
line is one JSON object; the status is 1 when a product was not right.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.bench.command import EXIT_NOTHING_MEASURED, positive
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.engine.weights.gguf.blocks import BLOCK_BYTES, read_blocks
from betoken.kernels.cpu import load_cpu_kernels
from betoken.kernels.cpu.grouped import PackedWeight
from betoken.kernels.linear_grouped import Grouped, linear_grouped
from betoken.kernels.linear_grouped.int8_rows import rounded

PROGRAM = "python -m betoken.bench.cpu_products"
TYPES = ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_0")
SHAPES = ((17920, 1536), (1536, 8960))
"""Outputs and inputs: gate and up, down."""
NUM_COPIES = 3
NUM_CHECKED = 8
_FLOAT16_AT = {"Q4_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,), "Q8_0": (0,), "Q4_0": (0,)}
"""Offsets of the float16 numbers of a block."""

Product = Callable[[Tensor, PackedWeight], Tensor]


def draw_weight(type_name: str, shape: tuple[int, int]) -> Grouped:
    """Random blocks with scales near 2^-8."""
    generator, (num_outputs, num_inputs) = torch.Generator().manual_seed(1), shape
    block_bytes, block_inputs = BLOCK_BYTES[type_name], 256 if type_name.endswith("_K") else 32
    num_blocks = num_inputs // block_inputs
    blocks = torch.randint(0, 256, (num_outputs, num_blocks, block_bytes), generator=generator, dtype=torch.uint8)
    for at in _FLOAT16_AT[type_name]:
        scales = torch.rand(num_outputs, num_blocks, 1, generator=generator) / 256
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return read_blocks(type_name, blocks.flatten(1), num_inputs, type_name)


def multiply(operator: Any, x: Tensor, weight: PackedWeight) -> Tensor:
    """Run an operator on packed weights."""
    out: Tensor = operator(x, weight.data, None, weight.num_outputs, weight.code)
    return out


def find_fault(products: dict[str, Product], type_name: str) -> str | None:
    """How a product differs from its reference, or rows in a batch from rows alone."""
    weight = draw_weight(type_name, (96, 1536))
    packed, x = PackedWeight.of(weight), torch.randn(NUM_CHECKED, 1536)
    for name, product in products.items():
        out = product(x, packed)
        expected = linear_grouped(rounded(x) if name == "int8" else x, weight)
        if not (out - expected).abs().max() <= 1e-4 * expected.abs().max():
            return f"{name} {type_name} is not its reference"
        if not torch.equal(out, torch.cat([product(row[None], packed) for row in x])):
            return f"{name} {type_name}: a row in a batch is not the row alone"
    return None


def measure(products: dict[str, Product], type_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by side and number of rows, and megabytes of the weights."""
    packed = [PackedWeight.of(draw_weight(type_name, shape)) for shape in options.shapes]
    weights = [
        PackedWeight(w.data.clone(), w.num_outputs, w.num_inputs, w.code) for _ in range(NUM_COPIES) for w in packed
    ]
    inputs = {(rows, w.num_inputs): torch.randn(rows, w.num_inputs).bfloat16() for rows in options.rows for w in packed}
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    best: dict[str, dict[int, float]] = {name: {} for name in products}
    for _ in range(options.rounds):
        for rows in options.rows:
            for name, product in products.items():
                start = clock()
                for weight in weights:
                    product(inputs[rows, weight.num_inputs], weight)
                best[name][rows] = min(best[name].get(rows, float("inf")), 1000 * (clock() - start))
    num_bytes = sum(weight.data.numel() for weight in weights)
    return {"type": type_name, "mb": round(num_bytes / 1e6, 1), "ms": best}


def read_bytes_per_s(options: argparse.Namespace) -> float:
    """Rate at which one thread, or all of them, sums up memory."""
    numbers = torch.ones(25_000_000)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    best = float("inf")
    for _ in range(options.rounds):
        start = clock()
        numbers.sum()
        best = min(best, clock() - start)
    return numbers.nbytes / best


def run(options: argparse.Namespace) -> int:
    """Compare, measure, print."""
    kernels = load_cpu_kernels()
    if kernels is None:
        return EXIT_NOTHING_MEASURED
    kernels.load_grouped()
    kernels.load_int8()
    kernels.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    operators = {"exact": torch.ops.betoken.linear_grouped, "int8": torch.ops.betoken.linear_int8}
    products: dict[str, Product] = {name: partial(multiply, operator) for name, operator in operators.items()}
    if faults := [fault for name in options.types if (fault := find_fault(products, name))]:
        print("\n".join([*faults, "not right: no speeds"]))
        return 1
    rate = read_bytes_per_s(options)
    results = [measure(products, name, options) for name in options.types]
    print(f"{kernels.products} kernels, {options.threads} threads, memory read at {rate / 1e9:.1f} GB/s")
    for result in results:
        floor_ms = result["mb"] * 1e9 / rate
        sides = "  ".join(
            f"{name} {' '.join(f'{rows}: {ms:.1f}' for rows, ms in by_rows.items())}"
            for name, by_rows in result["ms"].items()
        )
        print(f"{result['type']:<6}{result['mb']:>7} MB  floor {floor_ms:.1f} ms  {sides}")
    about = {"hardware": describe_hardware(), "versions": describe_versions(), "threads": options.threads}
    print(json.dumps({"bench": "cpu_products", "gb_per_s": round(rate / 1e9, 2), "products": results} | about))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The status is 1 when a product was not right, and 2 without the CPU kernels."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    add = parser.add_argument
    add("--types", nargs="+", choices=TYPES, default=TYPES, help="GGUF types of the weights")
    add("--rows", nargs="+", type=positive, default=(1, 6, 32), help="rows of a product")
    add("--threads", type=positive, default=2, help="threads of a product; 1 = CPU time is measured")
    add("--rounds", type=positive, default=7, help="rounds of all sides")
    parser.set_defaults(shapes=SHAPES)
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
