"""Averages gradients over the data-parallel ranks, once per optimizer step, while backward still runs.

for batch in micro_batches[:-1]:
    with synchronizer.no_sync():
        loss(batch).backward()          gradients add up on this rank
loss(micro_batches[-1]).backward()      full buckets leave from gradient hooks
synchronizer.sync_gradients()           the rest leaves; waits; every rank has the averages
synchronizer.clip_grad_norm(1.0)
optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.gradients.accumulation import LongSumWarning, check_accumulate_dtype
from aioloader.training.gradients.buckets import make_buckets
from aioloader.training.gradients.ending import Verdict, end_step, end_step_alone
from aioloader.training.gradients.model_checks import check_model
from aioloader.training.gradients.overlap import Outbox, attach
from aioloader.training.gradients.ownership import release, take_over
from aioloader.training.gradients.sync_stats import SyncStats
from aioloader.training.groups.broadcast import broadcast_tensors
from aioloader.training.groups.dp_group import DEFAULT_TIMEOUT_S, DataParallelGroup

__all__ = ["GradientSynchronizer"]

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""The bucket size of torch's DistributedDataParallel: large enough to hide latency, small enough to overlap."""

_MANY_LATE_ROUNDS = 10


class GradientSynchronizer:
    """Leaves in every `.grad` the average over the data-parallel ranks, the same bits on each.

    Every rank issues the same collectives whatever parameters it used: a missing gradient counts as zero, and a parameter that no
    rank used keeps `grad is None`. Frozen parameters are left out, shared ones count once. With one rank nothing is communicated.

    In the last backward of a step, the first one outside of `no_sync()`, a gradient is moved to a flat bucket as soon as it is there, and
    a full bucket is sent at once. Until `sync_gradients` returns, `.grad` of what is under way is None. Afterwards it is a view of
    the bucket, valid until the next backward outside of `no_sync()`. The first step checks that all ranks have the same model, and
    sends nothing before `sync_gradients`. More than one backward outside of `no_sync()` gives the same averages, but sends some
    buckets twice.

    A step whose last backward has begun must be ended on *every* rank, by `sync_gradients` or by `discard_gradients`: what was sent
    counts, whatever `zero_grad` does meanwhile. That holds for a backward on behalf of another model too, as of a GAN's generator through
    its discriminator: freeze this model for that long, or run it in `no_sync()` and drop the gradients.

    Collectives go through a process group of the synchronizer's own, so a training loop may use others in between. It is made by the
    first `broadcast_model` or `sync_gradients`, which all ranks of the job have to call, not only those of this group.

    Ranks of one context-parallel group hold parts of the same sequences, and their gradients belong together: the average is over
    `dp_size * cp_size` ranks. A loss that is the mean over a rank's own part gives the mean over all parts of equal size; a loss that is
    already a mean over the context-parallel group has to be multiplied with `cp_size`, as Megatron does.

    Args:
        model: Its trainable parameters, as of now, are synchronized. All must be dense and whole. A synchronizer made earlier for the same
            model is closed.
        mesh: Where this rank stands; default: from the process group, else from torchrun's environment.
        group: The data-parallel process group (with context parallelism, both axes); default: found from the mesh.
        bucket_bytes: Size of a flat bucket; all buckets together take as much memory as the gradients.
        comm_dtype: Dtype on the wire (`torch.bfloat16` halves the traffic of float32); default: that of the sums.
        accumulate_dtype: Dtype of the sums over micro-batches and ranks (`torch.float32` for bfloat16 parameters); default: each
            parameter's own. Where it is another than the parameter's, each backward moves its gradient to a buffer in that dtype, so
            `.grad` is None from the first micro-batch on; at the end `.grad` holds the average cast to the parameter's dtype, and
            `gradients()` gives it uncast. `zero_grad` does not reach these buffers; `discard_gradients` does. In `torch.float64` the
            gradients of float32 parameters add up without rounding, unless one is more than 2^29 times as large as another: averages are
            the same bits however micro-batches are spread over 1, 2, 4, ... ranks. The buffers and what is sent are then twice as large.
        timeout_s: How long one round may take.

    Attributes:
        num_rounds: Rounds of communication so far.

    Raises:
        ConfigError: The group does not fit the mesh, a layer makes sparse gradients, the model is sharded or wrapped in something that
            synchronizes by itself, or an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        comm_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        check_model(model)
        self._model = model
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        _check_options(bucket_bytes, comm_dtype, self._named)
        check_accumulate_dtype(accumulate_dtype, self._named)
        self._dp = DataParallelGroup.resolve(mesh, group, timeout_s, across_cp=True)
        buckets = make_buckets(self._named, bucket_bytes, accumulate_dtype=accumulate_dtype, comm_dtype=comm_dtype)
        averages = bool(buckets) and all(self._dp.averages(bucket.device) for bucket in buckets)
        self._outbox = Outbox(self._named, buckets, 1 if averages else 1 / self._dp.size, alone=self._dp.size == 1)
        self._long_sum = LongSumWarning([p for bucket in buckets if not bucket.widens for p in bucket.parameters])
        self._is_synchronized = False
        self._num_late_buckets = self._num_late_rounds = 0
        self.num_rounds = 0
        take_over(model, self)
        self._has_hooks = self._dp.size > 1 or any(bucket.widens for bucket in buckets)
        handles = attach(self._outbox, [parameter for _, parameter in self._named]) if self._has_hooks else []
        self._release = weakref.finalize(self, release, [*self._long_sum.handles, *handles], self._outbox)
        self._release.atexit = False

    def __repr__(self) -> str:
        return (
            f"GradientSynchronizer({self._dp.mesh.describe()}, parameters={len(self._named)}, buckets={len(self._outbox.buckets)}, "
            f"num_rounds={self.num_rounds}, num_bytes={self.num_bytes})"
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of gradients that this rank has handed to all-reduce so far."""
        return self._outbox.num_bytes

    def stats(self) -> SyncStats:
        """Return what synchronization has cost so far."""
        return SyncStats(
            num_rounds=self.num_rounds,
            num_bytes=self.num_bytes,
            num_late_buckets=self._num_late_buckets,
            exposed_s=self._outbox.exposed_s,
            communication_s=self._outbox.communication_s,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: inside, nothing is sent and `sync_gradients` does nothing. For all micro-batches of a step but the last."""
        outer, self._outbox.is_accumulating = self._outbox.is_accumulating, True
        self._is_synchronized = False
        try:
            yield
        finally:
            self._outbox.is_accumulating = outer

    def sync_gradients(self, step: int | None = None) -> None:
        """Average the gradients over all ranks; call it after the last backward of a step, on every rank.

        Where it raises, all parameters are left without a gradient, on every rank.

        Args:
            step: Named in errors; default: the number of this round.

        Raises:
            ConfigError: A gradient is sparse, backward ended in an error, or other parameters are trainable than when the
                synchronizer was made.
            SynchronizationError: A rank is missing, failed, has discarded its gradients or has another model. After a missing rank this
                synchronizer can do no more.
        """
        if not self._outbox.is_accumulating:
            self._end_step(f"sync_gradients, step {self.num_rounds if step is None else step}", Verdict.GOOD)

    def discard_gradients(self, step: int | None = None) -> None:
        """End a step that is not to be taken: afterwards all parameters are without gradients and the next step begins afresh.

        Takes part in the round that other ranks may have begun. Ranks that call `sync_gradients` for this step get an error that
        names those which discarded theirs, so decide alike on all ranks; after an error on one rank only, that rank may discard alone.

        Raises:
            SynchronizationError: A rank is missing.
        """
        self._end_step(f"discard_gradients, step {self.num_rounds if step is None else step}", Verdict.DISCARDED)

    def gradients(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each parameter that has an average with this average, in the order of the model, in `accumulate_dtype` if given.

        They are the buffers themselves, not copies, and valid until the next backward. A parameter whose `.grad` was set to None since
        is left out.

        Raises:
            ConfigError: Gradients are not synchronized yet.
        """
        self._check_synchronized("gradients()")
        for index, (_, parameter) in enumerate(self._named):
            average = self._outbox.average(index)
            if average is not None:
                yield parameter, average

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the averages, in `.grad` and in `gradients()`.

        Raises:
            ConfigError: Gradients are not synchronized yet.
        """
        averages = [average for _, average in self.gradients()]
        copies = [p.grad for p, average in self.gradients() if p.grad is not None and p.grad is not average]
        for tensors in (averages, copies):
            if tensors:
                torch._foreach_mul_(tensors, factor)

    def clip_grad_norm(self, max_norm: float | None = None) -> float:
        """Return the global norm of the gradients before clipping, the same on every rank; scale them down to `max_norm` if given.

        Raises:
            ConfigError: Gradients are not synchronized yet: ranks would clip by different norms.
        """
        self._check_synchronized("clip_grad_norm()")
        norm = nn.utils.get_total_norm([average for _, average in self.gradients()])
        if max_norm is not None:
            self.scale_gradients(torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as torch.nn.utils.clip_grad_norm_ does
        return float(norm)

    def broadcast_model(self) -> None:
        """Give every rank the parameters and buffers of rank 0, so that all replicas start alike.

        Raises:
            SynchronizationError: A rank is missing or has another model.
        """
        if self._dp.size > 1:
            group = self._prepare("broadcast_model")
            broadcast_tensors(group, [*self._model.named_parameters(), *self._model.named_buffers()], "broadcast_model")

    def close(self) -> None:
        """Detach from the model. What is under way is left to the process group."""
        self._release()

    def _end_step(self, operation: str, verdict: Verdict) -> None:
        if not self._release.alive:
            do = "use the GradientSynchronizer made last for this model"
            raise ConfigError(operation, expected="an open synchronizer", got="one that was closed", do=do)
        self._is_synchronized = False
        self._long_sum.begin_anew()
        if self._named:
            self._note_changes()
            self._outbox.collect()
            self._end_on_all_ranks(operation, verdict) if self._dp.size > 1 else end_step_alone(self._outbox, verdict)
        self._is_synchronized = verdict is Verdict.GOOD

    def _end_on_all_ranks(self, operation: str, verdict: Verdict) -> None:
        try:
            group = self._prepare(operation)
        except SynchronizationError:
            self._outbox.drop()
            raise
        num_late = end_step(self._outbox, group, operation, verdict)
        self.num_rounds += 1
        self._num_late_buckets += num_late
        self._num_late_rounds += num_late > 0
        if num_late and self._num_late_rounds == _MANY_LATE_ROUNDS:
            warnings.warn(
                f"GradientSynchronizer: {_MANY_LATE_ROUNDS} steps have sent gradients twice; put every backward of a step but the last in "
                "no_sync()",
                stacklevel=4,
            )

    def _note_changes(self) -> None:
        """Refuse what this rank would silently leave out."""
        trainable = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        changed = trainable.symmetric_difference(id(parameter) for _, parameter in self._named)
        if changed:
            self._outbox.note_problem(
                "sync_gradients()",
                expected="the parameters that were trainable when the synchronizer was made",
                got=f"{len(changed)} that were frozen, unfrozen or exchanged since",
                do="make a new GradientSynchronizer after changing requires_grad",
            )

    def _prepare(self, operation: str) -> DataParallelGroup:
        """Return the group in which gradients travel, made on the first call when it is sure that all ranks have the same model.

        Raises:
            SynchronizationError: They have not: names, shapes or buckets differ, which would hang or mix up gradients.
        """
        if self._outbox.group is not None:
            return self._outbox.group
        layout = [(name, str(p.dtype), tuple(p.shape)) for name, p in self._named], [b.describe() for b in self._outbox.buckets]
        if not self._dp.agrees(repr(layout), f"{operation}, comparison of models"):
            message = (
                f"on dp_rank {self._dp.rank}: expected the same trainable parameters and buckets on all {self._dp.size} ranks, got "
                f"{len(self._named)} parameters here and others elsewhere; build the same model on every rank"
            )
            raise SynchronizationError(operation, message)
        self._outbox.group = self._dp.twin()
        return self._outbox.group

    def _check_synchronized(self, where: str) -> None:
        if not self._is_synchronized or (self._has_hooks and not self._outbox.is_settled):
            raise ConfigError(where, expected="synchronized gradients", got="an open accumulation window", do="call sync_gradients() first")


def _check_options(bucket_bytes: int, comm_dtype: torch.dtype | None, named: Sequence[tuple[str, Parameter]]) -> None:
    if bucket_bytes < 1:
        raise ConfigError("bucket_bytes", expected="1 or more", got=bucket_bytes, do="leave it out for 25 MiB")
    if comm_dtype is None:
        return
    if not comm_dtype.is_floating_point:
        raise ConfigError("comm_dtype", expected="a floating-point dtype", got=comm_dtype, do="give torch.bfloat16 or leave it out")
    for name, parameter in named:
        if parameter.is_complex():
            got, do = f"{parameter.dtype} for {name}", "leave it out: the imaginary part would be lost"
            raise ConfigError("comm_dtype", expected="parameters of real numbers", got=got, do=do)
