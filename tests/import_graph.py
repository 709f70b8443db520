"""Import statements of all source roots, read without importing them."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def source_files() -> Iterator[tuple[str, Path]]:
    """(package, file) for every Python file below `<root>/betoken/`."""
    for folder in sorted(ROOT.glob("*/betoken/*")):
        if folder.is_dir():
            for path in sorted(folder.rglob("*.py")):
                if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                    yield folder.name, path


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a file, also those inside functions and type-checking blocks."""
    package = path.relative_to(ROOT).parts[1:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


FILES = list(source_files())


def module_files(package: str) -> list[tuple[str, Path]]:
    """(dotted name, file) of a package's modules."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__"), path)
        for owner, path in FILES
        if owner == package
    ]


def nearest(name: str, modules: Mapping[str, Path]) -> str | None:
    """The module of an imported name."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None
