"""The thread pool of the CPU kernels: every task of every job runs exactly once."""

import subprocess
from pathlib import Path

import pytest

from betoken.kernels import build, cpu


@pytest.mark.parametrize(
    ("num_threads", "num_jobs"), [(2, 600_000), (8, 150_000), pytest.param(8, 1_500_000, marks=pytest.mark.slow)]
)
def test_every_task_of_the_thread_pool_runs_once(tmp_path: Path, num_threads: int, num_jobs: int) -> None:
    compiler = build.find_compiler(cpu.LIBRARY)
    if compiler is None:
        pytest.skip("without a compiler no pool exists")
    program = tmp_path / "pool_stress"
    headers, source = cpu.LIBRARY.source.parent, Path(__file__).with_name("pool_stress.cpp")
    command = [compiler, "-O2", "-std=c++17", "-pthread", f"-I{headers}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    finished = subprocess.run([program, str(num_jobs), str(num_threads)], capture_output=True, check=True, timeout=120)
    assert finished.stdout == b"0\n"
