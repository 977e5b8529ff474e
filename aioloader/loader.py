"""`Loader`: the front door. Checks the arguments, owns the engine's host, and keeps the state as of delivery."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioloader import options
from aioloader.engine.ending import num_steps
from aioloader.engine.plan import Run
from aioloader.engine.replay import replay
from aioloader.engine.resuming import fitted_state, starting_state
from aioloader.errors import ClosedError, ConfigError
from aioloader.order.mesh import Mesh
from aioloader.planning import make_plan
from aioloader.pools.recovery import RestartBudget
from aioloader.protocols import Batching, Json, RecordId
from aioloader.state.elastic import quarantined

if TYPE_CHECKING:
    from aioloader.bridge.batch import Batch
    from aioloader.bridge.dataset import LoaderDataset
    from aioloader.bridge.feed import InlineFeed
    from aioloader.bridge.iterator import BatchIterator
    from aioloader.bridge.job import Job
    from aioloader.engine.host import Host, HostDied
    from aioloader.order.shuffle import Shuffle
    from aioloader.runtime.segments import PageLock

__all__ = ["ArrayLoader", "Loader"]

_log = logging.getLogger("aioloader")

_MAX_HOST_RESTARTS_PER_MINUTE = 3


class Loader:
    """Streams micro-batches of preprocessed, batched and collated samples, in an order that depends on data, seed and configuration only.

    Iterate it with `async for` (asyncio or trio) or with `for`. One loop is one pass of `epochs` epochs; the next loop goes on
    with the next epoch. Leaving a loop early ends everything that it started; the next loop begins that pass again, unless a
    state is loaded.

    Args:
        source: What to read: a `Source`, paths, a Hugging Face dataset, a sequence, an iterable, an async iterable, a function that
            returns one of the last two, or a `Mixture` of any of these.
        preprocess: record -> sample, list of samples (in that order), or None (the record is filtered). Runs in the pool.
            It returns fresh arrays: one that a later call changes would depend on how records travel.
        batched: `preprocess` maps a dict of lists to a dict of lists and is called with batches of one record.
        batch: How samples become micro-batches: `FixedBatch(n)`, `TokenBudget(max_tokens)`, `Bucket(boundaries, ...)`,
            `Pack(seq_len, rows=...)`.
        collate: Samples to a dict of arrays. Required: a wrong default would be a silent bug.
        mesh: This rank's coordinates; by default from torchrun's environment.
        shuffle: Hands out the records of each epoch in another order, see `Shuffle`; None: as the source gives them.
        seed: Seeds `random`, `numpy.random` and torch for each record, together with the epoch and the record's id.
        epochs: Epochs per pass; None: without end. Lanes meet at the end of a pass: where the records of one give more than those of
            another, they drift apart until then, and what one is ahead waits in a temporary file once it takes half of `buffer_size`, or
            an eighth of `memory_limit` while half of that is in use (with `workers=0`, in memory). `Shuffle` keeps them together.
        lanes: Logical data-parallel streams, a multiple of `mesh.dp_size` (default: equal to it). With dp_size x accumulation lanes,
            a rank delivers `accumulation` micro-batches per optimizer step.
        workers: Worker processes or threads; 0 runs everything in the caller's thread, for debugging. Default: the CPUs of this rank.
        pool: "process", "thread" or "inline" (the same as workers=0).
        buffer_size: Records between the source and the trainer at most. Records in a micro-batch that needs more of them than this
            to become complete do not count. Default: what keeps the workers busy while one record is slow, 256 to 8192.
        memory_limit: Bytes that records, results and batches in flight may take, as an int or like "2GiB". Fewer records than
            `buffer_size` are let in where they are large, judged by the largest of late; one always is, and as many as a micro-batch needs.
        prefetch_batches: Micro-batches that may wait for the trainer. Default: two, and up to 16 where they are small: as long as they take
            less than 1 MiB, less than a 64th of `memory_limit`, and less than half of the records in flight.
        end: What becomes of the end of the data, so that all lanes, and with them all ranks, deliver equally many micro-batches. "drop"
            leaves out a last micro-batch that is not full, and what makes lanes uneven. "pad" delivers everything, and fillers
            (`Batch.is_filler`) for lanes that have nothing left. "repeat" fills the epoch up with records from its beginning: for
            sources of known size and `FixedBatch`, where `preprocess` makes one sample of each record. "error" delivers everything and
            then raises where lanes do not end together. Where the end of the data depends on them, ranks agree on it in the
            background, in a process group of their own, if torch.distributed is initialised with at least the ranks of the mesh; else a
            loader works alone.
        end_timeout_s: How long a rank waits for the others to agree on the next step. A rank that is missing for longer is named by a
            `SynchronizationError`. Time between two steps does not count; the default is that of torch's own collectives.
        check_every: Where torch.distributed is initialised with the ranks of the mesh, ranks compare configurations and states before each
            pass, and after every so many steps, in the background, digests of what they were given: ranks that share a dp_rank (tensor,
            pipeline and context parallel ones) must get the same bytes, others no record in common. The latter is not looked for where a
            record may rightly be there twice or ids may be alike: several epochs in a pass, `Mixture`, `AlreadySharded`,
            `end="repeat"`. All ranks have to iterate the loader then. A mesh of fewer ranks than the job is not checked. None: no checks.
        read: "all": each rank reads and preprocesses for itself. "group": of the ranks that share a dp_rank (and a cp_rank) the first
            one does, and sends its micro-batches, with their states, to the others, in a process group of their own.
        read_device: Where micro-batches travel and arrive with `read="group"`: "cpu" (the default, with gloo) or "cuda" (with NCCL).
        timeout_s: A worker process that makes no progress on a record for so long is killed and replaced; None: never.
            Refused with threads, which cannot be killed, and with `workers=0`.
        max_restarts_per_minute: A worker process that dies is replaced and its records run again; more deaths than this are an error.
            A record that was running at three of them is one too (`WorkerError`).
        on_error: What to do about a record that fails, or kills its workers: "raise" (everything before it is delivered, then the error
            is raised), `Retry(n)`, `Quarantine(...)`, or a dict of them by exception class. Quarantined ids are in the state.
        worker_init: Called once per worker; what it returns is passed to `preprocess` as second argument.
        stall_timeout_s: When the trainer waits and no stage gets on for so long, a log line says which one, and where each worker stands;
            also when a collator, or other code of yours, blocks the engine. None: never; nor with `workers=0`, where all runs in the
            trainer's own thread.
        raise_on_stall: Also end the pass with `StallError`.
        pin_memory: Batches arrive in page-locked memory, from which copies to a CUDA device overlap with work; needs a CUDA device.
        worker_cpus: CPUs for the worker processes to stay on, one each, in turn; None: wherever the system puts them.
        host: "process" runs the engine in a sidecar process, "thread" in a thread, for sources that cannot move (a generator).

    Raises:
        ConfigError: An argument is wrong; the message says which, what was expected, what came and what to do.
    """

    def __init__(
        self,
        source: Any,
        *,
        preprocess: Callable[..., Any] | None = None,
        batched: bool = False,
        preprocess_batch_size: int = 1,
        batch: Batching | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        mesh: Mesh | None = None,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        epochs: int | None = 1,
        lanes: int | None = None,
        workers: int | None = None,
        pool: str = "process",
        buffer_size: int | None = None,
        memory_limit: int | str = "2GiB",
        prefetch_batches: int | None = None,
        end: str = "drop",
        end_timeout_s: float = 600.0,
        check_every: int | None = 100,
        read: str = "all",
        read_device: str | None = None,
        on_error: Any = "raise",
        worker_init: Callable[[], Any] | None = None,
        timeout_s: float | None = None,
        max_restarts_per_minute: int = 60,
        stall_timeout_s: float | None = 300.0,
        raise_on_stall: bool = False,
        pin_memory: bool = False,
        worker_cpus: Iterable[int] | None = None,
        host: str = "process",
    ) -> None:
        self._host: Host | None = None
        self._job: Job | None = None
        self._end_timeout_s = options.check_deadline("Loader(end_timeout_s=)", end_timeout_s)
        if check_every is not None:
            options.check_int("Loader(check_every=)", check_every, at_least=1, do="pass a number of steps, or None for no checks")
        self._check_every = check_every
        self._read = options.check_choice("Loader(read=)", read, ("all", "group"))
        self._read_device = read_device
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._closed = False
        if epochs is not None:
            options.check_int("Loader(epochs=)", epochs, at_least=1, do="pass a number of epochs, or None to run without end")
        self._epochs = epochs
        self._host_kind = options.check_choice("Loader(host=)", host, ("process", "thread"))
        self._mesh = mesh if mesh is not None else Mesh.from_env()
        self._plan, self._preprocess = make_plan(
            source,
            preprocess=preprocess,
            batched=batched,
            preprocess_batch_size=preprocess_batch_size,
            batch=batch,
            collate=collate,
            mesh=self._mesh,
            shuffle=shuffle,
            seed=seed,
            lanes=lanes,
            workers=workers,
            pool=pool,
            buffer_size=buffer_size,
            memory_limit=memory_limit,
            prefetch_batches=prefetch_batches,
            end=end,
            on_error=on_error,
            worker_init=worker_init,
            timeout_s=timeout_s,
            max_restarts_per_minute=max_restarts_per_minute,
            stall_timeout_s=stall_timeout_s,
            raise_on_stall=raise_on_stall,
            pin_memory=pin_memory,
            worker_cpus=worker_cpus,
            is_moved=self._host_kind == "process",
        )
        self._engine_stats: dict[str, Any] = {}
        self._bridge_stats: dict[str, Any] = {}
        self._resumed = self._is_epoch_given = False
        self._quarantined: frozenset[RecordId] = frozenset()
        """What any rank left out, where the state that was loaded says so."""
        self._host_restarts = RestartBudget(_MAX_HOST_RESTARTS_PER_MINUTE)
        self._state = self._delivered = starting_state(self._plan)

    # Iterating

    def __len__(self) -> int:
        """Return the micro-batches of this rank in one whole pass.

        Known where the source knows its size, each record is one sample (no `preprocess`) and batches are `FixedBatch`.

        Raises:
            TypeError: It depends on the data, or passes have no end.
        """
        steps = num_steps(self._plan, is_one_to_one=self._is_one_to_one)
        if steps is None or self._epochs is None or (self._plan.end == "error" and steps.shortest < steps.longest):
            raise TypeError(
                "len(loader): expected a source of known size, no preprocess, FixedBatch and a number of epochs, got a loader whose number "
                "of micro-batches depends on the data; count the steps, or iterate until the end"
            )
        is_common = self._plan.end != "pad" or self._ranks().has_other_ranks
        return (steps.longest if is_common else steps.own) * self._epochs * len(self._plan.lanes.served)

    def __bool__(self) -> bool:
        """Return True, also where `len` is 0 or not known."""
        return True

    def __iter__(self) -> BatchIterator:
        """Start a pass; earlier iterators of this loader end."""
        return self._start()

    def __aiter__(self) -> BatchIterator:
        """Start a pass; earlier iterators of this loader end."""
        return self._start()

    @property
    def num_lanes(self) -> int:
        """Return the number of lanes, over all ranks."""
        return self._plan.lanes.num_lanes

    @property
    def epoch(self) -> int:
        """Return the epoch of the next record."""
        return int(self._state["source"]["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next pass starts with. A loaded state that stands in that epoch is kept.

        If nothing is left of the epoch after that state, the next loop is empty: whoever numbers epochs counts that one as done.

        Raises:
            ConfigError: An iterator is live.
        """
        options.check_int("Loader.set_epoch", epoch, at_least=0, do="count epochs from 0")
        self._refuse_live("set_epoch")
        self._is_epoch_given = True
        if epoch != self.epoch:
            self._state = self._delivered = starting_state(self._plan, epoch)
            self._resumed = False

    # State

    def state_dict(self, after: Batch | None = None) -> Json:
        """Return the state as of the last delivered batch, or as of `after`: any batch still held.

        Delivered is not trained: a trainer that prefetches saves `state_dict(after=last_trained_batch)`. The state is
        JSON-compatible; loaded into a new loader it gives the next batch onward bit for bit.
        """
        if after is not None:
            return after.state()
        iterator = self._live()
        return self._delivered if iterator is None else iterator.state()

    def load_state_dict(self, state: Json, *, accept: Collection[str] = ()) -> None:
        """Load a state; it applies to the next loop.

        Args:
            state: What `state_dict` returned, maybe through JSON; or what `aioloader.state.merge` made of those of all ranks, which
                every rank of a run of any size takes that divides the number of lanes. With an indexed source and `FixedBatch`, also one
                with another number of lanes: what is left is delivered exactly once, in other global batches.
            accept: Names of entries of the fingerprint that may differ, e.g. ("preprocess",). With "source", a `Mixture` may have
                more sources or other weights: shares are counted afresh from the first position that no rank has reached, and the change is
                recorded in the state; of several ranks a merged state is needed for that.

        Raises:
            ResumeError: The state belongs to another configuration; lists each difference.
            ConfigError: An iterator is live and would not notice.
        """
        self._refuse_live("load_state_dict")
        self._state = self._delivered = fitted_state(self._plan, state, accept)
        self._resumed, self._is_epoch_given = True, False
        self._quarantined = quarantined(state)

    # The rest of the public surface

    def stats(self) -> dict[str, Any]:
        """Return counts, work and waiting time per stage, in-flight numbers with their peak, and what became of the records.

        Once the engine has ended, after an error, a loop that was left or `close`, its numbers are the last ones known: as of the error,
        the end of the pass or the moment at which the loop was left, with the process ids of then. An engine that died, or that did not
        answer within 0.2 s when its loop was left, leaves those of the last call before. There are none before the first pass.
        """
        if self._host is not None and not self._host.is_inherited:
            self._engine_stats = self._host.stats() or self._engine_stats
        iterator = self._live()
        if iterator is not None:
            iterator.look_again()
            self._bridge_stats = iterator.stats()
        state = self.state_dict()
        totals: dict[str, int] = {}
        for lane in state["lanes"].values():
            for name, number in lane["counts"].items():
                totals[name] = totals.get(name, 0) + number
        return {**self._engine_stats, **self._bridge_stats, "host_restarts": self._host_restarts.total, "records": totals}

    def replay(self, *, step: int, lane: int, state: Json | None = None) -> Batch:
        """Return one micro-batch of any rank again, past or to come, equal to what was or will be delivered, without running the others.

        Runs here, inline: it reads and preprocesses the records of the lane since `state`, and collates the one micro-batch. Of an indexed
        source nothing else is read.

        Args:
            step: The optimizer step, as in `batch.step`.
            lane: The lane, as in `batch.lane`.
            state: A state saved before that step, of the rank that served the lane or merged; None: the beginning of the run. Steps after
                the end of the pass that it stands in need a state of their own pass.

        Raises:
            ConfigError: There is no such lane, or the pass ended before that step.
            ResumeError: The state belongs to another configuration, or was saved after that step.
        """
        open_batch = self._import_opener()
        found, base = replay(self._plan, self._preprocess, step=step, lane=lane, state=state, epochs=self._epochs)
        return open_batch(found, base)

    def as_iterable_dataset(self) -> LoaderDataset:
        """Return a `torch.utils.data.IterableDataset` of this loader's batches, for `DataLoader(dataset, batch_size=None)`."""
        from aioloader.bridge.dataset import LoaderDataset

        return LoaderDataset(self)

    def close(self) -> None:
        """End the engine and everything it started; safe to call twice. Batches in hand stay valid."""
        self._closed = True
        self._shut_down()
        if self._job is not None:
            self._job.close()

    def __enter__(self) -> Self:
        """Return the loader; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loader."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the loader; leaving the block closes it."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loader."""
        self.close()

    def __repr__(self) -> str:
        """Return the loader's place and shape."""
        plan = self._plan
        return (
            f"<Loader epoch {self.epoch}, {plan.batching}, lanes {list(plan.lanes.served)} of {plan.lanes.num_lanes}, "
            f"{plan.num_workers} {plan.pool} workers, {'closed' if self._closed else 'idle' if self._live() is None else 'running'}>"
        )

    # Behind the surface

    def _start(self) -> BatchIterator:
        if self._closed:
            raise ClosedError("Loader: expected an open loader, got one that was closed; make a new one.")
        if self._host is not None and self._host.is_inherited:  # in a process forked since: a DataLoader worker, say
            self._shut_down()
        iterator = self._live()
        if iterator is not None:
            iterator.close(
                ClosedError("iterator: expected the newest iterator of its loader, got one that a newer one replaced; use that.")
            )
        skips_empty = self._resumed and not self._is_epoch_given
        run = Run(state=self._state, end_epoch=self._end_epoch(), epochs=self._epochs, resumed=skips_empty, quarantined=self._quarantined)
        feed: Any
        matching = sender = None
        if self._mesh.dp_size * self._mesh.num_peers == 1:
            feed = self._engine(run)  # which comes to work while this process imports torch below
        else:
            job = self._ranks()
            job.begin_pass(run, is_resumed=self._resumed)
            run = replace(run, quarantined=run.quarantined | job.quarantined)
            feed = job.feed(run, start=self._engine, leave=self._end_host)
            matching, sender = job.matching, job.sender
        from aioloader.bridge.iterator import BatchIterator

        iterator = BatchIterator(
            feed,
            self._state,
            matching,
            sender,
            open_batch=self._import_opener(),
            on_end=self._passed,
            on_leave=self._left,
            on_death=self._revive,
        )
        self._iterator = weakref.ref(iterator)
        return iterator

    def _import_opener(self) -> Callable[..., Batch]:
        """Return what makes a batch of what the engine delivers, importing torch."""
        from aioloader.bridge.tensors import to_batch

        return to_batch

    @property
    def _is_one_to_one(self) -> bool:
        """Return whether each record makes one sample; a function says so by an attribute of that name."""
        function = self._preprocess.function
        return function is None or (bool(getattr(function, "is_one_to_one", False)) and not self._plan.faults.can_skip)

    def _engine(self, run: Run) -> InlineFeed | Host:
        """Start a pass of this rank."""
        from aioloader.bridge.feed import InlineFeed

        self._run = run
        if self._plan.pool == "inline":
            return InlineFeed(self._plan, run, self._preprocess)
        host = self._running_host()
        host.run(run)
        return host

    def _ranks(self) -> Job:
        """Return the other ranks."""
        if self._job is None:
            from aioloader.bridge.job import Job

            self._job = Job(
                self._plan,
                self._mesh,
                is_one_to_one=self._is_one_to_one,
                check_every=self._check_every,
                read=self._read,
                device=self._read_device,
                timeout_s=self._end_timeout_s,
            )
        return self._job

    def _end_epoch(self) -> int | None:
        """Return the epoch before which the next pass ends; a loaded state says where the interrupted one would have ended."""
        if self._epochs is None:
            return None
        saved = self._state["end_epoch"] if self._resumed else None
        return int(saved) if saved is not None else self.epoch + self._epochs

    def _running_host(self) -> Host:
        from aioloader.engine.host import Host

        if self._host is None:
            lock: PageLock | None = None
            if self._plan.pin_memory:
                from aioloader.bridge.pinning import page_lock

                lock = page_lock()
            self._host = Host(self._plan, self._host_kind, lock)
            self._finalizer = weakref.finalize(self, self._host.close)
        return self._host

    def _revive(self, iterator: BatchIterator, death: HostDied) -> Host:
        """Start another host in place of one that died and let it go on from the last delivered batch.

        Raises:
            HostDied: Hosts died more often than is plausible for an accident.
        """
        if not self._host_restarts.take(time.monotonic()):
            raise death
        _log.warning("%s Another one takes over from the last delivered batch.", death)
        self._end_host()
        host = self._running_host()
        if iterator.num_batches:  # else the pass begins again as it began, and a resumed one may still turn out to be at its end
            self._run = replace(self._run, state=iterator.state(), resumed=False)
        host.run(self._run)
        return host

    def _passed(self, iterator: BatchIterator, state: Json) -> None:
        """Note that a pass came to its end."""
        self._bridge_stats = iterator.stats()
        self._state = self._delivered = state
        self._resumed = self._is_epoch_given = False
        self._iterator = None

    def _left(self, iterator: BatchIterator) -> None:
        """Note that a pass was left before its end: what it started ends with it."""
        self._bridge_stats = iterator.stats()
        self._delivered = iterator.state()
        self._iterator = None
        self._shut_down()

    def _shut_down(self) -> None:
        iterator = self._live()
        if iterator is not None:
            iterator.close(ClosedError("iterator: expected an open loader, got one that was closed; make a new one."))
        self._end_host()

    def _end_host(self) -> None:
        if self._host is not None:
            host, self._host = self._host, None
            self._finalizer.detach()
            try:
                self._engine_stats = host.last_stats() or self._engine_stats
            finally:
                host.close()

    def _live(self) -> BatchIterator | None:
        return None if self._iterator is None else self._iterator()

    def _refuse_live(self, where: str) -> None:
        if self._live() is not None:
            raise ConfigError(
                f"Loader.{where}",
                expected="no live iterator",
                got="one that would not notice",
                do="call it before the loop, or close the iterator first",
            )


class ArrayLoader(Loader):
    """A loader whose batches hold NumPy arrays, of one rank and one lane: it never imports torch, which takes seconds and 150 MB."""

    def _import_opener(self) -> Callable[..., Batch]:
        from aioloader.bridge.arrays import to_array_batch

        return to_array_batch
