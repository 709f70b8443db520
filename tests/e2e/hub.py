"""A hub of model repositories on this machine: as much of huggingface.co's protocol as loading a model takes.

It answers from files on disk, keeps what it was asked, and fails on request. It knows nothing of what the files mean.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(/(?P<kind>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """One repository, and the faults of its requests."""

    revisions: dict[str, Path] = field(default_factory=dict)
    """Branch or tag -> directory of its files."""
    is_gated: bool = False
    """Gated without access."""
    failing: str | None = None
    """Pattern of the paths that are answered with status 500."""
    broken_off: str | None = None
    """Pattern of the paths whose answers end half way."""


class Hub:
    """The repositories by id, and the requests so far. Use `serve_hub`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        """Method and path of each, in the order of their arrival."""
        self.endpoint = ""

    def fetched(self, name: str) -> dict[str, list[str]]:
        """The files of a repository whose contents were asked for, each as often as it was, by revision."""
        files: dict[str, list[str]] = {}
        for method, path in self.requests:
            match = _FILE.fullmatch(path)
            if method == "GET" and match is not None and match["name"] == name:
                files.setdefault(match["revision"], []).append(match["path"])
        return {revision: sorted(paths) for revision, paths in files.items()}


def commit_of(directory: Path) -> str:
    """40 hex digits that stand for the contents of a directory."""
    digest = hashlib.sha1()
    for path in _files(directory):
        digest.update(f"\0{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub that answers on a free port meanwhile."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self._fail(404, "EntryNotFound")
        repository = self.hub.repositories.get(match["name"])
        if repository is None:
            return self._fail(401, "RepoNotFound")  # as for a private one
        if repository.failing and re.search(repository.failing, path):
            return self._fail(500, None)
        file, revision = match.groupdict().get("path"), match["revision"] or "main"
        if repository.is_gated and (file or match["kind"] == "tree"):
            return self._fail(401, "GatedRepo")  # what it is called anyone may know
        by_commit = {commit_of(directory): directory for directory in repository.revisions.values()}
        directory = repository.revisions.get(revision) or by_commit.get(revision)
        if directory is None:
            return self._fail(404, "RevisionNotFound")
        commit = commit_of(directory)
        if file is None:
            return self._describe(match["name"], match["kind"] == "tree", directory, commit)
        if not (directory / file).is_file():
            return self._fail(404, "EntryNotFound", commit)
        content = (directory / file).read_bytes()
        is_broken = repository.broken_off is not None and re.search(repository.broken_off, path) is not None
        self._answer(200, content, commit, len(content) // 2 if is_broken and self.command == "GET" else None)

    do_HEAD = do_GET

    def _describe(self, name: str, is_tree: bool, directory: Path, commit: str) -> None:
        files = [(path.relative_to(directory).as_posix(), path.read_bytes()) for path in _files(directory)]
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files
        ]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path, _ in files]}
        self._answer(200, json.dumps(tree if is_tree else info).encode(), commit)

    def _fail(self, status: int, code: str | None, commit: str | None = None) -> None:
        self._answer(status, b"{}", commit, error=code)

    def _answer(
        self, status: int, content: bytes, commit: str | None, end: int | None = None, error: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        for name, value in (("X-Repo-Commit", commit), ("X-Error-Code", error)):
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:end])
        self.close_connection = end is not None

    def log_message(self, format: str, *arguments: object) -> None:
        """Standard error is the tests'."""
