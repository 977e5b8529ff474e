"""The workloads: their data, their size, how they are measured, who takes part, and what aioloader must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import (
    probe_handover,
    probe_harm,
    probe_memory,
    probe_replacement,
    probe_resume,
    probe_start,
    probe_throughput,
    reasons,
)
from tests.benchmarks.contestants import COLD, DATALOADERS, OURS, Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.goals import Goal
from tests.benchmarks.real_work import Jpegs, Texts, prepare_jpegs, prepare_texts
from tests.benchmarks.reasons import Reason
from tests.benchmarks.sharded_work import ShardedNumbers
from tests.benchmarks.synthetic_work import Arrays, HeavyTail, PythonLoop, SignedLoop, Tokens
from tests.benchmarks.task import Measurement, Settings, Task
from tests.benchmarks.work import Work

__all__ = ["NOT_MEASURED", "WORKLOADS", "Workload"]

Measure = Callable[[Feed, Work, Digest, Task], Measurement]

_STEPS = 400
_QUICK_STEPS = 40
_KILLS = 30
_QUICK_KILLS = 3
_RESUMED_AT = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload.

    Attributes:
        name: What the command line calls it.
        title: What is done, for the report.
        make: (number of records, settings) -> the work.
        num_records: Of a run, and of a quick run.
        measure: Runs in the fresh process.
        headline: The number that contestants are compared by.
        is_rate: Whether more of it is better.
        contestants: Who takes part.
        goals: What aioloader must reach.
        requires: Modules that the work itself needs.
        prepare: Makes the data, once.
        watches_memory: Whether the launching process samples the memory of the tree.
        max_rounds: More would tell nothing.
        why_missed: Says what to know where a goal is missed.
        beside: A second number to show wherever there is room for two.
    """

    name: str
    title: str
    make: Callable[[int, Settings], Work]
    num_records: int
    num_quick_records: int
    measure: Measure
    headline: str
    is_rate: bool
    contestants: tuple[str, ...]
    goals: tuple[Goal, ...]
    requires: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    watches_memory: bool = False
    max_rounds: int = 1000
    why_missed: Reason | None = None
    beside: str | None = None


_PEERS = ("stateful-dataloader", "nodes-process", "nodes-thread", "grain", "spdl", "spdl-region", "huggingface")
_THROUGHPUT = (*OURS, "dataloader-map", "dataloader-iterable", *_PEERS, "pool", "pool-64", "serial")
_ITERATORS = (*OURS, "dataloader-map", "dataloader-iterable", *_PEERS)
_CPU_GOAL = Goal(number="cpu_us_per_record", over="dataloader", at_most=1.0)
_SCALING_GOALS = (
    Goal(number="rate_per_s", over="workers x serial", at_least=0.97),
    Goal(number="rate_per_s", over="best peer", at_least=1.0),
    _CPU_GOAL,
)


def _throughput(feed: Feed, work: Work, digest: Digest, task: Task) -> Measurement:
    return probe_throughput.measure(feed, work, digest)


def _harm(step_s: float) -> Measure:
    def measure(feed: Feed, work: Work, digest: Digest, task: Task) -> Measurement:
        return probe_harm.measure(feed, step_s, digest)

    return measure


def _replacement(feed: Feed, work: Work, digest: Digest, task: Task) -> Measurement:
    return probe_replacement.measure(feed, _QUICK_KILLS if task.settings.is_quick else _KILLS, digest)


def _resume(feed: Feed, work: Work, digest: Digest, task: Task) -> Measurement:
    return probe_resume.measure(feed, work, 0 if task.contestant in COLD else _RESUMED_AT, digest)


def _light_loop(num_records: int, settings: Settings) -> Work:
    """Return work of 1.6 ms a batch: beside steps of 4 ms, the workers leave most of a core free."""
    return PythonLoop(num_records=num_records, batch_size=8, iterations=settings.iterations_per_ms // 5, window=64)


def _rated(
    name: str,
    title: str,
    make: Callable[[int, Settings], Work],
    num_records: int,
    num_quick_records: int,
    goals: tuple[Goal, ...],
    requires: tuple[str, ...] = (),
    prepare: Callable[[Path], None] | None = None,
    why_missed: Reason | None = None,
) -> Workload:
    return Workload(
        name=name,
        title=title,
        make=make,
        num_records=num_records,
        num_quick_records=num_quick_records,
        measure=_throughput,
        headline="rate_per_s",
        is_rate=True,
        contestants=_THROUGHPUT,
        goals=goals,
        requires=requires,
        prepare=prepare,
        why_missed=why_missed,
        beside="cpu_us_per_record",
    )


_ALL = (
    _rated(
        "overhead",
        "no work, samples of 64 tokens, batches of 64",
        lambda n, settings: Tokens(num_records=n, batch_size=64),
        128_000,
        6_400,
        (Goal(number="rate_per_s", over="dataloader", at_least=8.0), Goal(number="rate_per_s", over="best peer", at_least=2.0)),
        why_missed=reasons.no_work,
    ),
    _rated(
        "python",
        "1 ms of pure Python for each record, batches of 32",
        lambda n, settings: PythonLoop(num_records=n, batch_size=32, iterations=settings.iterations_per_ms),
        3_200,
        640,
        _SCALING_GOALS,
        why_missed=reasons.shared_cores,
    ),
    _rated(
        "tokenizer",
        "byte-level BPE on 3 KB of text, batches of 32",
        lambda n, settings: Texts(num_records=n, batch_size=32, folder=str(Path(settings.cache) / "texts")),
        3_200,
        320,
        _SCALING_GOALS,
        ("tokenizers",),
        lambda cache: prepare_texts(cache / "texts"),
        why_missed=reasons.shared_cores,
    ),
    _rated(
        "jpeg",
        "a JPEG of 500x375 read, decoded and resized to 224x224, batches of 32",
        lambda n, settings: Jpegs(num_records=n, batch_size=32, folder=str(Path(settings.cache) / "jpegs")),
        1_280,
        320,
        _SCALING_GOALS,
        ("PIL",),
        lambda cache: prepare_jpegs(cache / "jpegs"),
        why_missed=reasons.shared_cores,
    ),
    _rated(
        "large",
        "samples of 4 MiB, batches of 4",
        lambda n, settings: Arrays(num_records=n, batch_size=4),
        480,
        80,
        (Goal(number="rate_per_s", over="dataloader", at_least=2.0),),
    ),
    _rated(
        "tail",
        "records that wait 2 ms, 0.5 % of them 120 ms, batches of 16",
        lambda n, settings: HeavyTail(num_records=n, batch_size=16, wait_s=0.002),
        2_400,
        320,
        (
            Goal(number="rate_per_s", over="workers x serial", at_least=0.96),
            Goal(number="rate_per_s", over="best ordered peer", at_least=1.0),
        ),
        why_missed=reasons.head_start,
    ),
    Workload(
        name="start",
        title="from the start of the interpreter to the first batch",
        make=lambda n, settings: Tokens(num_records=n, batch_size=64),
        num_records=512,
        num_quick_records=512,
        measure=lambda feed, work, digest, task: probe_start.measure(feed, task.launched_at_s, digest),
        headline="first_batch_ms",
        is_rate=False,
        contestants=(*OURS, *DATALOADERS, *_PEERS, "pool-64", "serial"),
        goals=(Goal(number="first_batch_ms", over="dataloader-forkserver", at_most=1.0),),
    ),
    Workload(
        name="replacement",
        title="from SIGKILL of a worker to the first sample of the process in its place, 1 ms of Python for each record",
        make=lambda n, settings: SignedLoop(num_records=n, batch_size=1, iterations=settings.iterations_per_ms),
        num_records=100 * _KILLS,
        num_quick_records=100 * _QUICK_KILLS,
        measure=_replacement,
        headline="p50_ms",
        is_rate=False,
        contestants=OURS,
        goals=(Goal(number="p50_ms", at_most=50.0),),
        beside="delivered_p50_ms",
    ),
    Workload(
        name="resume",
        title="from making a loader to its first batch, at record 10^8 of 10^9 shuffled ones in 10^5 shards; `cold`: from the beginning",
        make=lambda n, settings: ShardedNumbers(num_records=n, batch_size=64),
        num_records=512,
        num_quick_records=512,
        measure=_resume,
        headline="first_batch_ms",
        is_rate=False,
        contestants=(*OURS, *COLD),
        goals=(Goal(number="first_batch_ms", over="cold", at_most=1.2),),
    ),
    Workload(
        name="handover",
        title="getting a batch that is ready, in a loop: right after another (p50, p99), and after 20 ms of sleep (cold)",
        make=lambda n, settings: Tokens(num_records=n, batch_size=64),
        num_records=16_000,
        num_quick_records=1_920,
        measure=lambda feed, work, digest, task: probe_handover.measure(feed, digest),
        headline="p50_us",
        is_rate=False,
        contestants=(*_ITERATORS, "floor"),
        goals=(Goal(number="p50_us", at_most=20.0),),
        why_missed=reasons.handover,
        beside="cold_us",
    ),
    Workload(
        name="handover-async",
        title="getting a batch that is ready, in asyncio: right after another (p50, p99), and after 20 ms of sleep (cold)",
        make=lambda n, settings: Tokens(num_records=n, batch_size=64),
        num_records=16_000,
        num_quick_records=1_920,
        measure=lambda feed, work, digest, task: probe_handover.measure_async(feed, digest),
        headline="p50_us",
        is_rate=False,
        contestants=(*_ITERATORS, "floor"),
        goals=(Goal(number="p50_us", at_most=40.0),),
        why_missed=reasons.handover,
        beside="cold_us",
    ),
    *(
        Workload(
            name=f"harm-{step_ms}ms",
            title=f"slowdown of a step of {step_ms} ms of small torch operations beside a loader that makes a batch for each",
            make=_light_loop,
            num_records=8 * _STEPS,
            num_quick_records=8 * _QUICK_STEPS,
            measure=_harm(step_ms / 1e3),
            headline="slowdown_pct",
            is_rate=False,
            contestants=(*OURS, "dataloader-map", "dataloader-iterable", "nodes-process", "nodes-thread", "nothing"),
            goals=(Goal(number="slowdown_pct", at_most=5.0), Goal(number="slowdown_pct", minus="dataloader", at_most=0.0)),
            beside="slowdown_p95_pct",
        )
        for step_ms in (4, 10)
    ),
    Workload(
        name="memory",
        title="memory of the process tree over 10^6 tiny records",
        make=lambda n, settings: Tokens(num_records=n, batch_size=64, length=4),
        num_records=1_000_000,
        num_quick_records=64_000,
        measure=lambda feed, work, digest, task: probe_memory.measure(feed, digest),
        headline="peak_mib",
        is_rate=False,
        contestants=_ITERATORS,
        goals=(Goal(number="slope_mib_per_million", at_most=5.0),),
        watches_memory=True,
        max_rounds=2,  # memory is not noisy
        beside="slope_mib_per_million",
    ),
)

WORKLOADS = {workload.name: workload for workload in _ALL}

NOT_MEASURED = {
    "object store with 30 ms latency (at least 0.9 of what obstore reaches alone, 5x a thread-per-file reader)": (
        "this version has no source that reads object stores"
    ),
}
"""What else the project is to be measured by -> why there is no workload for it."""
