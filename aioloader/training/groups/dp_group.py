"""The ranks that train together: which they are, and collectives that say who failed instead of hanging."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.coordinates import data_parallel_ranks, exchange_members, exchange_meshes
from aioloader.training.groups.pending import Pending, failed_collective
from aioloader.training.groups.roll_call import RollCall

__all__ = ["DEFAULT_TIMEOUT_S", "DataParallelGroup", "is_distributed", "resolve_mesh"]

DEFAULT_TIMEOUT_S = 600.0
"""How long a rank waits for the others; the default of torch's NCCL groups."""

_NEVER = datetime.timedelta(days=365)
"""A bucket may be sent long before anybody waits for it; deadlines are kept by `Pending`."""

_found: tuple[dist.ProcessGroup | None, dict[tuple[Mesh, bool], dist.ProcessGroup | None]] = (None, {})
"""The groups made for meshes so far, and the default group in which they were made: groups are never given back before that."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelGroup:
    """The data-parallel ranks; alone (`size == 1`) a rank never communicates.

    Make it with `resolve`, which checks the parts against each other.

    Attributes:
        mesh: Where this rank stands.
        group: The process group; None: all ranks of the job, or no other rank.
        timeout_s: How long this rank waits for the others.
        rank: This rank's place in the group: `dp_rank`, unless the group goes across context parallelism.
        size: The number of ranks in the group.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None
    timeout_s: float
    rank: int
    size: int

    @classmethod
    def resolve(
        cls,
        mesh: Mesh | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        across_cp: bool = False,
    ) -> DataParallelGroup:
        """Return the group of `mesh`: `group` where given, else all ranks if all are data parallel, else a group made for it.

        Making one is collective: all ranks of the job tell each other their coordinates and wait for each other. It is made once.

        Args:
            mesh: Default: the place in the process group, else in torchrun's environment.
            group: The ranks that differ in `dp_rank` only.
            timeout_s: How long to wait for other ranks.
            across_cp: Take in the ranks that hold the other parts of the same sequences, as gradients need it.

        Raises:
            ConfigError: There are several ranks but no process group, the group is not the mesh's data-parallel axis, or the
                coordinates of the ranks leave a place empty or taken twice.
            SynchronizationError: A rank did not tell its coordinates.
        """
        if not timeout_s > 0:
            raise ConfigError("timeout_s", expected="a number of seconds above 0", got=repr(timeout_s), do="leave it out for 10 minutes")
        mesh = resolve_mesh(mesh, group)
        cp_size = mesh.cp_size if across_cp else 1
        rank, size = mesh.dp_rank * cp_size + (mesh.cp_rank if across_cp else 0), mesh.dp_size * cp_size
        if size > 1:
            _check_distributed(size)
            if group is None and dist.get_world_size() != size:
                group = _group_of(mesh, across_cp, timeout_s)
            elif cp_size > 1:
                rank = dist.get_rank(group)  # frameworks order dp and cp differently inside such a group
            _check_group(mesh, group, rank, size)
        return cls(mesh=mesh, group=group, timeout_s=timeout_s, rank=rank, size=size)

    @property
    def control_device(self) -> torch.device:
        """Return where small control tensors live: the CPU if the group can reduce there, else the current accelerator."""
        if self.size == 1 or "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def averages(self, device: torch.device) -> bool:
        """Return whether the backend for tensors of `device` divides by itself (`ReduceOp.AVG`)."""
        return self.size > 1 and f"{device.type}:nccl" in dist.get_backend_config(self.group)

    def twin(self) -> DataParallelGroup:
        """Return a group of the same ranks whose collectives are counted apart from all others. All ranks of the job have to call it.

        Raises:
            SynchronizationError: A rank did not come; `missing` names it.
        """
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        config = dist.get_backend_config(self.group) if len(set(backends.values())) > 1 else next(iter(backends.values()))
        timeout = datetime.timedelta(seconds=2 * self.timeout_s) if "nccl" in config else _NEVER
        lists = exchange_members(self._members, self.timeout_s)
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend=config)  # type: ignore[no-untyped-call]
        return replace(self, group=group)

    def start(self, tensor: Tensor, operation: str, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start an all-reduce of `tensor` in place; the tensor must not be touched before `wait`.

        Raises:
            SynchronizationError: The connection to another rank is gone.
        """
        try:
            work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost_connection(operation, error) from error
        return self._pending(work, tensor, operation)

    def start_broadcast(self, tensor: Tensor, operation: str) -> Pending:
        """Start to overwrite `tensor`, which is contiguous, with that of rank 0; it must not be touched before `wait`.

        Raises:
            SynchronizationError: The connection to another rank is gone.
        """
        try:
            work = dist.broadcast(tensor, group=self.group, group_src=0, async_op=True)
        except RuntimeError as error:
            raise self._lost_connection(operation, error) from error
        return self._pending(work, tensor, operation)

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

    def agrees(self, text: str, operation: str) -> bool:
        """Return, on every rank, whether all of them gave the same text.

        Raises:
            SynchronizationError: See `Pending.wait`.
        """
        # 48 bits of the hash are exact in float64; the largest of x and of -x over all ranks cancel only if all are equal.
        digest = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
        high, low = self.reduce_numbers([digest, -digest], operation, op=dist.ReduceOp.MAX)
        return high == -low

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

    @property
    def _members(self) -> list[int]:
        ranks: list[int] = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return ranks

    def _pending(self, work: dist.Work | None, tensor: Tensor, operation: str) -> Pending:
        assert work is not None, "an asynchronous collective on a member of the group returns its work"
        roll_call = RollCall(self._members, self.rank)
        on_host = tensor.device.type == "cpu"
        return Pending(work, operation=operation, roll_call=roll_call, rank=self.rank, size=self.size, on_host=on_host)

    def _lost_connection(self, operation: str, error: RuntimeError) -> SynchronizationError:
        return SynchronizationError(operation, failed_collective(self.rank, self.size, "a lost connection", error))

    def _failed_ranks(self, operation: str, *, failed_here: bool) -> list[int]:
        flags = [0.0] * self.size
        flags[self.rank] = float(failed_here)
        return [rank for rank, flag in enumerate(self.reduce_numbers(flags, operation)) if flag]


def _group_of(mesh: Mesh, across_cp: bool, timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share all coordinates but the data-parallel one, made on the first call."""
    global _found
    if _found[0] is not dist.group.WORLD:
        _found = (dist.group.WORLD, {})
    groups = _found[1]
    if (mesh, across_cp) not in groups:
        ranks = data_parallel_ranks(exchange_meshes(mesh, timeout_s), across_cp=across_cp)
        groups[mesh, across_cp], _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
    return groups[mesh, across_cp]


def _check_distributed(size: int) -> None:
    if not is_distributed():
        raise ConfigError(
            "mesh",
            expected=f"a process group for dp_size {size}",
            got="none in this process",
            do="call torch.distributed.init_process_group first",
        )


def _check_group(mesh: Mesh, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
    place = (dist.get_rank(group), dist.get_world_size(group))
    if place != (rank, size):
        raise ConfigError(
            "group",
            expected=f"the data-parallel group of {mesh.describe()}",
            got=f"a group where this is rank {place[0]} of {place[1]}",
            do="give the group of the ranks that differ in dp_rank only",
        )
