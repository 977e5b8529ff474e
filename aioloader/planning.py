"""From a loader's arguments to the plan that its engine runs: every argument is checked here, once, and what must move is moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aioloader import options
from aioloader.batching import FixedBatch
from aioloader.batching.balanced import Balanced, BalancedIndex
from aioloader.engine.plan import Plan
from aioloader.errors import ConfigError
from aioloader.faults import FaultPolicy
from aioloader.order.already_sharded import AlreadySharded, SplitStream
from aioloader.order.lanes import LaneMap
from aioloader.order.mesh import Mesh
from aioloader.order.mixed import MixedStream
from aioloader.order.mixture import Mixture
from aioloader.order.ordered import OrderedIndex, ShuffledStream, order_source
from aioloader.order.repeated import RepeatedEpoch
from aioloader.order.shuffle import Shuffle
from aioloader.pools.recovery import RecoveryOptions
from aioloader.pools.runner import Preprocess
from aioloader.protocols import Batching, IndexedSource, Json, Source
from aioloader.runtime.moving import dumps, pack_argument
from aioloader.sources import resolve_source
from aioloader.state.fingerprint import function_fingerprint, object_fingerprint

__all__ = ["make_plan"]


def make_plan(
    source: Any,
    *,
    preprocess: Any,
    batched: Any,
    preprocess_batch_size: Any,
    batch: Any,
    collate: Any,
    mesh: Mesh,
    shuffle: Any,
    seed: Any,
    lanes: Any,
    workers: Any,
    pool: Any,
    buffer_size: Any,
    memory_limit: Any,
    prefetch_batches: Any,
    end: Any,
    on_error: Any,
    worker_init: Any,
    timeout_s: Any,
    max_restarts_per_minute: Any,
    stall_timeout_s: Any,
    raise_on_stall: Any,
    pin_memory: Any,
    worker_cpus: Any,
    is_moved: bool,
) -> tuple[Plan, Preprocess]:
    """Return the plan for a loader's arguments (see `Loader`), and its preprocessing for `workers=0`.

    Where the engine `is_moved` to another process, source, batching and collator must be able to move there.

    Raises:
        ConfigError: An argument is wrong; the message says which, what was expected, what came and what to do.
    """
    _refuse_what_is_to_come(preprocess_batch_size=preprocess_batch_size)
    options.check_int("Loader(seed=)", seed, at_least=0, do="pass a non-negative seed")
    pool, num_workers = _workers(pool, workers)
    prepared = Preprocess(
        function=_function("Loader(preprocess=)", preprocess),
        batched=bool(batched),
        worker_init=_function("Loader(worker_init=)", worker_init),
        seed=seed,
    )
    lane_map = options.lane_map(lanes, mesh)
    batching = _batching(batch)
    collator = options.check_callable(
        "Loader(collate=)",
        collate,
        expected="a collator: a callable from a list of samples to a dict of arrays",
        do="pass one, e.g. collate=PretrainCollator(); there is no default, since a wrong one would be a silent bug",
    )
    ordered = _ordered(source, _shuffle(shuffle), seed, batching, lane_map)
    if end == "repeat":
        ordered = _filled_up(ordered, batching, lane_map)
    plan = Plan(
        source=ordered,
        preprocess=b"" if pool == "inline" else _packed(prepared),
        batching=batching,
        collate=collator,
        lanes=lane_map,
        seed=seed,
        pool=pool,
        num_workers=num_workers,
        buffer_size=_buffer_size(buffer_size),
        memory_limit=options.parse_bytes("Loader(memory_limit=)", memory_limit),
        prefetch_batches=_prefetch_batches(prefetch_batches),
        end=_end(end),
        num_distinct=ordered.num_distinct if isinstance(ordered, RepeatedEpoch) else None,
        faults=FaultPolicy(on_error),
        stall_timeout_s=options.check_seconds("Loader(stall_timeout_s=)", stall_timeout_s),
        raise_on_stall=bool(raise_on_stall),
        pin_memory=bool(pin_memory),
        worker_cpus=_worker_cpus(worker_cpus, pool),
        recovery=RecoveryOptions(timeout_s=_timeout_s(timeout_s, pool), max_restarts_per_minute=max_restarts_per_minute),
        fingerprint={},
    )
    if is_moved and pool != "inline":
        _check_movable(plan)
    fingerprint = _fingerprint(plan, prepared, shuffle)
    if isinstance(source, Mixture) and source.length is not None:
        fingerprint["length"] = function_fingerprint(source.length)
    return replace(plan, fingerprint=fingerprint), prepared


def _prefetch_batches(prefetch_batches: Any) -> int | None:
    if prefetch_batches is None:
        return None
    return options.check_int("Loader(prefetch_batches=)", prefetch_batches, at_least=1, do="allow at least one batch to wait, or use None")


def _fingerprint(plan: Plan, preprocess: Preprocess, shuffle: Shuffle | None) -> dict[str, Json]:
    """Return what decides the data that are delivered: a state of one loader fits another only if all of it is equal."""
    return {
        "source": object_fingerprint(plan.source),
        "shuffle": None if shuffle is None else object_fingerprint(shuffle),
        "preprocess": function_fingerprint(preprocess.function),
        "batched": preprocess.batched,
        "batch": object_fingerprint(plan.batching),
        "collate": object_fingerprint(plan.collate),
        "seed": plan.seed,
        "end": plan.end,
    }


def _packed(preprocess: Preprocess) -> bytes:
    do = "open files, locks and connections inside the function or in worker_init, or use workers=0"
    pack_argument("Loader(preprocess=)", preprocess.function, do=do)
    pack_argument("Loader(worker_init=)", preprocess.worker_init, do=do)
    return dumps(preprocess)


def _check_movable(plan: Plan) -> None:
    pack_argument("Loader(source)", plan.source, do="use host='thread' for a source that lives in this process, such as a generator")
    pack_argument("Loader(collate=)", plan.collate, do="use a function or an object without locks and open files, or host='thread'")
    pack_argument("Loader(batch=)", plan.batching, do="use plain options, or host='thread'")


def _refuse_what_is_to_come(*, preprocess_batch_size: Any) -> None:
    if preprocess_batch_size != 1:
        raise options.not_yet("Loader(preprocess_batch_size=)", expected="1", got=preprocess_batch_size)


def _ordered(source: Any, shuffle: Shuffle | None, seed: int, batching: Batching, lanes: LaneMap) -> Source:
    """Return the source in the order that its records are delivered in."""
    if isinstance(source, Balanced):
        return _balanced(source, shuffle, seed, batching, lanes)
    if isinstance(source, AlreadySharded):
        stream = resolve_source(source.source)
        return SplitStream(stream if shuffle is None else ShuffledStream(stream, shuffle, seed))
    if not isinstance(source, Mixture):
        return order_source(resolve_source(source), shuffle, seed)
    return MixedStream(source, {name: resolve_source(one) for name, (one, _) in source.sources.items()}, shuffle, seed)


def _balanced(balanced: Balanced, shuffle: Shuffle | None, seed: int, batching: Batching, lanes: LaneMap) -> BalancedIndex:
    source = resolve_source(balanced.source)
    if not isinstance(source, IndexedSource) or not isinstance(batching, FixedBatch):
        raise ConfigError(
            "Loader(source)",
            expected="Balanced around a source of known size, with FixedBatch",
            got=f"{balanced!r} with {batching!r}",
            do="use TokenBudget or Bucket where micro-batches may have different numbers of samples",
        )
    return BalancedIndex(balanced, source, shuffle, seed, num_lanes=lanes.num_lanes, batch_size=batching.batch_size)


def _shuffle(shuffle: Any) -> Shuffle | None:
    if shuffle is None or isinstance(shuffle, Shuffle):
        return shuffle
    raise ConfigError("Loader(shuffle=)", expected="a Shuffle, or None", got=repr(shuffle), do="pass e.g. shuffle=Shuffle(window=8192)")


def _end(end: Any) -> str:
    return options.check_choice("Loader(end=)", end, ("drop", "pad", "repeat", "error"))


def _filled_up(source: Source, batching: Batching, lanes: LaneMap) -> RepeatedEpoch:
    """Return the source with records from its beginning repeated until all lanes have full micro-batches only."""
    if not isinstance(source, OrderedIndex) or not isinstance(batching, FixedBatch) or not source.num_records:
        raise ConfigError(
            "Loader(end='repeat')",
            expected="records of a source of known size, and FixedBatch: how many to repeat has to be known beforehand",
            got=f"{type(source).__name__} with {batching!r}",
            do="use end='pad' or 'drop'",
        )
    return RepeatedEpoch(source, lanes.num_lanes * batching.batch_size)


def _workers(pool: Any, workers: Any) -> tuple[str, int]:
    options.check_choice("Loader(pool=)", pool, ("process", "thread", "inline"))
    if workers is not None:
        options.check_int("Loader(workers=)", workers, at_least=0, do="use 0 to run inline, or leave it out for one per CPU")
    if pool == "inline" or workers == 0:
        return "inline", 0
    return pool, options.default_workers() if workers is None else workers


def _worker_cpus(worker_cpus: Any, pool: str) -> tuple[int, ...]:
    if worker_cpus is not None and pool != "process":
        raise ConfigError("Loader(worker_cpus=)", expected="worker processes to keep there", got=f"pool={pool!r}", do="leave it out")
    return options.check_cpus("Loader(worker_cpus=)", worker_cpus)


def _timeout_s(timeout_s: Any, pool: str) -> float | None:
    checked = options.check_seconds("Loader(timeout_s=)", timeout_s)
    if checked is not None and pool != "process":
        raise ConfigError(
            "Loader(timeout_s=)",
            expected="worker processes, since only they can be killed",
            got=f"pool={pool!r}",
            do="leave it out, or use pool='process' and workers",
        )
    return checked


def _function(where: str, function: Any) -> Callable[..., Any] | None:
    if function is None:
        return None
    return options.check_callable(where, function, expected="a function, or None", do="pass a function, lambda or callable object")


def _batching(batch: Any) -> Batching:
    if not (hasattr(batch, "start") and hasattr(batch, "fingerprint")):
        raise ConfigError(
            "Loader(batch=)",
            expected="a batching strategy",
            got=repr(batch),
            do="pass one, e.g. batch=FixedBatch(32) or batch=Pack(4096, rows=4)",
        )
    batching: Batching = batch
    return batching


def _buffer_size(buffer_size: Any) -> int | None:
    if buffer_size is None:
        return None
    return options.check_int("Loader(buffer_size=)", buffer_size, at_least=1, do="allow at least one record in flight, or leave it out")
