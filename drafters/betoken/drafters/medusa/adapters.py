"""Heads by name, read from a folder when first asked for, off the thread that drafts; the least recently used goes.

Knows directories, heads and who uses them; no sequences' ids and no trees.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from betoken.common.economy.acceptance import Calibration
from betoken.common.errors import InvalidArgumentError
from betoken.drafters.medusa.layouts import HeadsLayout, check_base, lay_out
from betoken.drafters.medusa.module import MedusaHeads
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.plausible import check_is_file, check_sizes
from betoken.engine.weights.tensor_files import open_tensors

logger = logging.getLogger(__name__)

FIELD = "drafter.settings.adapter"
_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "pytorch_model.bin",
)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(eq=False)
class Adapter:
    """One set of heads, in memory or not."""

    name: str
    layout: HeadsLayout
    heads: MedusaHeads | None = None
    """None while they are not in memory."""
    num_users: int = 0
    """Open sequences that draft with them."""
    calibrations: list[Calibration] = field(init=False)
    """How often what each head calls likely is right."""
    is_broken: bool = False
    """Whether they could not be read."""

    def __post_init__(self) -> None:
        self.calibrations = [Calibration() for _ in self.layout.blocks]


def describe(directory: Path, target: ModelRunner) -> HeadsLayout:
    """The heads in a directory, whose tensors were not read yet.

    Raises:
        ModelRefusedError: they cannot be read, or do not fit the target, with the reason.
    """
    path = directory / "config.json"
    try:
        check_is_file(path)
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelRefusedError(f"config.json has {path.stat().st_size} bytes, more than {_MAX_CONFIG_BYTES}")
        config: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefusedError(f"config.json: {error}") from error
    if not isinstance(config, dict):
        raise ModelRefusedError("config.json: must be an object")
    check_sizes(config)
    check_base(config, {target.info.model_id})
    file = next((directory / name for name in _FILES if (directory / name).exists()), None)
    if file is None:
        raise ModelRefusedError(f"there is none of {', '.join(_FILES)}")
    return lay_out(open_tensors(file), target.parts.hidden_size, target.info.vocab_size)


class AdapterStore:
    """Adapters of one folder. All methods are for the thread that drafts; reading is done by another."""

    def __init__(self, folder: Path | None, target: ModelRunner, max_resident: int) -> None:
        self._folder = folder
        self._target = target
        self._max_resident = max_resident
        self._known: OrderedDict[str, Adapter] = OrderedDict()
        """Adapters in memory, being read, or wanted, the least recently used first."""
        self._reading: dict[str, Future[MedusaHeads]] = {}
        self._reader = ThreadPoolExecutor(1, "medusa-adapters")

    def acquire(self, name: str) -> Adapter:
        """An adapter for one more sequence; it is read meanwhile if it is not in memory.

        Raises:
            InvalidArgumentError: there is none of that name, or it does not fit the target.
        """
        if self._folder is None:
            raise InvalidArgumentError(FIELD, name, "must be absent, as this worker has no --adapter-dir")
        if not _ID.fullmatch(name):
            raise InvalidArgumentError(FIELD, name, "must be 1 to 128 letters, digits, dots, dashes and underscores")
        adapter = self._known.get(name)
        if adapter is None or adapter.is_broken:
            adapter = self._known[name] = Adapter(name, self._describe(self._folder / name, name))
        self._known.move_to_end(name)
        adapter.num_users += 1
        self.look_after()
        return adapter

    def release(self, adapter: Adapter) -> None:
        """One sequence less uses it."""
        adapter.num_users -= 1
        if adapter.num_users == 0 and adapter.heads is None and adapter.name not in self._reading:
            self._forget(adapter)
        self.look_after()

    @property
    def names_in_memory(self) -> list[str]:
        """Adapters in memory or being read, the least recently used first."""
        return [name for name, adapter in self._known.items() if adapter.heads is not None or name in self._reading]

    def look_after(self) -> None:
        """Take what was read, drop what is too much, and begin to read what is wanted."""
        for name, reading in list(self._reading.items()):
            if reading.done():
                del self._reading[name]
                self._take(self._known[name], reading)
        for adapter in list(self._known.values()):
            if adapter.num_users and adapter.heads is None and not adapter.is_broken:
                if adapter.name not in self._reading and self._make_room():
                    self._reading[adapter.name] = self._reader.submit(MedusaHeads, adapter.layout, self._target.parts)

    def wait(self, adapter: Adapter, timeout_s: float) -> None:
        """Wait until it was read, at most this long; not if it has no room."""
        reading = self._reading.get(adapter.name)
        if reading is not None:
            try:
                reading.exception(timeout_s)
            except TimeoutError:
                return
        self.look_after()

    def is_coming(self, adapter: Adapter) -> bool:
        """Whether it is being read."""
        return adapter.name in self._reading

    def check_integrity(self) -> None:
        """Raises when more are in memory than may be."""
        assert len(self.names_in_memory) <= self._max_resident, f"{self.names_in_memory} are in memory"
        assert all(adapter.num_users >= 0 for adapter in self._known.values()), "an adapter was released too often"

    def _describe(self, directory: Path, name: str) -> HeadsLayout:
        if not directory.is_dir():
            raise InvalidArgumentError(FIELD, name, "must be one in the worker's --adapter-dir")
        try:
            return describe(directory, self._target)
        except ModelRefusedError as error:
            raise InvalidArgumentError(FIELD, name, f"must fit the target, but {_one_part(error)}") from error

    def _take(self, adapter: Adapter, reading: Future[MedusaHeads]) -> None:
        try:
            adapter.heads = reading.result()
        except Exception:  # a file that changed or ended: its sequences go on without drafts
            logger.exception("the adapter %s cannot be read", adapter.name)
            adapter.is_broken = True
        if not adapter.num_users and adapter.is_broken:
            self._forget(adapter)

    def _make_room(self) -> bool:
        """Whether one more may be in memory, after evicting the least recently used idle one."""
        resident = self.names_in_memory
        if len(resident) < self._max_resident:
            return True
        idle = next((name for name in resident if not self._known[name].num_users and name not in self._reading), None)
        if idle is None:
            return False
        self._forget(self._known[idle])
        return True

    def _forget(self, adapter: Adapter) -> None:
        if self._known.get(adapter.name) is adapter:
            del self._known[adapter.name]


def _one_part(error: ModelRefusedError) -> str:
    """Its text without what ends a field's name in an error's."""
    return str(error).replace(": ", " is ", 1).replace(": ", ", ")
