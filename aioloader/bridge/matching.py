"""Whether the ranks of a job fit together: checked before a pass, after its first step, and then now and then, in the background.

pass begins      cards of all ranks, compared before the first micro-batch
step s, s + n    digests of what each rank was given: the round runs while the next steps are trained on,
                 and its result is known before the next one begins
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from aioloader.bridge.batch import Batch
from aioloader.bridge.cards import Card, compare
from aioloader.bridge.deliveries import Deliveries
from aioloader.bridge.rounds import Rounds
from aioloader.errors import SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json, RecordId
from aioloader.state import diff

__all__ = ["Matching"]

_READ_TIMEOUT_S = 5.0
_NUMBERS_PER_RANK = 12
"""What a rank says at most: its card, or the digests of a coordinate of its own and some of its records."""


class Matching:
    """The checks of one rank. Collective: all ranks of the job make theirs, and begin passes, alike.

    Args:
        mesh: Where this rank stands.
        every: Steps from one check of deliveries to the next.
        num_lanes: Lanes of this rank: micro-batches in a step.
        timeout_s: How long to wait for a rank.
    """

    def __init__(self, mesh: Mesh, *, every: int, num_lanes: int, timeout_s: float) -> None:
        self._mesh = mesh
        self._every = every
        self._num_lanes = num_lanes
        self._timeout_s = timeout_s
        width = _NUMBERS_PER_RANK * (1 + dist.get_world_size())
        self._rounds = Rounds(timeout_s, operation="check of ranks", task="take part in the check of their data", width=width)
        self.cards: list[Card] = []
        self._deliveries = Deliveries(mesh)
        self._turn = self._step = self._first_step = 0

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return self._rounds.is_current

    def begin_pass(
        self, card: Card, shared: Json, own: Json, *, quarantined: Collection[RecordId] = (), turn: int, can_repeat: bool
    ) -> frozenset[RecordId]:
        """Compare this rank with the others, and return the records that any of them knows to be left out; blocks until all are there.

        Args:
            card: Of this rank.
            shared: What its digest `shared` is made of.
            own: What its digest `own` is made of.
            quarantined: The records that it knows to be left out.
            turn: Micro-batches of the step to begin with that were delivered before.
            can_repeat: Whether a record may rightly be delivered twice in this pass.

        Raises:
            SynchronizationError: Ranks do not fit together, or one is missing.
        """
        number = self._rounds.begin_pass()
        if quarantined:
            self._publish_ids("quarantined", quarantined)
        self.cards = [Card(*numbers) for numbers in self._rounds.exchange(card._replace(num_quarantined=len(quarantined)))]
        compare(self.cards, lambda rank, other: self._explain({"all": shared, "peers": own}, rank, other))
        self._deliveries = Deliveries(self._mesh, pass_number=number, can_repeat=can_repeat)
        self._turn, self._step = turn, card.step
        self._first_step = max(one.step for one in self.cards)  # some ranks may have to finish a step before
        return self._all_quarantined(quarantined)

    def _all_quarantined(self, own: Collection[RecordId]) -> frozenset[RecordId]:
        """Return what all ranks know. The first rank gathers it, so that the store is not asked by each for all others."""
        known = frozenset(own)
        if self._rounds.rank == self._rounds.ranks[0]:
            for rank, card in enumerate(self.cards):
                if card.num_quarantined and rank != self._rounds.rank:
                    known |= self._read_ids("quarantined", rank)
            if any(card.num_quarantined for card in self.cards):
                self._publish_ids("all quarantined", known)
        elif any(card.num_quarantined for card in self.cards):
            known |= self._read_ids("all quarantined", self._rounds.ranks[0])
        return known

    def _publish_ids(self, name: str, ids: Collection[RecordId]) -> None:
        self._rounds.publish(name, json.dumps(sorted(ids)))

    def _read_ids(self, name: str, rank: int) -> frozenset[RecordId]:
        text = self._rounds.read(name, rank, self._timeout_s)
        if text is None:
            message = (
                f"on rank {self._rounds.rank}: expected rank {rank} to say which records are quarantined, got nothing within "
                f"{self._timeout_s:g} s; look in the logs there for why it stopped"
            )
            raise SynchronizationError("check of ranks", message, missing=[rank])
        return frozenset((shard, row) for shard, row in json.loads(text))

    @property
    def is_overdue(self) -> bool:
        """Return whether the last check has to be known before the next micro-batch; takes its result if it is there.

        Raises:
            SynchronizationError: Ranks were given what does not fit together, or one is missing.
        """
        if not self._rounds.is_running:
            return False
        if not self._is_checked and not self._rounds.is_done:
            self._rounds.answer()
            return False
        result = self._rounds.take()
        if result is None:
            return True
        self._deliveries.learn(result)
        return False

    def wait(self) -> None:
        """Wait, blocking, for the result of the last check; may return early."""
        self._rounds.wait()

    def note(self, batch: Batch) -> None:
        """Take note of a micro-batch that was delivered; begin a check where one is due."""
        if self._step >= self._first_step:
            self._deliveries.note((batch.step, batch.lane, batch.epoch, batch.num_samples))
        if self._is_checked:
            self._deliveries.look_at(batch.samples, _content(batch))
        self._turn += 1
        if self._turn == self._num_lanes:
            if self._is_checked:
                self._rounds.begin(self._deliveries.contribution(batch.step))
            self._turn, self._step = 0, self._step + 1

    def fail(self) -> None:
        """Tell the other ranks that the pass has failed here: with what they learn next, which may be what they wait for."""
        self._rounds.begin(self._deliveries.failure(self._rounds.rank))

    def close(self) -> None:
        """Give the group back."""
        self._rounds.close()

    @property
    def _is_checked(self) -> bool:
        """Return whether the present step is looked at closely."""
        return self._step >= self._first_step and (self._step - self._first_step) % self._every == 0

    def _explain(self, config: Json, rank: int, other: int) -> str:
        """Return how the configurations of two ranks differ. All ranks come here, or none."""
        self._rounds.publish("configuration", json.dumps(config))
        texts = [self._rounds.read("configuration", one, _READ_TIMEOUT_S) for one in (rank, other)]
        if None in texts:
            return "one of them is gone"
        left, right = (json.loads(text or "") for text in texts)
        found = diff(left["all"], right["all"]) or diff(left["peers"], right["peers"])
        lines = [f"{name}: {a!r} on rank {rank}, {b!r} on rank {other}" for name, a, b in found]
        return "; ".join(lines[:5]) or "in nothing that can be told"


def _content(batch: Batch) -> Iterator[memoryview]:
    """Return the bytes of the fields that are tensors on the CPU."""
    for name in sorted(batch):
        value: Any = batch[name]
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            yield memoryview(value.contiguous().flatten().view(torch.uint8).numpy().data)
