"""How many records travel together, and how many may be in flight: enough to hide the cost of a hop and a slow head, no more."""

from __future__ import annotations

__all__ = ["MAX_BUFFER", "BufferLimit", "ChunkSize"]

_TARGET_S = 0.004  # a hop costs about 0.1 ms; 4 ms of work make that 2-3 % and still balance well
_MAX_RECORDS = 512
_MAX_GROWTH = 4
_SMOOTHING = 0.3
MAX_BUFFER = 8192
_MIN_BUFFER = 256
_CHUNKS_AHEAD = 64  # per worker; with 4 ms chunks, work for the others while one record takes a quarter of a second
_FORGETTING = 0.95


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


class BufferLimit:
    """How many records may be in flight: what the user fixed, or what keeps the workers busy; less where records are large."""

    def __init__(self, *, fixed: int | None, memory_limit: int, num_workers: int) -> None:
        self._fixed = fixed
        self._memory_limit = memory_limit
        self._num_workers = num_workers
        self._record_bytes = 0.0

    def after(self, num_records: int, nbytes: int, chunk_size: int) -> int:
        """Return the limit after a chunk whose records took `nbytes` on their way back."""
        if num_records:
            self._record_bytes = max(nbytes / num_records, self._record_bytes * _FORGETTING)
        limit = self._fixed or max(_MIN_BUFFER, min(MAX_BUFFER, self._num_workers * _CHUNKS_AHEAD * chunk_size))
        if self._record_bytes:
            limit = min(limit, int(self._memory_limit / self._record_bytes))
        return max(1, limit)
