"""Who is missing: ranks that wait say where, through the store, when one of them has waited too long.

    rank 0   waits in "sync_gradients, step 17, bucket 1 of 8" ... time is nearly up: opens the roll call, signs, reads
    rank 1   waits in "counts of step 17" ..................... sees that it is open: signs, reads
    rank 2   is not waiting for anybody ....................... no sign: missing

A rank elsewhere in its step is told from one that is gone, so the error says which of the two happened.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Attendance", "RollCall"]

_GRACE_S = 5.0
"""How long a roll call is open at most: ranks that wait look for one every second."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2


class Attendance(NamedTuple):
    """What a roll call found: the ranks that gave no sign, and those that wait in another operation, by rank."""

    missing: list[int]
    elsewhere: dict[int, str]
    store_is_gone: bool = False

    def describe(self) -> str:
        """Return it as the part of a message that follows "got"."""
        if self.store_is_gone:
            return "no answer, and the store that says who is there is gone too, so look first at rank 0"
        parts = [f"no sign of dp_rank {', '.join(map(str, self.missing))}"] if self.missing else []
        parts += [f"dp_rank {rank} waiting in {where!r}" for rank, where in self.elsewhere.items()]
        return " and ".join(parts) or "a sign of life from every rank"


class RollCall:
    """The place in the default group's store where the ranks of one group sign.

    Args:
        members: The global ranks of the group, in its order; they tell roll calls of different groups apart.
        rank: This rank's place among them.
    """

    def __init__(self, members: Sequence[int], rank: int) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._size = len(members)
        self._rank = rank
        self._num_signs = time.monotonic_ns()  # no two signs of a rank are alike, from whichever object
        self._before: dict[int, str] | None = None
        self._name = f"aioloader/roll call/{hashlib.blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()}"

    @staticmethod
    def grace_s(timeout_s: float) -> float:
        """Return how long before its deadline a rank opens the roll call."""
        return min(_GRACE_S, timeout_s / 2)

    @property
    def is_open(self) -> bool:
        """Return whether a rank of this group has opened one that is not closed."""
        with suppress(RuntimeError):  # the store may be gone with its rank
            return bool(self._store.check([self._open_key]))
        return False

    def close(self) -> None:
        """End it for all ranks: nobody is missing any more."""
        with suppress(RuntimeError):
            self._store.delete_key(self._open_key)

    def hold(self, where: str, ends_s: float, is_over: Callable[[list[int]], bool]) -> Attendance:
        """Open a roll call and return who is not here: who has not signed since it was opened. One that found somebody missing goes on.

        Args:
            where: What this rank waits for.
            ends_s: Monotonic time at which it ends at the latest.
            is_over: Given the ranks that are missing so far, whether it ends now.
        """
        try:
            self._store.set(self._open_key, "yes")
            self._before = self._before or {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
            before, pause_s = self._before, _FIRST_PAUSE_S
            now = {rank: self._read(rank) for rank in before}
            missing = [rank for rank in now if now[rank] == before[rank]]
            while time.monotonic() < ends_s and not is_over(missing):
                self._sign(where)
                time.sleep(max(0.0, min(pause_s, ends_s - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                now |= {rank: self._read(rank) for rank in missing}
                missing = [rank for rank in missing if now[rank] == before[rank]]
        except RuntimeError:
            return Attendance([], {}, store_is_gone=True)
        self._before = self._before if missing else None
        places = {rank: sign.partition(" ")[2] for rank, sign in now.items() if rank not in missing}
        return Attendance(missing, {rank: place for rank, place in places.items() if place != where})

    @property
    def _open_key(self) -> str:
        return f"{self._name}/open"

    def _sign(self, where: str) -> None:
        self._num_signs += 1
        self._store.set(self._key(self._rank), f"{self._num_signs} {where}")

    def _read(self, rank: int) -> str:
        sign: str = self._store.get(self._key(rank)).decode() if self._store.check([self._key(rank)]) else ""
        return sign

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"
