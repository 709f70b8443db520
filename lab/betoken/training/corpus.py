"""The text every machine has: the sources of the Python standard library, split into training and held-out files.

Knows files and text, not tokens. Files are sorted by relative path, so two machines with the same
build of Python see the same corpus. Builds of one release differ in some files (`_sysconfigdata*`).
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 25
HELD_OUT_REMAINDER = 7
_SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One source file."""

    path: str
    """Path relative to the standard library, with forward slashes."""
    text: str


@dataclass(frozen=True)
class Corpus:
    """Two disjoint lists of documents in path order."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when any file or the split changes."""
        digest = hashlib.sha256()
        for name, documents in (("training", self.training), ("held_out", self.held_out)):
            for document in documents:
                digest.update(f"{name}\0{document.path}\0{len(document.text)}\0".encode())
                digest.update(document.text.encode())
        return digest.hexdigest()[:12]


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_documents(root: Path) -> list[Document]:
    """Every readable `.py` file under `root`, sorted by relative path; files that are not UTF-8 are left out."""
    paths = (path for path in root.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    documents = []
    for relative in sorted(path.relative_to(root).as_posix() for path in paths):
        try:
            text = (root / relative).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests of the standard library hold a few deliberately broken files
        if text.strip():
            documents.append(Document(relative, text.replace("\r\n", "\n")))
    return documents


def split(documents: Sequence[Document]) -> Corpus:
    """Hold out every 25th file (index % 25 == 7) that is not under `test/`."""
    held_out = tuple(
        document
        for index, document in enumerate(documents)
        if index % HELD_OUT_EVERY == HELD_OUT_REMAINDER and not document.path.startswith("test/")
    )
    held_out_paths = {document.path for document in held_out}
    return Corpus(tuple(document for document in documents if document.path not in held_out_paths), held_out)


def load_corpus(root: Path | None = None) -> Corpus:
    """The split corpus under `root` (default: the running standard library).

    Raises:
        ValueError: `root` holds too few files to hold one out.
    """
    folder = root or stdlib_root()
    corpus = split(read_documents(folder))
    if not corpus.training or not corpus.held_out:
        raise ValueError(f"{folder} holds too few Python sources to train on and to hold out")
    return corpus
