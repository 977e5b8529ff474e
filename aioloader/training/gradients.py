"""Averages gradients over the data-parallel ranks, once per optimizer step.

    for batch in micro_batches[:-1]:
        with synchronizer.no_sync():
            loss(batch).backward()          gradients add up on this rank
    loss(micro_batches[-1]).backward()
    synchronizer.sync_gradients()           one round: every bucket and the usage map, all under way at once
    synchronizer.clip_grad_norm(1.0)
    optimizer.step()

Collectives start in `sync_gradients`; a bucket is a unit of its own, so that a later version can start it from gradient hooks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.buckets import Bucket, plan_buckets
from aioloader.training.dp_group import DEFAULT_TIMEOUT_S, DataParallelGroup

__all__ = ["GradientSynchronizer"]

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""The bucket size of torch's DistributedDataParallel: large enough to hide latency, small enough to overlap."""


class GradientSynchronizer:
    """Leaves in every `.grad` the average over the data-parallel ranks, the same bits on each.

    Every rank issues the same collectives whatever parameters it used: a missing gradient counts as zero, and a parameter that no
    rank used keeps `grad is None`. Frozen parameters are left out, shared ones count once. With one rank nothing is communicated.

    Args:
        model: Its trainable parameters, as of now, are synchronized. All must be dense.
        mesh: Where this rank stands; default: from the process group, else from torchrun's environment.
        group: The data-parallel process group; default: all ranks.
        bucket_bytes: Size of a flat bucket; while a round runs, all buckets together take as much memory as the gradients.
        comm_dtype: Dtype on the wire (`torch.bfloat16` halves the traffic of float32); default: each gradient's own.
        timeout_s: How long one round may take.

    Attributes:
        num_rounds: Rounds of communication so far.
        num_bytes: Bytes of gradients that this rank has handed to all-reduce so far.

    Raises:
        ConfigError: The group does not fit the mesh, a layer makes sparse gradients, or an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        comm_dtype: torch.dtype | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        _check_options(model, bucket_bytes, comm_dtype)
        self._dp = DataParallelGroup.resolve(mesh, group, timeout_s)
        self._model = model
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._buckets = self._make_buckets(bucket_bytes, comm_dtype)
        self._layout_agreed = False
        self._accumulating = False
        self._synchronized = False
        self.num_rounds = 0
        self.num_bytes = 0

    def __repr__(self) -> str:
        return (
            f"GradientSynchronizer({self._dp.mesh.describe()}, parameters={len(self._named)}, buckets={len(self._buckets)}, "
            f"num_rounds={self.num_rounds}, num_bytes={self.num_bytes})"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: inside, `sync_gradients` does nothing. For all micro-batches of a step but the last."""
        outer, self._accumulating = self._accumulating, True
        self._synchronized = False
        try:
            yield
        finally:
            self._accumulating = outer

    def sync_gradients(self, step: int | None = None) -> None:
        """Average the gradients over all ranks; call it after the last backward of a step, on every rank.

        Args:
            step: Named in errors; default: the number of this round.

        Raises:
            ConfigError: A gradient is sparse, or other parameters are trainable than when the synchronizer was made.
            SynchronizationError: A rank is missing or has another model. No gradient was changed.
        """
        if self._accumulating:
            return
        if self._dp.size > 1 and self._named:
            self._run_round(f"sync_gradients, step {self.num_rounds if step is None else step}")
        self._synchronized = True

    def clip_grad_norm(self, max_norm: float | None = None) -> float:
        """Return the global norm of the gradients before clipping, the same on every rank; scale them down to `max_norm` if given.

        Raises:
            ConfigError: Gradients are not synchronized yet: ranks would clip by different norms.
        """
        if not self._synchronized:
            raise ConfigError(
                "clip_grad_norm()", expected="synchronized gradients", got="an open accumulation window", do="call sync_gradients() first"
            )
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_([parameter for _, parameter in self._named], max_norm, norm)
        return float(norm)

    def broadcast_model(self) -> None:
        """Give every rank the parameters and buffers of rank 0, so that all replicas start alike.

        Raises:
            SynchronizationError: A rank is missing or has another model.
        """
        if self._dp.size == 1:
            return
        self._agree_on_layout("broadcast_model")
        source = 0 if self._dp.group is None else dist.get_global_rank(self._dp.group, 0)
        with torch.no_grad():
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                try:
                    dist.broadcast(tensor.detach(), src=source, group=self._dp.group)
                except RuntimeError as error:
                    message = f"on dp_rank {self._dp.rank}: expected the tensors of dp_rank 0, got {error}; see the log of the other ranks"
                    raise SynchronizationError("broadcast_model", message) from error

    def _make_buckets(self, bucket_bytes: int, comm_dtype: torch.dtype | None) -> list[Bucket]:
        parameters = [parameter for _, parameter in self._named]
        sizes = [((p.dtype, p.device), p.numel() * (comm_dtype or p.dtype).itemsize) for p in parameters]
        return [Bucket(indexes, parameters, comm_dtype, self._dp.size) for indexes in plan_buckets(sizes, bucket_bytes)]

    @torch.no_grad()
    def _run_round(self, operation: str) -> None:
        self._check_parameters()
        self._agree_on_layout(operation)
        deadline = time.monotonic() + self._dp.timeout_s
        usage = torch.tensor([int(p.grad is not None) for _, p in self._named], dtype=torch.int32, device=self._dp.control_device)
        pending = [self._dp.start(usage, f"{operation}, usage map", op=dist.ReduceOp.MAX)]
        flats: list[Tensor] = []
        for number, bucket in enumerate(self._buckets, 1):
            flats.append(bucket.pack())
            name = f"{operation}, bucket {number} of {len(self._buckets)} ({bucket.describe()})"
            pending.append(self._dp.start(flats[-1], name))
        for collective in pending:
            collective.wait(deadline - time.monotonic())
        used = [bool(flag) for flag in usage.tolist()]
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.unpack(flat, [used[index] for index in bucket.indexes])
        self.num_rounds += 1
        self.num_bytes += sum(bucket.num_bytes for bucket in self._buckets)

    def _check_parameters(self) -> None:
        """Refuse what this rank would silently leave out, before anything is sent."""
        trainable = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        changed = trainable.symmetric_difference(id(parameter) for _, parameter in self._named)
        if changed:
            raise ConfigError(
                "sync_gradients()",
                expected="the parameters that were trainable when the synchronizer was made",
                got=f"{len(changed)} that were frozen, unfrozen or exchanged since",
                do="make a new GradientSynchronizer after changing requires_grad",
            )
        for name, parameter in self._named:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise _sparse_refused(f"gradient of {name}")

    def _agree_on_layout(self, operation: str) -> None:
        """Compare, once, the names, shapes and buckets over all ranks: a mismatch would hang or mix up gradients."""
        if self._layout_agreed:
            return
        layout = [(name, str(p.dtype), tuple(p.shape)) for name, p in self._named], [bucket.describe() for bucket in self._buckets]
        # 48 bits of the hash are exact in float64; the largest of x and of -x over all ranks cancel only if all are equal.
        digest = float(int.from_bytes(hashlib.blake2b(repr(layout).encode(), digest_size=6).digest()))
        high, low = self._dp.reduce_numbers([digest, -digest], f"{operation}, comparison of models", op=dist.ReduceOp.MAX)
        if high != -low:
            message = (
                f"on dp_rank {self._dp.rank}: expected the same trainable parameters and buckets on all {self._dp.size} ranks, got "
                f"{len(self._named)} parameters here and others elsewhere; build the same model on every rank"
            )
            raise SynchronizationError(operation, message)
        self._layout_agreed = True


def _check_options(model: nn.Module, bucket_bytes: int, comm_dtype: torch.dtype | None) -> None:
    if bucket_bytes < 1:
        raise ConfigError("bucket_bytes", expected="1 or more", got=bucket_bytes, do="leave it out for 25 MiB")
    if comm_dtype is not None and not comm_dtype.is_floating_point:
        raise ConfigError("comm_dtype", expected="a floating-point dtype", got=comm_dtype, do="give torch.bfloat16 or leave it out")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise _sparse_refused(f"layer {name or 'model'}")


def _sparse_refused(where: str) -> ConfigError:
    return ConfigError(where, expected="dense gradients", got="sparse ones", do="make the embedding with sparse=False")
