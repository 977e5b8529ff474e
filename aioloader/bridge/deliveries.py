"""What ranks were given, in a few integers: peers (ranks of one dp_rank) must have the same, others no record in common. Pure.

Every rank writes into the places of its own coordinate; the element-wise minimum over all ranks then holds, for each coordinate, the
smallest and (of the negated values) the largest digest. They are equal if and only if the peers are.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aioloader.errors import SynchronizationError
from aioloader.order.mesh import Mesh

__all__ = ["Deliveries", "Seen"]

_NEVER: Final = 1 << 62
"""Above any digest; a minimum ignores it."""

_MASK: Final = _NEVER - 1
_NUM_RECORDS: Final = 8
"""Records of each coordinate that are compared with those of the others."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one round is about: the micro-batches since the last one, and more closely those of one step."""

    step: int
    running: int
    content: int
    records: tuple[int, ...]


class Deliveries:
    """The deliveries of one rank in one pass.

    Args:
        mesh: Where the rank stands.
        pass_number: Tells rounds of different passes apart.
        can_repeat: Whether a record may rightly be delivered twice in a pass.
    """

    def __init__(self, mesh: Mesh, *, pass_number: int = 0, can_repeat: bool = False) -> None:
        self._mesh = mesh
        self._pass_number = pass_number
        self._can_repeat = can_repeat
        self._running = self._content = 0
        self._records: list[int] = []
        self._names: dict[int, Any] = {}
        self._said: Seen | None = None

    def note(self, numbers: Iterable[int]) -> None:
        """Take note of a micro-batch by its numbers: step, lane, epoch, samples, tokens."""
        self._running = hash((self._running, *numbers)) & _MASK

    def look_at(self, samples: Sequence[Any], content: Iterable[memoryview]) -> None:
        """Look more closely at a micro-batch.

        Args:
            samples: Provenance of its samples; equal ones have equal `repr`.
            content: The bytes of its fields.
        """
        self._running = _hash((self._running, samples))
        for part in content:
            self._content = zlib.crc32(part, self._content)
        for sample in samples[: max(1, _NUM_RECORDS // 2)]:
            name = (sample.shard, sample.row, sample.epoch, sample.sub)
            key = _hash(name)
            self._records.append(key)
            self._names[key] = name

    def failure(self, rank: int) -> list[int]:
        """Return what this rank says when its pass has failed, so that the others need not wait for it."""
        return [self._pass_number, -self._pass_number, rank]

    def contribution(self, step: int) -> list[int]:
        """Return what this rank says after a step; begins to count anew."""
        seen = Seen(step, self._running, self._content, tuple(dict.fromkeys(self._records))[:_NUM_RECORDS])
        self._running = self._content = 0
        self._records = []
        self._said = seen
        mesh = self._mesh
        pairs = [_NEVER] * (2 * (mesh.dp_size + mesh.dp_size * mesh.cp_size))
        for place, value in ((mesh.dp_rank, seen.running), (mesh.dp_size + mesh.dp_rank * mesh.cp_size + mesh.cp_rank, seen.content)):
            pairs[2 * place : 2 * place + 2] = value, -value
        records = [_NEVER] * (mesh.dp_size * _NUM_RECORDS)
        begin = mesh.dp_rank * _NUM_RECORDS
        records[begin : begin + len(seen.records)] = seen.records
        return [self._pass_number, -self._pass_number, _NEVER, step, -step, *pairs, *records]

    def learn(self, minimum: Sequence[int]) -> None:
        """Take the result of the round that was contributed to last.

        Raises:
            SynchronizationError: Peers got different micro-batches, two coordinates the same record, ranks are at different steps, or
                one has failed.
        """
        mesh, seen = self._mesh, self._said
        assert seen is not None, "a round is begun before its result is there"
        first_pass, last_pass, failed, first_step, last_step, *rest = minimum
        if failed < _NEVER:
            message = f"expected all ranks to go on, but the loader of rank {failed} failed; look for the error there"
            raise SynchronizationError("check of deliveries", message, missing=[failed])
        if first_pass != -last_pass:
            raise self._error("all ranks in one pass, got some that have left it for the next; begin and leave loops on all ranks alike")
        if first_step != -last_step:
            raise self._error(f"all ranks at one step, got steps {first_step} to {-last_step}")
        num_pairs = mesh.dp_size + mesh.dp_size * mesh.cp_size
        pairs, records = rest[: 2 * num_pairs], rest[2 * num_pairs :]
        for place in range(num_pairs):
            if pairs[2 * place] != -pairs[2 * place + 1]:
                raise self._peers_differ(place)
        names = dict(self._names)
        self._names = {key: names[key] for key in self._records}
        if not self._can_repeat:
            self._check_disjoint(records, names)

    def _check_disjoint(self, records: Sequence[int], names: dict[int, Any]) -> None:
        holders: dict[int, int] = {}
        for dp_rank in range(self._mesh.dp_size):
            for key in records[dp_rank * _NUM_RECORDS : (dp_rank + 1) * _NUM_RECORDS]:
                if key == _NEVER:
                    continue
                holder = holders.setdefault(key, dp_rank)
                if holder != dp_rank:
                    record = f" (shard, row, epoch, sub: {names[key]})" if key in names else ""
                    raise self._error(
                        f"each record on one dp_rank only, got the same one on dp_rank {holder} and {dp_rank}{record}; "
                        "wrap a source that is split already in AlreadySharded, and see that each rank has its own part"
                    )

    def _peers_differ(self, place: int) -> SynchronizationError:
        mesh = self._mesh
        if place < mesh.dp_size:
            return self._error(
                f"the ranks of dp_rank {place} to get the same micro-batches, got different records or counts; choose samples by "
                "mesh.dp_rank, never by the global rank, and see that the source gives the same order everywhere"
            )
        dp_rank, cp_rank = divmod(place - mesh.dp_size, mesh.cp_size)
        at = f"dp_rank {dp_rank}" + (f", cp_rank {cp_rank}" if mesh.cp_size > 1 else "")
        return self._error(
            f"the ranks of {at} to get the same bytes, got the same record ids with different content; choose samples by "
            "mesh.dp_rank, never by the global rank; draw random numbers in preprocess from random, numpy.random or torch as they are "
            "seeded for each record; or use read='group'"
        )

    def _error(self, text: str) -> SynchronizationError:
        assert self._said is not None, "errors are about what was said"
        where = f"on {self._mesh.describe()}, after step {self._said.step}"
        return SynchronizationError("check of deliveries", f"{where}: expected {text}")


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) >> 2
