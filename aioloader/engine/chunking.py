"""How many records travel together, and how many may be in flight: enough to hide the cost of a hop and a slow head, no more."""

from __future__ import annotations

__all__ = ["MAX_BUFFER", "ChunkSize", "buffer_limit"]

_WORK_PER_HOP = 40  # a chunk's work against what its way costs the engine, so that this is 2-3 % of it
_MIN_TARGET_S = 0.004
_MAX_TARGET_S = 0.032  # above this, chunks balance badly
_MAX_RECORDS = 512
_MAX_GROWTH = 4
_SMOOTHING = 0.3
_MAX_BYTES = 1 << 24
MAX_BUFFER = 8192
_MIN_BUFFER = 256
_CHUNKS_AHEAD = 64  # per worker: work for the others while one record takes most of a second


class ChunkSize:
    """Follows the measured cost per record. The result of a run never depends on it.

    A chunk holds at most 16 MiB of records or results, and at most a quarter of its share of `memory_limit`, unless one record is larger.
    """

    def __init__(self, *, num_slots: int, buffer_size: int, memory_limit: int) -> None:
        self._cap = max(1, min(_MAX_RECORDS, buffer_size // max(1, num_slots)))
        self.max_bytes = min(_MAX_BYTES, memory_limit // (4 * max(1, num_slots)))
        """Of the records of one chunk, and of their results, unless a single one is larger."""
        self._cost_s: float | None = None
        self._target_s = _MIN_TARGET_S
        self._size = 1

    @property
    def records(self) -> int:
        """Return the number of records for the next chunk."""
        return self._size

    def observe_hop(self, cost_s: float) -> None:
        """Learn what a chunk's way costs the engine; a slow or busy machine is better served by fewer chunks."""
        self._target_s = max(_MIN_TARGET_S, min(_MAX_TARGET_S, _WORK_PER_HOP * cost_s))

    def observe(self, num_records: int, service_s: float, nbytes: int) -> None:
        """Learn from a finished chunk."""
        if num_records == 0:
            return
        cost_s = service_s / num_records
        self._cost_s = cost_s if self._cost_s is None else self._cost_s + _SMOOTHING * (cost_s - self._cost_s)
        ideal = int(self._target_s / max(self._cost_s, 1e-7))
        fitting = self.max_bytes * num_records // max(1, nbytes)
        self._size = max(1, min(self._cap, ideal, fitting, self._size * _MAX_GROWTH))


def buffer_limit(fixed: int | None, *, num_workers: int, chunk_size: int) -> int:
    """Return how many records may be in flight: what the user fixed, or what keeps the workers busy behind a slow one."""
    return fixed or max(_MIN_BUFFER, min(MAX_BUFFER, num_workers * _CHUNKS_AHEAD * chunk_size))
