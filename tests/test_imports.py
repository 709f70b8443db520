"""Who may import whom: the table of the architecture page, checked on every import statement of every root, and between
the folders of a root.

Also: the modules the SDK shares with the services load with the base install alone.
"""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_graph import FILES, ROOT, imports_of, module_files, nearest

EVERYTHING = "*"
# package -> Betoken packages (or single modules) it may import, besides itself and the protos `v1`
ALLOWED: dict[str, tuple[str, ...]] = {
    "v1": (),
    "common": ("v1",),
    "kernels": (),
    "engine": ("kernels", "common.gguf", "common.model_path", "common.tokenizer_json", "common.tree"),
    "rpc": ("common", "v1"),
    "client": ("common", "v1"),
    "loadtest": ("common",),
    "cli": ("client", "loadtest", "common", "drafters.registry", "v1"),
    "drafters": ("engine", "kernels", "rpc", "common", "v1"),
    "draft_worker": ("drafters", "engine", "kernels", "rpc", "common", "v1"),
    "verify_worker": ("drafters", "engine", "kernels", "rpc", "common", "v1"),
    "router": ("rpc", "common", "v1"),
    "gateway": ("client", "common"),
    "testing": ("common", "v1"),
    "training": ("drafters", "engine"),
    "bench": (EVERYTHING,),
}
# package -> third-party packages it must not import, directly
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "kernels": ("grpc", "google.protobuf", "transformers", "pydantic"),
    "engine": ("grpc", "google.protobuf", "pydantic"),
    "common": ("torch", "transformers", "triton", "numpy", "pydantic", "typer", "rich", "opentelemetry.sdk"),
    "rpc": ("torch", "transformers", "triton", "numpy"),
    "router": ("torch", "triton"),
    "client": ("torch", "transformers", "triton", "numpy", "pydantic", "typer", "rich", "opentelemetry.sdk"),
    "loadtest": ("torch", "transformers", "triton", "numpy", "pydantic", "typer", "rich", "grpc", "google.protobuf"),
    "cli": ("torch", "transformers", "triton"),
    "gateway": ("torch", "transformers", "triton", "numpy", "grpc", "google.protobuf", "typer", "rich"),
    "testing": ("torch", "transformers", "triton"),
    "training": ("grpc",),
}
# package -> pairs of folders that import each other ("" = the package's own files); no pair may be added
KNOWN_CYCLES: dict[str, set[tuple[str, str]]] = {
    "common": {("", "gguf")},
    "kernels": {("", "native"), ("", "sample")},
}
MODEL_PACKAGES = {"torch", "transformers", "triton"}
# Packages that the SDK, and what it shares with the services, must not load.
SERVICE_PACKAGES = MODEL_PACKAGES | {"numpy", "pydantic", "pydantic_settings", "asyncio_pool"}


def modules_of(package: str) -> list[str]:
    return [name for name, _ in module_files(package)]


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_every_package_is_in_the_table():
    assert {package for package, _ in FILES} <= set(ALLOWED)


@pytest.mark.parametrize("package", sorted({package for package, _ in FILES}))
def test_a_package_imports_only_what_the_table_allows(package):
    allowed = (package, *ALLOWED[package])
    faults = []
    for owner, path in FILES:
        if owner != package:
            continue
        for line, name in imports_of(path):
            place = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if name.startswith("betoken."):
                inner = name.removeprefix("betoken.")
                if EVERYTHING not in allowed and not any(is_within(inner, part) for part in allowed):
                    faults.append(place)
            elif any(is_within(name, part) for part in FORBIDDEN.get(package, ())):
                faults.append(place)
    assert not faults, "\n".join(faults)


def test_modules_import_each_other_in_one_direction():
    modules = {name: path for package in ALLOWED if package != "v1" for name, path in module_files(package)}
    edges = {
        name: {found for _, raw in imports_of(path) if (found := nearest(raw, modules)) not in (None, name)}
        for name, path in modules.items()
    }
    order = TopologicalSorter(edges)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", ["router"])
def test_folders_of_a_package_import_each_other_in_one_direction(package):
    """Modules outside any folder count as one folder, which may import all others and is imported by none."""
    modules = dict(module_files(package))
    folders = {name: path.parent.name if path.parent.name != package else "" for name, path in modules.items()}
    edges: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, path in modules.items():
        for _, raw in imports_of(path):
            found = nearest(raw, modules)
            if found is not None and found != f"betoken.{package}" and folders[found] != folders[name]:
                edges[folders[name]].add(folders[found])
    assert not [folder for folder in edges if "" in edges[folder]]
    assert list(TopologicalSorter(edges).static_order())[-1] == ""


def test_drafters_import_no_device_folder():
    """They run on every device, through the runner, `ModelParts` and `SideForward`."""
    devices = ("betoken.engine.cpu", "betoken.engine.cuda", "betoken.engine.reference", "betoken.kernels.cpu")
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, path in FILES
        if package == "drafters"
        for line, name in imports_of(path)
        if any(is_within(name, device) for device in devices)
    ]
    assert not faults, "\n".join(faults)


def test_weights_import_no_folder_that_runs_them():
    runs = ("betoken.engine.bring_up", "betoken.engine.mixers", "betoken.engine.cpu", "betoken.engine.cuda")
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, path in FILES
        if package == "engine" and folder_of(path) == "weights"
        for line, name in imports_of(path)
        if any(is_within(name, folder) for folder in runs)
    ]
    assert not faults, "\n".join(faults)


def folder_of(path: Path) -> str:
    """The folder that a file is in below its package; empty for a package's own files."""
    inner = path.relative_to(ROOT).parts[3:]
    return inner[0] if len(inner) > 1 else ""


def folders_that_import_each_other(package: str) -> set[tuple[str, str]]:
    modules = dict(module_files(package))
    edges = {
        (folder_of(path), folder_of(modules[found]))
        for name, path in modules.items()
        for _, raw in imports_of(path)
        if (found := nearest(raw, modules)) is not None
    }
    return {(one, other) for one, other in edges if one < other and (other, one) in edges}


@pytest.mark.parametrize("package", sorted({package for package, _ in FILES}))
def test_no_two_folders_of_a_root_import_each_other(package):
    """A root's own files count as a folder. Remove a pair from the table when its cycle is gone; add none."""
    assert folders_that_import_each_other(package) == KNOWN_CYCLES.get(package, set())


def test_the_namespace_has_no_init_file():
    assert list(ROOT.glob("*/betoken/__init__.py")) == []


def test_no_python_runs_between_the_fork_and_the_exec_of_a_process():
    """`subprocess` runs none; see `loop_factory` in `rpc/server.py` for what would."""
    names = {"create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "fork", "forkpty", "preexec_fn"}
    faults = []
    for _, path in FILES:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            name = {ast.Attribute: "attr", ast.keyword: "arg"}.get(type(node))
            if name and getattr(node, name) in names:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: {getattr(node, name)}")
    assert not faults, "\n".join(faults)


def test_hints_on_installing_come_from_one_place():
    """A name alone would be looked up on the package index, which may hold another project of that name."""
    told = [str(path.relative_to(ROOT)) for _, path in FILES if "pip install" in path.read_text()]
    assert told == ["common/betoken/common/release.py"]


def loaded_by(*modules: str, then: str = "pass") -> set[str]:
    """Top-level packages in `sys.modules` of a fresh process after importing `modules` and doing `then`."""
    end = "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    program = f"import sys, {', '.join(modules)}\n{then}\n{end}"
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_what_the_sdk_shares_needs_the_base_install_only():
    assert loaded_by(*modules_of("common")) & SERVICE_PACKAGES == set()


@pytest.mark.parametrize("package", ["rpc", "router", "gateway"])
def test_a_package_without_torch_never_loads_it(package):
    assert loaded_by(*modules_of(package)) & MODEL_PACKAGES == set()


@pytest.mark.parametrize("package", ["draft_worker", "verify_worker"])
def test_a_worker_reads_its_options_before_it_loads_torch(package):
    assert loaded_by(f"betoken.{package}.__main__") & {*MODEL_PACKAGES, "numpy"} == set()


def test_a_draft_worker_without_a_model_never_loads_torch_nor_numpy():
    module = "betoken.draft_worker"
    load = (
        f"settings = {module}.settings.DraftWorkerSettings(drafters=('ngram',))\n"
        f"hosted = {module}.hosting.load_drafters(settings, print)\n"
        "assert list(hosted.drafters) == ['ngram']"
    )
    assert loaded_by(f"{module}.service", then=load) & {*MODEL_PACKAGES, "numpy"} == set()


def test_ops_on_a_cpu_never_load_triton():
    program = (
        "import sys, torch; from betoken.kernels import dispatch, noise\n"
        "with dispatch.recording() as taken: noise.gumbel([1], [2], 300)\n"
        "print(*taken, 'triton' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() in (["native", "False"], ["reference", "False"]), result.stderr


def test_the_sdk_loads_no_package_of_the_services():
    assert loaded_by("betoken.client") & SERVICE_PACKAGES == set()


def test_no_test_file_is_imported():
    """Shared parts of tests are in separate modules."""
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in imports_of(path)
        if re.match(r"tests\.(\w+\.)*test_", name)
    ]
    assert not faults, "\n".join(faults)
