"""What the engine needs to know, as it travels to its host, and the run that a host is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from aioloader.faults import FaultPolicy
from aioloader.order.lanes import LaneMap
from aioloader.pools.recovery import RecoveryOptions
from aioloader.protocols import Batching, Collator, Json, RecordId, Source

__all__ = ["Plan", "Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A loader's configuration, checked by `Loader`."""

    source: Source
    preprocess: bytes
    batching: Batching
    collate: Collator
    lanes: LaneMap
    seed: int
    pool: str
    num_workers: int
    buffer_size: int | None
    memory_limit: int
    prefetch_batches: int | None
    end: str
    fingerprint: dict[str, Json]
    recovery: RecoveryOptions
    faults: FaultPolicy
    stall_timeout_s: float | None
    raise_on_stall: bool
    pin_memory: bool = False
    worker_cpus: tuple[int, ...] = ()

    num_distinct: int | None = None
    """Records of an epoch of the source, where `end="repeat"` fills it up with some of them again."""

    @property
    def keep_partial(self) -> bool:
        """Return whether a last micro-batch that is not full is delivered."""
        return self.end != "drop"

    @property
    def makes_fillers(self) -> bool:
        """Return whether lanes that have nothing left go on with fillers until the last one has nothing left."""
        return self.end == "pad" and self.lanes.num_lanes > 1

    @property
    def num_records(self) -> int | None:
        """Return the records of an epoch, None if that is not known."""
        number: int | None = getattr(self.source, "num_records", None)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass: from `state` through the epochs before `end_epoch` (None: without end); a pass has `epochs` of them.

    Attributes:
        state: Where it begins.
        end_epoch: See above.
        epochs: See above.
        resumed: Whether the state was loaded.
        quarantined: Records to leave out beside those of the state: other ranks have found out about them.
    """

    state: Json
    end_epoch: int | None
    epochs: int | None = 1
    resumed: bool = False
    quarantined: frozenset[RecordId] = frozenset()

    def following(self, state: Json) -> Run:
        """Return the pass after this one: what a resumed pass that has nothing left goes on with, so that none is empty."""
        end_epoch = None if self.epochs is None else int(state["source"]["epoch"]) + self.epochs
        return Run(state=state, end_epoch=end_epoch, epochs=self.epochs, quarantined=self.quarantined)
