"""The loop of the ranks after rank 0: each does what rank 0 announces, over its own layers and columns."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from betoken.engine.forward import Forward
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks import micro_batches
from betoken.engine.ranks.commands import Command, Numbers, unpack, unpack_batch, unpack_copies, unpack_paths
from betoken.engine.weights.activations import exact_rows


class Follower:
    """One rank's forward, driven by rank 0."""

    def __init__(self, model: Any, forward: Forward, group: RankGroup, cache_dir: Path) -> None:
        self._model, self._forward, self._group = model, forward, group
        self._cache_dir = cache_dir
        self._exact = ExitStack()

    @torch.inference_mode()
    def run(self) -> None:
        """Follow rank 0 until it loads the model anew.

        Raises:
            RankLostError: another rank has ended.
        """
        while True:
            command, parts = unpack(self._group.receive())
            if command is Command.RELOAD:
                return
            self._follow(command, parts)

    def _follow(self, command: Command, parts: list[Numbers]) -> None:
        forward = self._forward
        match command:
            case Command.FORWARD:
                micro_batches.run(forward, unpack_batch(parts), self._group)
            case Command.COMPACT:
                forward.compact(unpack_paths(parts))
            case Command.COPY_STATES:
                forward.copy_states(unpack_copies(parts))
            case Command.COMPILE:
                self._compile()
            case Command.RUN_EAGERLY:
                forward.run_eagerly()
            case Command.HEAD | Command.EMBED if not self._group.is_last_stage:
                pass
            case Command.HEAD:
                states = torch.empty(parts[0].tolist(), dtype=forward.parts.dtype, device=forward.parts.device)
                self._group.columns.broadcast(states)
                forward.parts.head(states)
            case Command.EMBED:
                token_ids = torch.empty(parts[0].tolist(), dtype=torch.int64, device=forward.parts.device)
                self._group.columns.broadcast(token_ids)
                forward.parts.embed(token_ids)
            case Command.EXACT_ROWS:
                self._exact.close()
                if parts[0][0]:
                    self._exact.enter_context(exact_rows(self._model))

    def _compile(self) -> None:
        is_compiled = True
        try:
            self._forward.compile(self._cache_dir)
        except Exception:  # tracer and compiler raise many types; rank 0 reports its own reason
            is_compiled = False
        if not self._group.least(is_compiled):
            self._forward.run_eagerly()
