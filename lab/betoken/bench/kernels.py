"""How fast each kernel is on a GPU: against the bytes it must move, torch, compiled torch, and what is installed of
flashinfer's sampling and vLLM's Marlin products.

    python -m betoken.bench.kernels [--only attention sample]

First every case is compared with its torch reference, on fresh random inputs and poisoned memory; one difference and no
speed is printed. Then calls are timed one by one, replayed as graphs if possible, with a cold L2 cache. The
floor is a case's bytes over the copy bandwidth measured here. The last stdout line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from betoken.bench.command import EXIT_NOTHING_MEASURED
from betoken.bench.gpu.case import Case, find_fault, measure
from betoken.bench.gpu.device import describe_device, require_device
from betoken.bench.gpu.paged_cases import paged_cases
from betoken.bench.gpu.product_cases import product_cases
from betoken.bench.gpu.sampling_cases import sampling_cases
from betoken.bench.gpu.state_cases import state_cases
from betoken.bench.gpu.timing import DeviceTimer, Timer
from betoken.bench.machine import describe_hardware, describe_versions

PROGRAM = "python -m betoken.bench.kernels"


def compare(cases: Sequence[Case]) -> list[str]:
    """A line for every case that is not right."""
    faults = []
    for case in cases:
        if fault := find_fault(case):
            faults.append(f"{case.op} ({case.shape}): {fault}")
    return faults


def report(cases: Sequence[Case], timer: Timer) -> dict[str, Any]:
    """The JSON object; speeds only when every case was right."""
    if faults := compare(cases):
        return {"bench": "kernels", "faults": faults}
    copy_bytes_per_s = timer.copy_bytes_per_s()
    results = [measure(case, timer, copy_bytes_per_s) for case in cases]
    return {"bench": "kernels", "faults": [], "copy_gb_per_s": round(copy_bytes_per_s / 1e9, 1), "cases": results}


def print_report(result: dict[str, Any]) -> None:
    """A line per side of each case, or the faults."""
    for fault in result["faults"]:
        print(fault)
    if result["faults"]:
        print("not right: no speeds")
        return
    print(f"copy bandwidth {result['copy_gb_per_s']} GB/s")
    for case in result["cases"]:
        print(f"\n{case['op']}  {case['shape']}  floor {case['floor_ms']:.4f} ms")
        for name, side in case["sides"].items():
            figures = side.get("failed") or f"{side['ms']:>9.4f} ms  {side['fraction_of_floor']:>6.1%} of the floor"
            print(f"    {name:<40}{figures}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print; the status is 1 when a kernel was wrong and 2 without a GPU or for an unknown op."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="OP", help="ops to measure (default: all)")
    options = parser.parse_args(arguments)
    device = require_device(PROGRAM)
    if device is None:
        return EXIT_NOTHING_MEASURED
    torch.manual_seed(0)
    cases = [
        case
        for case in (*sampling_cases(device), *paged_cases(device), *state_cases(device), *product_cases(device))
        if options.only is None or case.op in options.only
    ]
    if not cases:
        print(f"{PROGRAM}: no op is named {' or '.join(options.only)}", file=sys.stderr)
        return EXIT_NOTHING_MEASURED
    with torch.inference_mode():
        result = report(cases, DeviceTimer(device))
    print_report(result)
    about = {"device": describe_device(device), "hardware": describe_hardware(), "versions": describe_versions()}
    print(json.dumps(result | about))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
