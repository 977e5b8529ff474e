"""One rank reads for its peers: every micro-batch that it delivers goes to them too, with its state, and so do the end and errors.

    reader   try_receive -> head, memory ~~~~ broadcast ~~~~> peers        each in the call that asks for the micro-batch

A head of fixed size says what follows and holds everything but the arrays, where that fits; the arrays come as one piece of memory,
sent from where they lie. A reader that leaves its loop says so in the store: a broadcast that nobody takes would hold up its exit.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from aioloader.bridge.groups import Group
from aioloader.engine.channel import Delivered
from aioloader.engine.host import Ended
from aioloader.engine.output import Ready
from aioloader.engine.parcel import pack, unpack
from aioloader.errors import SynchronizationError
from aioloader.protocols import Json
from aioloader.runtime.moving import pack_error, unpack_error

__all__ = ["PeerFeed", "Relay", "Sender"]

_OPERATION: Final = "read='group'"
_BATCH, _END, _ERROR = 1, 2, 3
_HEAD_BYTES: Final = 1 << 14
_NUMBERS: Final = 4
_ROOM: Final = _HEAD_BYTES - 8 * _NUMBERS

_MAX_OPEN = 2
"""Micro-batches that may be on their way at once."""

_MORE_PATIENCE_S = 10.0
"""How much longer peers wait for the reader than it waits for other ranks: it may be about to tell them which one is missing."""

_SLICE_S = 0.2  # a wait in the process group cannot be interrupted by Ctrl-C
_LOOK_EVERY_S = 0.5
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005

_numbers: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)


class Relay:
    """The group of ranks that share a dp_rank; the first of them reads. Making one is collective over the job.

    Args:
        groups: The ranks of each such group, rising; the same on all ranks.
        timeout_s: How long a rank waits for another.
        device: Where arrays travel and arrive; the group's backend for that device is used (gloo for the CPU, NCCL for CUDA).

    Attributes:
        pass_number: The number of the pass, the same on all ranks of the group.
        sent: Collectives under way, with the tensors that they read.
        awaited: A collective that was begun and not waited for, with the tensor that it writes; the next pass takes it over.

    Raises:
        SynchronizationError: A rank of the group did not connect.
    """

    def __init__(self, groups: Sequence[Sequence[int]], *, timeout_s: float, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.ranks = list(next(ranks for ranks in groups if self.rank in ranks))
        self.reader = self.ranks[0]
        self.device = device
        self.timeout_s = timeout_s
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name = f"aioloader/relay/{'-'.join(map(str, self.ranks))}/{next(_numbers[tuple(self.ranks)])}"
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        made = [Group(ranks, backend=backend, timeout_s=timeout_s, operation=_OPERATION) for ranks in groups]
        self._group = next(group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks)
        self.pass_number = 0
        self.sent: deque[tuple[list[Any], list[Any]]] = deque()
        self.awaited: tuple[Any, torch.Tensor] | None = None

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return self._group.is_current

    @property
    def is_reader(self) -> bool:
        """Return whether this rank reads for the others."""
        return self.rank == self.reader

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send the reader's tensor to its peers, into theirs.

        Raises:
            SynchronizationError: The connection is gone.
        """
        try:
            return self._group.broadcast(tensor)
        except RuntimeError as error:
            raise self.failed(str(error)) from error

    def finish(self, work: Any) -> None:
        """Wait until a broadcast is done.

        Raises:
            SynchronizationError: It failed, or a rank did not come in time.
        """
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(datetime.timedelta(seconds=_SLICE_S))
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() >= until:
                    raise self.failed(str(error)) from error
                continue
            return

    def say_left(self) -> None:
        """Tell the peers, where they look for it, that nothing more of this pass is sent."""
        try:
            self._store.set(self._key(), "left")
        except RuntimeError:
            return  # the store went with its rank

    def has_left(self) -> bool:
        """Return whether the reader said that it left."""
        try:
            return bool(self._store.check([self._key()]))
        except RuntimeError:
            return False

    def failed(self, reason: str) -> SynchronizationError:
        """Return the error of this rank."""
        role = "reads for" if self.is_reader else f"waits for rank {self.reader}, which reads for"
        return SynchronizationError(
            _OPERATION,
            f"rank {self.rank} {role} ranks {self.ranks}: expected all of them to take the same micro-batches, got: {reason}; look in "
            "their logs for why one stopped, and begin and leave loops on all ranks alike",
            missing=() if self.is_reader else (self.reader,),
        )

    def begin_pass(self) -> None:
        """Count a pass."""
        self.pass_number += 1

    def close(self) -> None:
        """Give the group back."""
        under_way = [(work, tensors) for works, tensors in self.sent for work in works]
        self._group.give_back(under_way if self.awaited is None else [*under_way, self.awaited])

    def __del__(self) -> None:
        """Give the group of a loader back that nobody closed."""
        with contextlib.suppress(Exception):  # at interpreter exit parts of torch may be gone
            self.close()

    def _key(self) -> str:
        return f"{self._name}/{self.pass_number}"


class Sender:
    """The reader's end, for one pass."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._sent = relay.sent
        self._is_over = False
        relay.begin_pass()

    def send(self, batch: Ready | Delivered) -> Ready | Delivered:
        """Send a micro-batch and return it, with its arrays where they travelled.

        Raises:
            SynchronizationError: A peer is gone, or did not take the micro-batches before in time.
        """
        meta, memory = pack(batch)
        body = torch.from_numpy(np.frombuffer(memory, np.uint8)).to(self._relay.device)
        self._send(_BATCH, meta, body)
        return batch if self._relay.device.type == "cpu" else unpack(meta, body)

    def end(self, state: Json) -> None:
        """Send the end of the pass and wait until all have it."""
        self._is_over = True
        self._send(_END, json.dumps(state).encode())
        self._settle(0)

    def fail(self, error: BaseException | None) -> None:
        """Send a failure of the pass; without one, or where the peers are the failure, say that this rank left it."""
        if self._is_over:
            return
        self._is_over = True
        if error is None or (isinstance(error, SynchronizationError) and error.operation == _OPERATION):
            self._relay.say_left()
        else:
            with contextlib.suppress(SynchronizationError):  # the peers are gone, and the failure is what has to be told here
                self._post(_ERROR, pack_error(error))

    def _send(self, kind: int, meta: bytes, body: torch.Tensor | None = None) -> None:
        self._settle(_MAX_OPEN - 1)
        self._post(kind, meta, body)

    def _post(self, kind: int, meta: bytes, body: torch.Tensor | None = None) -> None:
        nbytes = 0 if body is None else body.numel()
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[: 8 * _NUMBERS].view(torch.int64)[:] = torch.tensor([kind, self._relay.pass_number, len(meta), nbytes])
        rest = _bytes(meta)
        tensors = [head]
        if len(meta) <= _ROOM:
            head[8 * _NUMBERS : 8 * _NUMBERS + len(meta)] = rest
        else:
            tensors.append(rest)
        if body is not None and nbytes:
            tensors.append(body)
        self._sent.append(([self._relay.broadcast(tensor) for tensor in tensors], tensors))

    def _settle(self, num_open: int) -> None:
        while len(self._sent) > num_open:
            works, _ = self._sent[0]
            for work in works:
                self._relay.finish(work)
            self._sent.popleft()


class PeerFeed:
    """The end of a rank that another one reads for: a `Feed` of the same micro-batches."""

    awaits_ranks = True

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        relay.begin_pass()
        self._patience_s = relay.timeout_s + min(_MORE_PATIENCE_S, relay.timeout_s)
        self._waiting_since_s: float | None = None
        self._look_s = 0.0
        self._is_left = False
        self._pause_s = _SHORTEST_PAUSE_S

    def fileno(self) -> int:
        """Return -1: there is nothing to wait on."""
        return -1

    def try_receive(self) -> Delivered | None:
        """Return the next micro-batch, None if it is not there yet.

        Raises:
            Ended: The pass is over.
            AioLoaderError: The reader's pass failed.
            SynchronizationError: The reader is gone, has left its loop, or did not send in time.
        """
        while True:
            if self._relay.awaited is None:
                head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
                self._relay.awaited = self._relay.broadcast(head), head
            work, head = self._relay.awaited
            if not work.is_completed():
                self._look_for_the_reader()
                return None
            self._relay.awaited, self._waiting_since_s = None, None
            self._relay.finish(work)
            found = self._open(head)
            if found is not None:
                return found

    def wait(self) -> None:
        """Wait, blocking, until there may be something to receive."""
        if self._relay.awaited is not None:
            try:
                self._relay.awaited[0].wait(datetime.timedelta(seconds=_SLICE_S))
            except RuntimeError:
                return  # time is up, or it failed: `try_receive` tells which

    def pause_s(self) -> float:
        """Return how long to sleep before asking again; longer each time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def taken(self) -> None:
        """Note that a micro-batch was delivered."""
        self._pause_s = _SHORTEST_PAUSE_S

    def _open(self, head: torch.Tensor) -> Delivered | None:
        """Return the micro-batch that a head announces, None if it belongs to a pass that this rank has left."""
        kind, pass_number, meta_bytes, body_bytes = head[: 8 * _NUMBERS].view(torch.int64).tolist()
        if meta_bytes <= _ROOM:
            meta = head[8 * _NUMBERS : 8 * _NUMBERS + meta_bytes]
        else:
            meta = self._receive(torch.empty(meta_bytes, dtype=torch.uint8))
        memory: Any = torch.empty(body_bytes, dtype=torch.uint8, device=self._relay.device)
        if body_bytes:
            self._receive(memory)
        if pass_number < self._relay.pass_number:
            return None
        if pass_number > self._relay.pass_number:
            raise self._relay.failed(f"micro-batches of pass {pass_number} in pass {self._relay.pass_number}")
        if kind == _END:
            raise Ended(json.loads(meta.numpy().tobytes()))
        if kind == _ERROR:
            raise unpack_error(meta.numpy().tobytes())
        return unpack(meta.numpy().tobytes(), memory.numpy() if memory.device.type == "cpu" else memory)

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        self._relay.finish(self._relay.broadcast(tensor))
        return tensor

    def _look_for_the_reader(self) -> None:
        now = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = self._look_s = now
        if now - self._waiting_since_s > self._patience_s:
            raise self._relay.failed(f"nothing within {self._patience_s:g} s")
        if now - self._look_s >= _LOOK_EVERY_S:
            self._look_s = now
            if self._is_left:  # since the look before this one: what it sent last is not on its way any more
                raise self._relay.failed("the reader left its loop")
            self._is_left = self._relay.has_left()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
