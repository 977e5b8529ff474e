"""The ranks that take one optimizer step together, and what they settle about it: one norm, one verdict, one culprit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.dp_group import is_distributed, resolve_mesh

__all__ = ["StepRanks"]

_NAME_BYTES = 256
"""Room for the name of a parameter; a longer one loses its beginning, the layer is at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRanks:
    """All ranks of the job, and among them those that hold parts of the same replica. A rank alone never communicates.

    Make it with `resolve`, which checks the parts against each other. Every method is a collective call: all ranks make it alike.

    Attributes:
        mesh: Where this rank stands.
        model_group: The ranks that differ from this one in tp_rank and pp_rank only; None: all ranks of the job.
        device: Where the numbers that travel live.
    """

    mesh: Mesh
    model_group: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def resolve(cls, mesh: Mesh | None, model_group: dist.ProcessGroup | None, device: torch.device) -> StepRanks:
        """Return the ranks around `mesh`; default: this rank's place in the process group, all of it data parallel.

        Raises:
            ConfigError: The mesh has several ranks but there is no process group, or `model_group` is not its tp x pp ranks.
        """
        mesh = resolve_mesh(mesh)
        num_parts = mesh.tp_size * mesh.pp_size
        if mesh != Mesh() and not is_distributed():
            do = "call torch.distributed.init_process_group first"
            raise ConfigError("mesh", expected=f"a process group for {mesh.describe()}", got="none in this process", do=do)
        if num_parts > 1 and dist.get_world_size(model_group) != num_parts:
            raise ConfigError(
                "model_parallel_group",
                expected=f"the {num_parts} ranks of {mesh.describe()} that differ in tp_rank and pp_rank only",
                got=f"a group of {dist.get_world_size(model_group)}" + (" (all ranks of the job)" if model_group is None else ""),
                do="give the group of the ranks that hold parts of the same replica",
            )
        return cls(mesh=mesh, model_group=model_group, device=device)

    @property
    def is_split(self) -> bool:
        """Return whether a replica lies on several ranks, so that a norm over this rank's gradients is not the whole one."""
        return self.mesh.tp_size * self.mesh.pp_size > 1

    @property
    def counts_replicated(self) -> bool:
        """Return whether this rank is the one of its tensor-parallel ranks that counts what all of them hold."""
        return self.mesh.tp_rank == 0

    def total(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """Return the sum (or the largest) of a number over the ranks that hold parts of the same replica, float64 on `device`."""
        number = value.to(self.device, torch.float64)
        if self.is_split:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            self._together("sum over the model-parallel ranks", lambda: dist.all_reduce(number, op=op, group=self.model_group))
        return number

    def any(self, flag: Tensor) -> bool:
        """Return whether `flag` is true on any rank of the job."""
        number = flag.to(self.device, torch.int32)
        if self._is_shared:
            self._together("verdict of all ranks", lambda: dist.all_reduce(number, op=dist.ReduceOp.MAX))
        return bool(number.item())

    def first_named(self, name: str | None) -> tuple[int, str] | None:
        """Return the lowest rank of the job that gives a name, and the name, on every rank; None if no rank does."""
        if not self._is_shared:
            return None if name is None else (0, name)
        num_ranks = dist.get_world_size()
        first = torch.tensor(num_ranks if name is None else dist.get_rank(), device=self.device)
        self._together("search for a rank", lambda: dist.all_reduce(first, op=dist.ReduceOp.MIN))
        rank = int(first.item())
        if rank == num_ranks:
            return None
        text = (name or "").encode()[-_NAME_BYTES:].ljust(_NAME_BYTES)
        letters = torch.tensor(list(text), dtype=torch.uint8, device=self.device)
        self._together("name of a parameter", lambda: dist.broadcast(letters, src=rank))
        return rank, bytes(letters.tolist()).decode(errors="replace").strip()

    @property
    def _is_shared(self) -> bool:
        return self.mesh != Mesh() and dist.get_world_size() > 1

    def _together(self, operation: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            message = f"on {self.mesh.describe()}: expected all ranks to take part, got {error}; look for a rank that stopped"
            raise SynchronizationError(operation, message) from error
