"""`deploy/` matches the services: options, ports, metrics. No container is built here."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

from betoken.cli import service_process
from betoken.client import Client
from betoken.common import names
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.engine import model_thread
from betoken.gateway.settings import GatewaySettings
from betoken.router.settings import RouterSettings
from betoken.rpc import server, telemetry
from betoken.v1 import generation_pb2
from betoken.verify_worker.doctor.machine import shared_memory_finding
from betoken.verify_worker.launched import launched_rank, num_local_ranks
from betoken.verify_worker.settings import VerifyWorkerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS = {
    "betoken.router": RouterSettings,
    "betoken.gateway": GatewaySettings,
    "betoken.verify_worker": VerifyWorkerSettings,
    "betoken.draft_worker": DraftWorkerSettings,
}
CUDA_TRITON = {"2.13.0": "3.7.1"}
"""Release of torch -> the one Triton that its CUDA build on PyPI asks for; its CPU build asks for none."""
OVERRIDES = [[], ["compose.gpu.yaml"], ["compose.telemetry.yaml"], ["compose.gpu.yaml", "compose.telemetry.yaml"]]


def image_environment(image="router"):
    """Environment that the Dockerfile sets for every service, or for every worker."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    blocks = re.findall(r"^ENV (.*)", stages["base"] + stages[image], re.M)
    return dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(blocks)))


def merged(old, new):
    """Mappings key by key, as Compose puts files together; all else replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def stack(*overrides, **variables):
    """Every service of these files and `compose.yaml`; other variables have their defaults."""
    services = {}
    for file in ("compose.yaml", *overrides):
        text = (DEPLOY / file).read_text()
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), text)
        services = merged(services, yaml.safe_load(text)["services"])
    return services


def module_and_environment(service):
    added = {key: str(value) for key, value in service["environment"].items() if key != "HF_TOKEN"}
    return service["command"][0], added


def compose(*overrides):
    """Service name -> (module, environment) of our services."""
    ours = {name: service for name, service in stack(*overrides).items() if service["image"].startswith("betoken-")}
    return {name: module_and_environment(service) for name, service in ours.items()}


def workloads():
    """(workload, its Service, its pod) of every one of the Kubernetes manifests."""
    for file in ("router.yaml", "gateway.yaml", "verify.yaml", "draft.yaml"):
        workload, service = yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())
        yield workload, service, workload["spec"]["template"]["spec"]


def pods():
    """(service name, module, environment, ports, probes) of every container of the Kubernetes manifests."""
    for _, service, pod in workloads():
        (container,) = pod["containers"]
        environment = {entry["name"]: entry.get("value", "a-name") for entry in container["env"]}
        environment.pop("HF_TOKEN", None)
        ports = {service["spec"]["ports"][0]["port"], container["ports"][0]["containerPort"]}
        ports |= {
            (probe.get("grpc") or probe["httpGet"])["port"] for key, probe in container.items() if key.endswith("Probe")
        }
        yield service["metadata"]["name"], container["args"][0], environment, ports


def examples():
    """The YAML that README shows, in its order: a file for Compose, an overlay for Kubernetes."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "README.md").read_text())
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)]


def parse(module, environment, monkeypatch):
    """The service's settings; every variable must be one of its options."""
    for name in [name for name in os.environ if name.startswith("BETOKEN_")]:
        monkeypatch.delenv(name)
    settings = SETTINGS[module]
    for name, value in environment.items():
        assert name.removeprefix("BETOKEN_").lower() in settings.model_fields, name
        monkeypatch.setenv(name, value)
    return settings.parse([])


def test_the_image_sets_what_the_command_sets():
    environment = image_environment()
    assert environment.items() >= service_process._SERVICE_DEFAULTS.items()
    assert Path(environment["BETOKEN_READY_FILE"]).parent == Path("/tmp")  # the compose files' tmpfs


def test_the_build_context_holds_what_the_wheels_are_made_of():
    wheels = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in (".", "server")]
    sdk, services = (wheel["tool"]["hatch"]["build"]["targets"]["wheel"] for wheel in wheels)
    kept = set(re.findall(r"^!(\S+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    roots = {Path(package).parts[0] for package in sdk["packages"]}
    roots |= {Path(package).parts[1] for package in services["force-include"]}
    assert kept == roots | {"server", "pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE"}


def test_the_constraints_suit_the_cuda_build_of_torch():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert pins["triton"] == CUDA_TRITON[pins["torch"]]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda files: "+".join(files) or "alone")
def test_compose_names_options_and_addresses_that_exist(overrides, monkeypatch):
    services = compose(*overrides)
    assert sorted(services) == ["draft", "gateway", "router", "verify"]
    ports = {}
    for name, (module, environment) in services.items():
        image = image_environment({"betoken.router": "router", "betoken.gateway": "gateway"}.get(module, "worker"))
        common = {key: value for key, value in image.items() if key.startswith("BETOKEN_")}
        settings = parse(module, common | environment, monkeypatch)
        ports[name] = settings.port
        if module == "betoken.router":
            router = settings
        if module == "betoken.gateway":
            gateway = settings
    assert gateway.router == f"router:{ports['router']}"
    assert services["gateway"][1]["BETOKEN_PORT"] == stack()["gateway"]["ports"][0].rpartition(":")[2]
    assert router.verify == (f"verify:{ports['verify']}",)
    assert router.draft == (f"draft:{ports['draft']}",)


def test_kubernetes_names_options_and_addresses_that_exist(monkeypatch):
    settings = {}
    for name, module, environment, ports in pods():
        settings[name] = parse(module, environment, monkeypatch)
        assert ports == {settings[name].port}
    workers = {role: getattr(settings["router"], role) for role in ("verify", "draft")}
    for role, addresses in workers.items():
        workload, _ = yaml.safe_load_all((DEPLOY / "kubernetes" / f"{role}.yaml").read_text())
        replicas = range(workload["spec"]["replicas"])
        assert addresses == tuple(f"{role}-{index}.{role}:{settings[role].port}" for index in replicas)
    assert settings["router"].tokenizer == settings["verify"].model
    assert settings["gateway"].router == f"dns:///router:{settings['router'].port}"
    assert settings["router"].router_id != RouterSettings.model_fields["router_id"].default  # distinguished in logs


def test_a_rollout_of_routers_waits_until_they_serve():
    """One with a wrong worker's address or tokenizer takes requests, too, and would replace all that serve."""
    probes, slowest_s = {}, {}
    for workload, _, pod in workloads():
        (container,) = pod["containers"]
        name = workload["metadata"]["name"]
        if name == "gateway":  # a process of HTTP
            continue
        probes[name] = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
        slowest_s[name] = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        if name == "router":
            deadline_s = workload["spec"]["progressDeadlineSeconds"]
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    assert probes["router"].pop("startup") == {"port": 50051, "service": service}
    assert not any("service" in probe for of_one in probes.values() for probe in of_one.values())
    assert deadline_s > slowest_s["router"] >= slowest_s["verify"]


def test_workers_take_the_links_of_as_many_routers_as_the_page_says():
    """Pods added by a rollout must be admitted, or it would not continue."""
    (most,) = re.findall(r"beyond (\d+), with the quarter more", (DEPLOY / "README.md").read_text())
    with_surge = [routers + -(-routers // 4) for routers in (int(most), int(most) + 1)]  # Kubernetes rounds up
    for settings in (VerifyWorkerSettings, DraftWorkerSettings):
        assert with_surge[0] <= settings.model_fields["max_links"].default < with_surge[1]


def test_pods_are_probed_at_start_and_later():
    for _, _, pod in workloads():
        (container,) = pod["containers"]
        assert all(f"{kind}Probe" in container for kind in ("startup", "liveness", "readiness"))
        assert container["livenessProbe"]["timeoutSeconds"] >= 5  # a busy process is not a dead one


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda files: "+".join(files) or "alone")
def test_an_image_is_built_by_one_service(overrides):
    """Two builds of one name at once fail in containerd's image store: "already exists"."""
    services = [service for service in stack(*overrides).values() if service["image"].startswith("betoken-")]
    built = [service["image"] for service in services if "target" in service.get("build", ())]
    assert sorted(built) == sorted({service["image"] for service in services})
    assert all(service["pull_policy"] == "never" for service in services if "build" not in service)


def test_ranks_of_a_verify_worker_have_gpus_and_shared_memory(monkeypatch):
    service = stack("compose.gpu.yaml", VERIFY_GPUS="0,1", VERIFY_RANKS="2")["verify"]
    settings = parse(*module_and_environment(service), monkeypatch)
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["0,1"]
    assert settings.devices == ("cuda:0", "cuda:1") and settings.tensor_parallel == 2
    size = int(service["shm_size"].removesuffix("gb")) << 30
    assert shared_memory_finding(settings.tensor_parallel, on_gpu=True, free_bytes=size).level == "ok"


def test_a_further_verify_worker_as_the_page_shows_it(monkeypatch):
    more, _ = examples()
    services = stack("compose.gpu.yaml")
    for name, service in more["services"].items():
        base = services[service.pop("extends")["service"]] if "extends" in service else services[name]
        services[name] = merged(base, service)
    settings = {name: parse(*module_and_environment(service), monkeypatch) for name, service in services.items()}
    first, second = (settings[address.split(":")[0]] for address in settings["router"].verify)
    assert first == second
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0]
        for name, service in services.items()
        if name not in ("router", "gateway")
    ]
    assert len(set(devices)) == len(devices) == 3
    assert "build" not in services["verify2"] and services["verify2"]["image"] == services["verify"]["image"]


def test_long_running_containers_fill_no_disk_or_memory():
    services = stack("compose.telemetry.yaml")
    assert all(service["logging"]["driver"] == "local" for service in services.values())
    assert int(services["jaeger"]["environment"]["MEMORY_MAX_TRACES"]) > 0


def test_a_router_that_is_gone_is_soon_counted_no_more():
    """The dashboard adds up what routers run; but none may come and go between two exports."""
    collector = yaml.safe_load((DEPLOY / "telemetry" / "collector.yaml").read_text())
    minutes = int(collector["exporters"]["prometheus"]["metric_expiration"].removesuffix("m"))
    assert minutes == 1 and 60 * minutes > 2 * RouterSettings.model_fields["metrics_interval_s"].default


def test_services_write_only_to_mounted_folders():
    environment = image_environment("worker")
    for name in ("HF_HOME", "BETOKEN_CACHE_DIR"):  # kept, for the next container too
        assert Path(environment[name]).is_relative_to("/cache"), name
    for service in [service for service in stack().values() if service["image"].startswith("betoken-")]:
        assert service["read_only"] and service["tmpfs"] == ["/tmp"]
        if service["image"] != "betoken-gateway":  # which keeps nothing
            assert any(volume.endswith("cache:/cache") for volume in service["volumes"])
    for _, _, pod in workloads():
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/cache"}


def test_pods_meet_the_restricted_standard():
    """A profile of Kubernetes' Pod Security Standards; a namespace that enforces it refuses others."""
    for _, _, pod in workloads():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert all("emptyDir" in volume for volume in pod["volumes"])


def test_pods_are_found_by_their_labels():
    labels = {}
    for workload, service, _ in workloads():
        labels[workload["metadata"]["name"]] = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
        assert service["spec"]["selector"] == labels[workload["metadata"]["name"]]
    budgets = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "disruption.yaml").read_text()))
    for budget in budgets:
        assert budget["spec"]["selector"]["matchLabels"] == labels[budget["metadata"]["name"]]
    assert {budget["metadata"]["name"] for budget in budgets} == {
        workload["metadata"]["name"] for workload, _, _ in workloads() if workload["spec"]["replicas"] > 1
    }


def test_workers_are_open_to_routers_alone():
    policy = yaml.safe_load((DEPLOY / "kubernetes" / "network.yaml").read_text())["spec"]
    (selected,), (rule,) = policy["podSelector"]["matchExpressions"], policy["ingress"]
    pods_by_name = {workload["metadata"]["name"]: (workload, service) for workload, service, _ in workloads()}
    router, _ = pods_by_name.pop("router")
    del pods_by_name["gateway"]
    for workload, service in pods_by_name.values():
        assert workload["spec"]["template"]["metadata"]["labels"][selected["key"]] in selected["values"]
        assert rule["ports"] == [{"port": service["spec"]["ports"][0]["port"]}]
    assert len(selected["values"]) == len(pods_by_name) and policy["policyTypes"] == ["Ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": router["spec"]["template"]["metadata"]["labels"]}}]


def test_stages_of_a_leader_worker_set_are_the_ranks_of_one_worker(monkeypatch):
    workers, service, policy = yaml.safe_load_all((DEPLOY / "kubernetes" / "stages" / "verify.yaml").read_text())
    template = workers["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker"))
    assert {key: value for key, value in leader.items() if "robe" not in key and key != "ports"} == worker
    given = {entry["name"]: entry["value"] for entry in worker["env"] if "value" in entry}
    options = {name: value for name, value in given.items() if name.startswith("BETOKEN_")}
    settings = parse(worker["args"][0], options, monkeypatch)
    group = {"$(LWS_WORKER_INDEX)": "1", "$(LWS_GROUP_SIZE)": str(template["size"]), "$(LWS_LEADER_ADDRESS)": "leader"}
    for name in given.keys() - options.keys():
        monkeypatch.setenv(name, group.get(given[name], given[name]))
    assert launched_rank(settings)[:2] == (1, template["size"]) and num_local_ranks(settings) == 1
    labels = template["leaderTemplate"]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == template["workerTemplate"]["metadata"]["labels"]
    assert {leader[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")} == {settings.port}


def test_an_overlay_names_the_images_that_are_built():
    """An overlay sees the names as changed by its base."""
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert "images" not in kustomization
    listed = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == listed
    _, overlay = examples()
    images = {container["image"] for _, _, pod in workloads() for container in pod["containers"]}
    assert {image["name"] for image in overlay["images"]} == images
    assert images == {service["image"] for service in stack("compose.gpu.yaml").values()}
    tags = re.findall(r"docker build .* -t (\S+)", (DEPLOY / "Dockerfile").read_text())
    assert set(tags) == images


def test_services_are_given_the_time_they_take_to_stop(monkeypatch):
    beyond_drain_s = server._STOP_GRACE_S + model_thread._STOP_TIMEOUT_S + telemetry.SHUTDOWN_TIMEOUT_S
    for service in [service for service in stack().values() if service["image"].startswith("betoken-")]:
        settings = parse(*module_and_environment(service), monkeypatch)
        assert float(service["stop_grace_period"].removesuffix("s")) > settings.drain_grace_s + beyond_drain_s
    for (_, _, pod), (_, module, environment, _) in zip(workloads(), pods(), strict=True):
        settings = parse(module, environment, monkeypatch)
        assert pod["terminationGracePeriodSeconds"] > settings.drain_grace_s + beyond_drain_s


def test_the_dashboard_shows_metrics_that_exist():
    exported = {"_".join(value.split(".")) for key, value in vars(names).items() if key.startswith("METRIC_")}
    labels = {"_".join(value.split(".")) for key, value in vars(names).items() if isinstance(value, str)}
    text = (DEPLOY / "telemetry" / "dashboard.json").read_text()
    expressions = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"(?:betoken|gen_ai)_\w+(?=\[|\)|\{)", " ".join(expressions)))
    plain = {re.sub(r"(_total|_seconds_bucket)$", "", name) for name in shown}
    metrics = plain - labels | plain & exported
    assert metrics == exported
    seconds = {re.sub(r"_seconds_bucket$", "", name) for name in shown if name.endswith("_seconds_bucket")}
    assert seconds == {"_".join(name.split(".")) for name in names.SECONDS_METRICS}


def test_the_services_that_compose_describes_answer(tmp_path):
    services = compose()
    addresses = {}
    processes = []
    give_up_at = time.monotonic() + 240
    try:
        for names in (
            ("verify", "draft"),
            ("router",),
            ("gateway",),
        ):  # each takes a free port
            for name in names:
                module, environment = services[name]
                environment = image_environment() | environment | {"BETOKEN_PORT": "0"}
                environment["BETOKEN_READY_FILE"] = str(tmp_path / name)
                environment["BETOKEN_COMPILE"] = "off"  # compiling takes most of a start; other tests do it
                del environment["HF_HOME"]
                for key, value in environment.items():
                    value = value.replace("/models/", f"{ROOT}/models/")
                    is_address = re.fullmatch(r"(verify|draft|router):\d+", value)
                    environment[key] = addresses[is_address[1]] if is_address else value
                with (tmp_path / f"{name}.log").open("w") as log:
                    command = [sys.executable, "-m", module]
                    processes.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log))
            while not all((tmp_path / name).exists() for name in names):
                assert time.monotonic() < give_up_at and all(process.poll() is None for process in processes), [
                    file.read_text()[-2000:] for file in tmp_path.glob("*.log")
                ]
                time.sleep(0.1)
            for name in names:
                addresses[name] = f"127.0.0.1:{json.loads((tmp_path / name).read_text())['port']}"
        with Client(addresses["router"]) as client:
            while not client.model_info().drafters:  # the router has still to meet the draft worker
                assert time.monotonic() < give_up_at
                time.sleep(0.1)
            plain = client.complete("def f(", max_new_tokens=24, seed=1, off=True)
            is_drafted = False
            while not is_drafted:  # a draft worker that pauses is not waited for
                assert time.monotonic() < give_up_at
                drafted = client.complete("def f(", max_new_tokens=24, seed=1)
                assert drafted.output_ids == plain.output_ids
                is_drafted = drafted.speculation.num_draft_tokens > 0
        asked = json.dumps({"prompt": "def f(", "max_tokens": 24, "seed": 1}).encode()
        url, headers = f"http://{addresses['gateway']}/v1/completions", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, asked, headers), timeout=60) as reply:
            assert json.load(reply)["choices"][0]["text"] == plain.text
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(60) for process in processes] == [0] * len(processes)
