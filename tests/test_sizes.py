"""No source file over 350 lines, no function over 60, in every root; no test file over 500 lines.

Generated code and jit kernels are apart. The launch of a kernel does not count: its arguments have one line each.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_TEST_FILE_LINES = 500
ROOT = Path(__file__).parents[1]
FOLDERS = ("*/betoken", "examples")
FILES = [
    path
    for pattern in FOLDERS
    for folder in sorted(ROOT.glob(pattern))
    for path in sorted(folder.rglob("*.py"))
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
]


def is_jit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_lines(node: ast.AST) -> int:
    assert isinstance(node, ast.stmt | ast.expr) and node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without kernel launches, `kernel[grid](...)`."""
    launches = [
        node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    return num_lines(function) - sum(num_lines(launch) - 1 for launch in launches)


def functions_of(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_jit(node):
            yield node


def faults_of(source: str) -> list[str]:
    faults = [f"{num} lines" for num in [len(source.splitlines())] if num > MAX_FILE_LINES]
    lengths = [(function.name, num_own_lines(function)) for function in functions_of(source)]
    return faults + [f"{name}: {num} lines" for name, num in lengths if num > MAX_FUNCTION_LINES]


def test_files_and_functions_are_short() -> None:
    assert len(FILES) > 300
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in FILES for fault in faults_of(path.read_text())]
    assert not faults, "\n".join(faults)


def test_test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
    }
    assert len(lengths) > 300
    assert not {path: num for path, num in lengths.items() if num > MAX_TEST_FILE_LINES}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("x = 1\n" * MAX_FILE_LINES, []),
        ("x = 1\n" * (MAX_FILE_LINES + 1), ["351 lines"]),
        ("def short():\n" + "    x = 1\n" * 59, []),
        ("async def long():\n" + "    x = 1\n" * 60, ["long: 61 lines"]),
        ("class A:\n    def inner(self):\n" + "        x = 1\n" * 60, ["inner: 61 lines"]),
        ("@triton.jit\ndef kernel():\n" + "    x = 1\n" * 60, []),
        ("def launch():\n    kernel[(1,)](\n" + "        x,\n" * 70 + "    )\n", []),
        ("def call():\n    function(\n" + "        x,\n" * 70 + "    )\n", ["call: 73 lines"]),
    ],
)
def test_long_files_and_functions_are_found(source: str, faults: list[str]) -> None:
    assert faults_of(source) == faults
