"""The checks of `betoken doctor`: each with a right and a wrong value."""

import json
import socket
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from betoken.kernels import cpu
from betoken.verify_worker.doctor import rendezvous, worker
from betoken.verify_worker.doctor.__main__ import findings
from betoken.verify_worker.doctor.code import code_cache_finding, compiler_finding
from betoken.verify_worker.doctor.devices import Gpu, device_finding, peer_access_finding
from betoken.verify_worker.doctor.environment import environment_findings
from betoken.verify_worker.doctor.gather import gather_finding, gather_result, stages_finding
from betoken.verify_worker.doctor.machine import fast_wake_finding, ports_finding, shared_memory_finding
from betoken.verify_worker.doctor.memory import (
    cpu_memory_finding,
    free_memory_bytes,
    gpu_memory_finding,
    model_finding,
    rank_bytes,
    stage_bytes,
    weight_bytes,
)
from betoken.verify_worker.doctor.options import DoctorOptions
from betoken.verify_worker.doctor.packages import packages_finding, python_finding
from betoken.verify_worker.doctor.rendezvous import rendezvous_finding
from betoken.verify_worker.doctor.worker import worker_findings
from tests.engine.gguf_files import tiny_model, write_gguf

MODELS = Path(__file__).parents[2] / "models"
GB = 10**9
GPU = Gpu("GPU of a test", 60 * GB, 80 * GB)


def test_python_finding_compares_the_version_with_the_declared_one() -> None:
    assert python_finding((3, 11, 2), ">=3.11").level == "ok"
    old = python_finding((3, 10, 9), ">=3.11")
    assert (old.level, old.found) == ("error", "3.10.9, not >=3.11") and "Python >=3.11" in old.cure


def test_packages_finding_names_old_and_missing_packages() -> None:
    lines = ["torch>=2.11; extra == 'worker'", "grpcio>=1.85.1", "fastapi>=0.120; extra == 'gateway'"]
    versions = {"torch": "2.13.0+cpu", "grpcio": "1.85.1"}
    right = packages_finding(lines, versions.__getitem__)
    assert (right.level, right.found) == ("ok", "torch 2.13.0+cpu, grpcio 1.85.1")
    old = packages_finding(lines, (versions | {"torch": "2.9.1"}).__getitem__)
    assert (old.level, old.found) == ("error", "torch 2.9.1, not >=2.11") and "[worker]" in old.cure


@pytest.mark.parametrize(("on_gpu", "level"), [(False, "warning"), (True, "error")])
def test_missing_triton_is_an_error_only_on_a_gpu(on_gpu: bool, level: str) -> None:
    def version_of(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    finding = packages_finding(["triton>=3.6; extra == 'worker'"], version_of, on_gpu)
    assert (finding.level, finding.found) == (level, "triton is not installed, >=3.6 is needed")


def test_device_finding_is_ok_on_a_machine_without_gpus() -> None:
    finding = device_finding("cpu", 2, [], None)
    assert finding.level == "ok" and "no GPU" in finding.found


@pytest.mark.parametrize(
    ("device", "ranks", "found", "cuda", "cure"),
    [
        ("cuda:0", 1, [], None, "torch build for CUDA"),
        ("cuda:0", 1, [], "13.0", "driver for CUDA 13.0"),
        ("cuda:1", 2, [GPU, GPU], "13.0", "at most 1 ranks"),
    ],
)
def test_device_finding_names_the_missing_part(
    device: str, ranks: int, found: list[Gpu], cuda: str | None, cure: str
) -> None:
    finding = device_finding(device, ranks, found, cuda)
    assert finding.level == "error" and cure in finding.cure


def test_device_finding_shows_names_and_memory_of_gpus() -> None:
    finding = device_finding("cuda:0", 2, [GPU, GPU], "13.0")
    assert finding.level == "ok" and "GPU of a test, 80 GB" in finding.found


def test_peer_access_finding_names_gpus_without_it() -> None:
    assert peer_access_finding([(0, 1, True)]).level == "ok"
    finding = peer_access_finding([(0, 1, True), (0, 2, False)])
    assert finding.level == "warning" and "GPUs 0 and 2" in finding.found


def test_shared_memory_of_docker_is_too_small_for_ranks_on_gpus() -> None:
    docker = shared_memory_finding(2, True, free_bytes=64 << 20)
    assert docker.level == "error" and "64 MiB free" in docker.found and "--shm-size 1024m" in docker.cure
    assert shared_memory_finding(2, True, free_bytes=1 << 30).level == "ok"
    assert shared_memory_finding(2, False, free_bytes=64 << 20).level == "ok"  # ranks on CPUs use sockets
    assert shared_memory_finding(1, True, free_bytes=64 << 20).level == "ok"


def test_shared_memory_without_its_folder_is_reported(tmp_path: Path) -> None:
    assert shared_memory_finding(2, True, tmp_path / "absent").level == "error"


def test_ports_finding_names_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = ports_finding("127.0.0.1", [port])
        assert taken.level == "error" and f"{port}: Address already in use" in taken.found
    assert ports_finding("127.0.0.1", [0]).level == "ok"


def test_fast_wake_finding_says_why_cores_may_not_be_kept_awake(tmp_path: Path) -> None:
    (tmp_path / "latency").touch()
    assert fast_wake_finding(tmp_path / "latency").level == "ok"
    absent = fast_wake_finding(tmp_path / "absent")
    assert absent.level == "warning" and "No such file" in absent.found and "/dev/cpu_dma_latency" in absent.cure


@pytest.mark.parametrize(("is_required", "level"), [(True, "error"), (False, "warning")])
def test_compiler_finding_of_a_missing_compiler(is_required: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = compiler_finding(cpu.LIBRARY, is_required)
    assert (finding.level, finding.found) == (level, "CXX = 'no-such-compiler' names no program")
    monkeypatch.setenv("CXX", "sh")
    assert compiler_finding(cpu.LIBRARY, is_required).level == "ok"


def test_code_cache_finding_rejects_a_folder_that_others_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    assert code_cache_finding(str(folder)).level == "ok"
    folder.chmod(0o777)
    shared = code_cache_finding(str(folder))
    assert shared.level == "warning" and "other users may write" in shared.found and "--cache-dir" in shared.cure


def test_weight_bytes_of_dense_tensors_are_those_of_the_dtype(tmp_path: Path) -> None:
    save_file({"dense": torch.zeros(4, 8), "codes": torch.zeros(16, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    sizes = {dtype: weight_bytes(str(tmp_path), dtype) for dtype in ("bfloat16", "float32", "auto")}
    assert sizes == {"bfloat16": 64 + 64, "float32": 128 + 64, "auto": 128 + 64}


def test_model_finding_of_an_absent_and_a_broken_model(tmp_path: Path) -> None:
    assert model_finding("model", str(MODELS / "target"), "bfloat16")[1] > 0
    assert model_finding("model", str(tmp_path / "absent"), "bfloat16")[0].level == "error"
    assert model_finding("model", "owner/name", "bfloat16")[0].level == "warning"  # may be on the hub
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    broken, size = model_finding("model", str(tmp_path / "cut.gguf"), "bfloat16")
    assert (broken.level, size) == ("error", 0) and "is not a GGUF file" in broken.found


@pytest.mark.parametrize(("free_gb", "level"), [(40, "ok"), (19, "ok"), (15, "error")])
def test_memory_finding_on_a_cpu_counts_ranks_and_kv(free_gb: int, level: str) -> None:
    finding = cpu_memory_finding(rank_bytes([14 * GB], 2, 2), GB, GB, free_gb * GB)
    assert finding.level == level and "2 ranks of 7.00 GB weights and 1.00 GB KV" in finding.found


def test_memory_finding_names_the_ranks_of_the_machine_that_needs_most() -> None:
    stages = [6 * GB, 4 * GB]
    assert rank_bytes(stages, 2, 4) == [3 * GB, 3 * GB, 2 * GB, 2 * GB]
    assert rank_bytes(stages, 2, 2) == [3 * GB, 3 * GB] and rank_bytes(stages, 1, 1) == [6 * GB]
    finding = cpu_memory_finding(rank_bytes(stages, 2, 4), 0, GB, 20 * GB)
    assert finding.level == "ok" and "4 ranks of 3.00 GB, 2.00 GB weights and 1.00 GB KV" in finding.found


@pytest.mark.parametrize("is_tied", [False, True])
def test_stage_bytes_are_those_of_layers_and_ends(is_tied: bool, tmp_path: Path) -> None:
    tensors = {f"model.layers.{number}.mlp.up_proj.weight": torch.zeros(10) for number in range(3)}
    tensors |= {"model.embed_tokens.weight": torch.zeros(100), "model.norm.weight": torch.zeros(1)}
    tensors |= {} if is_tied else {"lm_head.weight": torch.zeros(50)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    assert stage_bytes(str(tmp_path), "float32", 2) == [480, 4 * (10 + 1 + (100 if is_tied else 50))]
    assert sum(stage_bytes(str(tmp_path), "float32", 1)) == weight_bytes(str(tmp_path), "float32")


def test_stage_bytes_of_a_gguf_file_count_a_tied_embedding_at_both_ends(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model(is_tied=True)))
    first, last = stage_bytes(path, "bfloat16", 2)
    assert first + last > weight_bytes(path, "bfloat16") == sum(stage_bytes(path, "bfloat16", 1))


def test_more_stages_than_layers_are_an_error() -> None:
    options = DoctorOptions(model=str(MODELS / "target"), pipeline=64, device="cpu", timeout_s=0.01)
    found = {finding.name: finding for finding in worker_findings(options)}
    assert "pipeline: 64 is above" in found["memory"].found
    assert found["hidden states of 64 stages"].found == "gloo: no result within 0.01 s"


def test_stages_on_gpus_need_a_gpu_for_each_rank_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "gpus", lambda: [GPU])
    monkeypatch.setattr(worker, "device_finding", partial(device_finding, cuda="13.0"))
    options = DoctorOptions(model=str(MODELS / "target"), pipeline=2)
    alone, one_of_two = (
        {finding.name: finding for finding in worker_findings(replace(options, local_ranks=count))} for count in (2, 1)
    )
    assert alone["devices"].level == "error" and "2 ranks from cuda:0 on need 2 GPUs" in alone["devices"].found
    assert one_of_two["devices"].level == one_of_two["memory"].level == "ok"
    assert not any(name.startswith("hidden states") for name in one_of_two)


def test_stages_finding_reports_the_times_through_all_stages_of_two_ranks() -> None:
    finding = stages_finding("cpu", 2, 2, 64, 120)
    assert finding.level in ("ok", "warning") and "256 tokens, 32,768 bytes, in " in finding.found, finding


def test_rendezvous_finding_of_this_and_of_another_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = rendezvous_finding("127.0.0.1", listener.getsockname()[1])
    assert taken.level == "error" and "Address already in use" in taken.found
    assert "loopback" in rendezvous_finding("127.0.0.1", 0).found
    unknown = rendezvous_finding("no-such-host.invalid", 29500)
    assert unknown.level == "error" and "all machines know" in unknown.cure


@pytest.mark.parametrize(("own_address", "level"), [("127.0.0.2", "ok"), ("127.0.1.1", "warning")])
def test_rendezvous_finding_of_a_machine_whose_name_has_another_address(
    own_address: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"target.test": "127.0.0.2", "machine.test": own_address}
    monkeypatch.setattr(socket, "gethostname", lambda: "machine.test")
    monkeypatch.setattr(socket, "gethostbyname", lambda host: names[host])
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(None, None, None, "", (names[host], 0))])
    monkeypatch.setattr(rendezvous, "_is_loopback", lambda address: False)
    finding = rendezvous_finding("target.test", 0)
    assert finding.level == level, finding
    assert level == "ok" or "is_host=1" in finding.cure


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        (ConnectionRefusedError(), "ok", "no rank is there yet"),
        (TimeoutError(), "error", "no answer"),
        (OSError(113, "No route to host"), "error", "No route to host"),
    ],
)
def test_rendezvous_finding_of_a_machine_that_does_or_does_not_answer(
    fault: OSError, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        raise fault

    monkeypatch.setattr(socket, "create_connection", connect)
    finding = rendezvous_finding("192.0.2.1", 29500)  # an address of no machine
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(("free_gb", "level"), [(40, "ok"), (20, "ok"), (14, "error")])
def test_memory_finding_on_gpus_counts_the_part_of_a_rank(free_gb: int, level: str) -> None:
    finding = gpu_memory_finding([15 * GB, 10 * GB], 0, [60 * GB, free_gb * GB])
    assert finding.level == level and "15.00 GB weights of a rank" in finding.found


def test_free_memory_is_bounded_by_the_limit_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == 8000 << 10
    for name, text in (("max", "4096000\n"), ("current", "2048000\n"), ("stat", "anon 1\ninactive_file 48000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory_bytes(meminfo, tmp_path) == 4096000 - (2048000 - 48000)


@pytest.mark.parametrize(
    ("variable", "harmless", "trap"),
    [
        ("NCCL_P2P_DISABLE", "0", "1"),
        ("NCCL_SOCKET_IFNAME", "^docker", "eth7"),
        ("NCCL_SOCKET_IFNAME", "=lo,eth0", "=eth"),
        ("GLOO_SOCKET_IFNAME", "eth0", "eth"),
        ("OMP_NUM_THREADS", "", "1"),
        ("CUDA_VISIBLE_DEVICES", "0,1", ""),
        ("TRITON_INTERPRET", "0", "1"),
        ("BETOKEN_CPU_ISA", "native", "avx2"),
    ],
)
def test_environment_findings_name_a_trap_and_its_cure(variable: str, harmless: str, trap: str) -> None:
    assert [one.level for one in environment_findings({variable: harmless}, ["lo", "eth0"])] == ["ok"]
    (finding,) = environment_findings({variable: trap}, ["lo", "eth0"])
    assert finding.name == variable and finding.level != "ok" and finding.found.startswith(f"= {trap!r}")
    assert finding.cure


def test_doctor_findings_name_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "betoken.verify_worker.doctor.worker", None)
    *others, finding = findings(DoctorOptions())
    assert (finding.name, finding.level) == ("torch", "error") and "cannot be imported" in finding.found
    assert {"python", "packages", "fast wake"} <= {other.name for other in others}


def test_gather_finding_reports_the_time_between_two_ranks() -> None:
    finding = gather_finding(2, "cpu", 120)
    assert finding.level in ("ok", "warning") and "gloo: 1 MiB in " in finding.found, finding


def test_gather_finding_ends_in_bounded_time_and_names_the_cause() -> None:
    late = gather_finding(2, "cpu", 0.01)
    assert late.level == "error" and "no result within 0.01 s" in late.found and "loopback" in late.cure


def test_gather_finding_of_a_backend_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    finding = gather_finding(2, "cpu", 120)
    assert finding.level == "error" and "no-such-interface" in finding.found, finding


def test_gather_result_warns_of_a_slow_exchange() -> None:
    assert gather_result(2, "cpu", {"seconds": 1e-3}).level == "ok"
    slow = gather_result(2, "cuda:0", json.loads('{"seconds": 0.5}'))
    assert slow.level == "warning" and "NCCL: 1 MiB in 500.00 ms, which is slow" in slow.found
