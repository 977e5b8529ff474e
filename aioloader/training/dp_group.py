"""The ranks that train together: which they are, and collectives that say who failed instead of hanging."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh

__all__ = ["DEFAULT_TIMEOUT_S", "DataParallelGroup", "Pending", "is_distributed", "resolve_mesh"]

DEFAULT_TIMEOUT_S = 600.0
"""How long a rank waits for the others; the default of torch's NCCL groups."""


def is_distributed() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def resolve_mesh(mesh: Mesh | None, group: dist.ProcessGroup | None = None) -> Mesh:
    """Return `mesh`, else the place in the process group, else the place in torchrun's environment."""
    if mesh is not None:
        return mesh
    if is_distributed():
        return Mesh(dp_rank=dist.get_rank(group), dp_size=dist.get_world_size(group))
    return Mesh.from_env()


class Pending:
    """One all-reduce under way; `wait` returns when its tensor holds the result."""

    def __init__(self, work: dist.Work, *, operation: str, rank: int, size: int) -> None:
        self._work = work
        self._operation = operation
        self._rank = rank
        self._size = size

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`.

        Raises:
            SynchronizationError: The collective failed, or a rank did not come in time.
        """
        started = time.perf_counter()
        try:
            self._work.wait(datetime.timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            waited_s = time.perf_counter() - started
            raise _failed(self._operation, self._rank, self._size, waited_s, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelGroup:
    """The data-parallel ranks; alone (`dp_size == 1`) a rank never communicates.

    Make it with `resolve`, which checks the parts against each other.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None
    timeout_s: float

    @classmethod
    def resolve(
        cls, mesh: Mesh | None = None, group: dist.ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> DataParallelGroup:
        """Return the group of `mesh`: `group` where given, else all ranks.

        Raises:
            ConfigError: There are several ranks but no process group, or the group is not the mesh's data-parallel axis.
        """
        if not timeout_s > 0:
            raise ConfigError("timeout_s", expected="a number of seconds above 0", got=repr(timeout_s), do="leave it out for 10 minutes")
        mesh = resolve_mesh(mesh, group)
        if mesh.dp_size > 1:
            _check_group(mesh, group)
        return cls(mesh=mesh, group=group, timeout_s=timeout_s)

    @property
    def rank(self) -> int:
        """Return this rank's place on the data-parallel axis."""
        return self.mesh.dp_rank

    @property
    def size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.mesh.dp_size

    @property
    def control_device(self) -> torch.device:
        """Return where small control tensors live: the CPU if the group can reduce there, else the current accelerator."""
        if self.size == 1 or "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def start(self, tensor: Tensor, operation: str, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start an all-reduce of `tensor` in place; the tensor must not be touched before `wait`.

        Raises:
            SynchronizationError: The connection to another rank is gone.
        """
        try:
            work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _failed(operation, self.rank, self.size, 0.0, error) from error
        assert work is not None, "an asynchronous all-reduce on a member of the group returns its work"
        return Pending(work, operation=operation, rank=self.rank, size=self.size)

    def reduce_numbers(
        self, numbers: Sequence[float] | Tensor, operation: str, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> list[float]:
        """Return the element-wise sum (or other `op`) over all ranks, in float64: exact for integers up to 2**53.

        Raises:
            SynchronizationError: See `Pending.wait`.
        """
        tensor = torch.as_tensor(numbers, dtype=torch.float64).to(self.control_device)
        if self.size > 1:
            self.start(tensor, operation, op=op).wait(self.timeout_s)
        values: list[float] = tensor.tolist()
        return values

    @contextmanager
    def together(self, operation: str) -> Iterator[None]:
        """Run the block on all ranks and leave it on all ranks alike: if it fails on one, it fails on every one.

        Raises:
            SynchronizationError: Another rank failed in the block; `missing` names it. The failing rank raises its own error.
        """
        try:
            yield
        except SynchronizationError:
            raise  # the other ranks saw it too, and the group may be broken
        except Exception:
            with suppress(SynchronizationError):  # our own error says more
                self._failed_ranks(operation, failed_here=True)
            raise
        failed = self._failed_ranks(operation, failed_here=False)
        if failed:
            message = f"expected all {self.size} ranks to succeed, dp_rank {failed} failed; look for the error in the log of that rank"
            raise SynchronizationError(operation, message, missing=failed)

    def _failed_ranks(self, operation: str, *, failed_here: bool) -> list[int]:
        flags = [0.0] * self.size
        flags[self.rank] = float(failed_here)
        return [rank for rank, flag in enumerate(self.reduce_numbers(flags, operation)) if flag]


def _failed(operation: str, rank: int, size: int, waited_s: float, error: Exception) -> SynchronizationError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    message = (
        f"on dp_rank {rank}: expected all {size} data-parallel ranks to take part, got {reason!r} after {waited_s:.1f} s; "
        "look for a rank that stopped or that is elsewhere in its step"
    )
    return SynchronizationError(operation, message)


def _check_group(mesh: Mesh, group: dist.ProcessGroup | None) -> None:
    if not is_distributed():
        raise ConfigError(
            "mesh",
            expected=f"a process group for dp_size {mesh.dp_size}",
            got="none in this process",
            do="call torch.distributed.init_process_group first",
        )
    place = (dist.get_rank(group), dist.get_world_size(group))
    if place != (mesh.dp_rank, mesh.dp_size):
        raise ConfigError(
            "group",
            expected=f"the data-parallel group of {mesh.describe()}",
            got=f"a group where this is rank {place[0]} of {place[1]}",
            do="give the group of the ranks that differ in dp_rank only",
        )
