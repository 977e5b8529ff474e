"""Gradients leave while backward still makes others: hooks fill buckets, a full bucket is sent at once, always in the same order.

    backward    2.bias 2.weight          0.bias 0.weight
                       | full                   | full
    bucket 1           o====== on its way =======> arrived
    bucket 2                                    o====== on its way ===> `sync_gradients` waits for this rest only

A bucket that is full early waits for those before it, so all ranks send the same buckets in the same order whatever parameters they
used. What backward makes after its bucket was sent (a second backward outside of `no_sync()`, a parameter in two checkpointed segments)
is late: it is kept apart and sent in a second turn; averages add up.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from aioloader.errors import ConfigError
from aioloader.training.gradients.buckets import Bucket, FlatGradients
from aioloader.training.gradients.sync_stats import CommunicationClock
from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.groups.pending import Pending

__all__ = ["Outbox", "attach"]


class Outbox:
    """The gradients of one step on their way: which have come, which buckets are sent, what came too late for its bucket.

    Args:
        named: The parameters with their names.
        buckets: In the order in which they are sent.
        scale: See `FlatGradients`.
        alone: There is no other rank: gradients are only kept here where they are summed in another dtype than their own.

    Attributes:
        group: Where buckets are sent; None: hooks send nothing yet.
        is_accumulating: Hooks send nothing for now.
        is_settled: No gradient has come since the last round ended.
        problem: Why the gradients of this step are of no use.
        lost: The ranks that went missing, as far as known, which ends all sending; None: there are none.
        exposed_s: Seconds spent in `wait`.
        num_bytes: Bytes handed to all-reduce.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], buckets: Sequence[Bucket], scale: float, *, alone: bool) -> None:
        self.buckets = buckets
        self.group: DataParallelGroup | None = None
        self.is_accumulating = False
        self.is_settled = False
        self.problem: Exception | None = None
        self.exposed_s = 0.0
        self.num_bytes = 0
        self._named = named
        self._scale = scale
        self._alone = alone
        self._places = {index: (number, place) for number, bucket in enumerate(buckets) for place, index in enumerate(bucket.indexes)}
        self._flats: dict[int, FlatGradients] = {}
        self._late: dict[int, FlatGradients] = {}
        self._awaited = [set(bucket.indexes) for bucket in buckets]
        self._sent: list[Pending] = []
        self._num_arrived = 0
        self._clock = CommunicationClock()
        self._on_host = all(bucket.device.type == "cpu" for bucket in buckets)
        self._is_in_backward = False
        self.lost: Sequence[int] | None = None
        self._lock = threading.Lock()  # backward runs a thread for each accelerator

    @property
    def communication_s(self) -> float:
        """Return the seconds in which a bucket was under way; NaN where the host does not see it."""
        return self._clock.busy_s if self._on_host else math.nan

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way."""
        return all(pending.is_completed for pending in self._sent)

    def receive(self, index: int) -> None:
        """Take the gradient that backward has just left in `.grad`, and send the buckets that are full now."""
        with self._lock:
            self._look_for_arrivals()
            self.is_settled = False
            number, place = self._places[index]
            sends = self.group is not None and not self.is_accumulating
            widens = self.buckets[number].widens
            if self.lost is not None or (self.is_accumulating and not widens):
                return
            self._watch_backward()
            if sends or widens:
                self._take(number, place)
            if sends:
                self._awaited[number].discard(index)
                while len(self._sent) < len(self.buckets) and not self._awaited[len(self._sent)]:
                    self._send_next()

    def collect(self) -> None:
        """Take what is left in `.grad`: of parameters that the last backward did not use, and of a backward after the sending."""
        if self._is_in_backward:
            self.note_problem(
                "sync_gradients()",
                expected="a backward that ran to its end",
                got="one that ended in an error",
                do="call discard_gradients() on this rank after such an error, and go on with the next step on all ranks",
            )
        for number, bucket in enumerate(self.buckets):
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None and (bucket.widens or not self._alone):
                    self._take(number, place)

    def used(self) -> list[bool]:
        """Return, by parameter, whether this rank has a gradient of it."""
        return [
            any(number in flats and flats[number].is_filled[place] for flats in (self._flats, self._late))
            for number, place in (self._places[index] for index in range(len(self._named)))
        ]

    def late(self) -> list[bool]:
        """Return, by bucket, whether this rank has gradients that came after it was sent."""
        return [number in self._late for number in range(len(self.buckets))]

    def send_rest(self) -> None:
        """Send the buckets that are not sent yet."""
        while len(self._sent) < len(self.buckets):
            self._send_next()

    def wait(self, deadline_s: float, operation: str) -> None:
        """Wait until all buckets have arrived, and take over each as it comes.

        Raises:
            SynchronizationError: One has not; it is named.
        """
        started = time.perf_counter()
        for number, pending in enumerate(self._sent):
            pending.wait_in_stream(deadline_s - time.monotonic(), self._name(operation, number))
            self._look_for_arrivals()
            self.exposed_s += time.perf_counter() - started
            self._flats[number].open()
            started = time.perf_counter()

    def send_late(self, numbers: Sequence[int], deadline_s: float, operation: str) -> None:
        """Send these buckets a second time, with what came late on any rank, and add it to their averages.

        Raises:
            SynchronizationError: One has not arrived; it is named.
        """
        flats = [(number, self._flat(self._late, number)) for number in numbers]
        started = [self._start(number, flat.seal()) for number, flat in flats]
        for (number, flat), pending in zip(flats, started, strict=True):
            pending.wait_in_stream(deadline_s - time.monotonic(), f"{self._name(operation, number)}, second turn")
            flat.open()
            self._flats[number].values.add_(flat.values)

    def hand_out(self, used: Sequence[bool]) -> None:
        """Leave the averages in `.grad`."""
        for number, bucket in enumerate(self.buckets):
            if bucket.widens or not self._alone:
                self._flat(self._flats, number).hand_out([used[index] for index in bucket.indexes])

    def average(self, index: int) -> Tensor | None:
        """Return what `hand_out` left for a parameter, in the dtype of the sums; None for one without a gradient."""
        number, place = self._places[index]
        bucket = self.buckets[number]
        gradient = bucket.parameters[place].grad
        return self._flats[number].views[place] if gradient is not None and bucket.widens else gradient

    def begin_anew(self) -> None:
        """End the round: the next gradients begin new sums."""
        for flat in self._flats.values():
            flat.clear()
        self._late.clear()
        self._sent.clear()
        self._awaited = [set(bucket.indexes) for bucket in self.buckets]
        self._num_arrived = 0
        self._is_in_backward = False
        self.problem = None
        self.is_settled = True

    def drop(self) -> None:
        """Leave every parameter without a gradient, so that no optimizer can apply what is of no use."""
        for _, parameter in self._named:
            parameter.grad = None
        self.begin_anew()
        self.is_settled = False

    def cut(self, missing: Sequence[int]) -> None:
        """Give up on the other ranks: collectives under way may still write to what was sent, which is left to them."""
        self.lost = missing
        self._flats = {}
        self.drop()

    def note_problem(self, where: str, *, expected: str, got: str, do: str) -> None:
        """Keep an error for `sync_gradients`, where all ranks learn of it: raised at once, it would leave the others waiting."""
        if self.problem is None:
            self.problem = ConfigError(where, expected=expected, got=got, do=do)

    def _take(self, number: int, place: int) -> None:
        parameter = self.buckets[number].parameters[place]
        if parameter.grad is None:
            return
        if parameter.grad.layout != torch.strided:
            parameter.grad = None
            name = self._named[self.buckets[number].indexes[place]][0]
            do = "make the embedding with sparse=False"
            self.note_problem(f"gradient of {name}", expected="dense gradients", got="sparse ones", do=do)
            return
        self._flat(self._flats if number >= len(self._sent) else self._late, number).take(place)

    def _flat(self, flats: dict[int, FlatGradients], number: int) -> FlatGradients:
        if number not in flats:
            flats[number] = FlatGradients(self.buckets[number], self._scale)
        return flats[number]

    def _send_next(self) -> None:
        number = len(self._sent)
        self._sent.append(self._start(number, self._flat(self._flats, number).seal()))
        self._clock.start(time.perf_counter())

    def _start(self, number: int, wire: Tensor) -> Pending:
        assert self.group is not None, "a group is made before anything is sent"
        op = torch.distributed.ReduceOp.AVG if self.group.averages(wire.device) else torch.distributed.ReduceOp.SUM
        self.num_bytes += self.buckets[number].num_bytes
        return self.group.start(wire, self._name("backward", number), op=op)

    def _name(self, operation: str, number: int) -> str:
        return f"{operation}, bucket {number + 1} of {len(self.buckets)} ({self.buckets[number].describe()})"

    def _look_for_arrivals(self) -> None:
        while self._on_host and self._num_arrived < len(self._sent) and self._sent[self._num_arrived].is_completed:
            self._num_arrived += 1
            self._clock.finish(time.perf_counter())

    def _watch_backward(self) -> None:
        """Learn whether this backward runs to its end."""
        if not self._is_in_backward:
            self._is_in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False


def attach(outbox: Outbox, parameters: Sequence[Parameter]) -> list[RemovableHandle]:
    """Have each parameter tell the outbox, for as long as that lives, when backward has made its gradient; return how to stop it."""
    receive = weakref.WeakMethod(outbox.receive)

    def tell(index: int, parameter: Tensor) -> None:
        alive = receive()
        if alive is not None:
            alive(index)

    return [
        parameter.register_post_accumulate_grad_hook(partial(tell, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
