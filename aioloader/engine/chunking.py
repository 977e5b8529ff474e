"""How many records travel together: enough to hide the cost of a hop, few enough to keep every worker busy."""

from __future__ import annotations

__all__ = ["ChunkSize"]

_TARGET_S = 0.004  # a hop costs about 0.1 ms; 4 ms of work make that 2-3 % and still balance well
_MAX_RECORDS = 512
_MAX_GROWTH = 4
_SMOOTHING = 0.3


class ChunkSize:
    """Follows the measured cost per record. The result of a run never depends on it."""

    def __init__(self, *, num_slots: int, buffer_size: int) -> None:
        self._cap = max(1, min(_MAX_RECORDS, buffer_size // max(1, num_slots)))
        self._cost_s: float | None = None
        self._size = 1

    @property
    def records(self) -> int:
        """Return the number of records for the next chunk."""
        return self._size

    def observe(self, num_records: int, service_s: float) -> None:
        """Learn from a finished chunk."""
        if num_records == 0:
            return
        cost_s = service_s / num_records
        self._cost_s = cost_s if self._cost_s is None else self._cost_s + _SMOOTHING * (cost_s - self._cost_s)
        ideal = int(_TARGET_S / max(self._cost_s, 1e-7))
        self._size = max(1, min(self._cap, ideal, self._size * _MAX_GROWTH))
