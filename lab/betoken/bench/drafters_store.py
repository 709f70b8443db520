"""The results of the drafter table so far, in one folder, so that a long run can be made in pieces.

`manifest.json` says what decides the speeds; a folder made with anything else is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from betoken.bench.identity_check import IdentityCount
from betoken.bench.record_file import RecordFile, check_manifest, replace_file
from betoken.client import SpeculationPolicy, SpeculationStats


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of one file in one pass."""

    prompts: str
    """File name."""
    index: int
    repeat: int


@dataclass(frozen=True, slots=True)
class SideRun:
    """One answer of one side."""

    num_tokens: int
    seconds: float
    speculation: SpeculationStats | None = None
    """Statistics of the answer; None for `transformers`."""

    @property
    def tokens_per_s(self) -> float:
        """Prefill and transport included."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class PromptRun:
    """All sides on one prompt, one after the other, and what comparing their ids came to."""

    task: Task
    category: str
    runs: Mapping[str, SideRun]
    """By side, in the order they ran."""
    identity: IdentityCount
    commit: str
    load_average: float
    """Over the minute before."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Raises:
        ValueError: the record is not of this version's form.
        """
        try:
            return cls(
                task=Task(**record["task"]),
                category=record["category"],
                runs={name: _side_run(run) for name, run in record["runs"].items()},
                identity=IdentityCount(**record["identity"]),
                commit=record["commit"],
                load_average=record["load_average"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"measured by another version of this benchmark: {error}") from error


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Prompts of a category that do not fit the context with their answer."""

    prompts: str
    category: str
    count: int


@dataclass(slots=True)
class DraftersStore:
    """Finished prompts, prompts left out, and the threads `transformers` was found to be fastest with."""

    folder: Path
    done: dict[Task, PromptRun] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The content of the folder.

        Raises:
            ValueError: it holds nothing, or records of another version.
        """
        if not (folder / "manifest.json").exists():
            raise ValueError(f"{folder} holds no measurements")
        store = cls(folder)
        runs = [PromptRun.from_json(record) for record in store._runs_file.read()]
        store.done = {run.task: run for run in runs}
        return store

    @classmethod
    def open_for(cls, folder: Path, manifest: dict[str, Any], prompts: Mapping[str, str]) -> Self:
        """Open or make the folder; `prompts`: file name to fingerprint, of which later runs may bring others.

        Raises:
            ValueError: the folder holds results of another manifest, or of other prompts under a file's name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        check_manifest(folder / "manifest.json", manifest)
        for name, fingerprint in prompts.items():
            check_manifest(folder / f"prompts-{name}.json", {f"fingerprint of {name}": fingerprint})
        return cls.open(folder)

    @property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return manifest

    def append(self, run: PromptRun) -> None:
        """Keep a finished prompt."""
        self._runs_file.append(run.as_json())
        self.done[run.task] = run

    @property
    def left_out(self) -> list[LeftOut]:
        return [LeftOut(**record) for record in self._read("left_out.json", [])]

    def save_left_out(self, left_out: list[LeftOut]) -> None:
        """Replaces what was known of the same files."""
        names = {entry.prompts for entry in left_out}
        kept = [entry for entry in self.left_out if entry.prompts not in names]
        self._write("left_out.json", [asdict(entry) for entry in (*kept, *left_out)])

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """Hardware and versions of each start that measured something."""
        return RecordFile(self.folder / "sessions.jsonl").read()

    def begin_session(self, hardware: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Keep what the runs that follow are measured on."""
        RecordFile(self.folder / "sessions.jsonl").append({"hardware": dict(hardware), "versions": dict(versions)})

    @property
    def num_threads(self) -> dict[str, int]:
        """By method of `transformers`; empty when not found out yet."""
        return dict(self._read("transformers_num_threads.json", {}))

    def save_num_threads(self, num_threads: Mapping[str, int]) -> None:
        self._write("transformers_num_threads.json", dict(num_threads))

    @property
    def _runs_file(self) -> RecordFile:
        return RecordFile(self.folder / "runs.jsonl")

    def _read(self, name: str, absent: Any) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else absent

    def _write(self, name: str, value: Any) -> None:
        replace_file(self.folder / name, json.dumps(value, indent=2))


def _side_run(record: Mapping[str, Any]) -> SideRun:
    speculation = record["speculation"]
    if speculation is None:
        return SideRun(record["num_tokens"], record["seconds"])
    lists = {name: tuple(value) for name, value in speculation.items() if isinstance(value, list)}
    policy = speculation.get("policy")
    changed = lists | {"policy": policy and SpeculationPolicy(**policy)}
    return SideRun(record["num_tokens"], record["seconds"], SpeculationStats(**{**speculation, **changed}))
