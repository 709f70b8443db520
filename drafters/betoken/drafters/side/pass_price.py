"""The cost of a pass of the layer, in tokens that would be emitted meanwhile. Knows times and counts, no drafts."""

_KEPT = 0.95
"""Part of what was seen that is still counted after one more sight."""


class PassPrice:
    """Means over the last passes and rounds; free until something was seen."""

    def __init__(self) -> None:
        self._pass_ns = self._num_passes = 0.0
        self._tokens = self._round_ns = 0.0
        self._new_tokens = 0
        self._last_ns: int | None = None

    def add_pass(self, duration_ns: int) -> None:
        """A pass took so long."""
        self._pass_ns = self._pass_ns * _KEPT + duration_ns
        self._num_passes = self._num_passes * _KEPT + 1.0

    def add_tokens(self, num_tokens: int) -> None:
        """So many were emitted since the last round."""
        self._new_tokens += num_tokens

    def begin_round(self, now_ns: int) -> None:
        """Another round begins (`time.perf_counter_ns`); one without tokens before it was a pause."""
        if self._last_ns is not None and self._new_tokens:
            self._tokens = self._tokens * _KEPT + self._new_tokens
            self._round_ns = self._round_ns * _KEPT + (now_ns - self._last_ns)
        self._last_ns, self._new_tokens = now_ns, 0

    @property
    def price(self) -> float:
        """Tokens a pass has to bring."""
        if not self._num_passes or not self._round_ns:
            return 0.0
        return self._pass_ns / self._num_passes * self._tokens / self._round_ns
