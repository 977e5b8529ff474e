"""The parts of the suite that compute: goals, comparison of what was delivered, medians, tables."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.order.indexed import IndexedOrder
from tests.benchmarks.contestants import CONTESTANTS, OURS
from tests.benchmarks.digest import Digest
from tests.benchmarks.goals import Goal, judge, reference
from tests.benchmarks.markdown import as_markdown
from tests.benchmarks.real_work import Texts, prepare_texts
from tests.benchmarks.reasons import head_start, no_work, shared_cores
from tests.benchmarks.report import as_json, as_text, tail
from tests.benchmarks.rounds import Result, differences, summarize
from tests.benchmarks.sharded_work import SHUFFLE, Shards
from tests.benchmarks.synthetic_work import Arrays, HeavyTail, PythonLoop, Tokens
from tests.benchmarks.task import Measurement, Settings, Task
from tests.benchmarks.tree import cpu_by_process_s, tree_cpu_s, tree_pids, tree_pss_bytes
from tests.benchmarks.work import MakeBatch, Records, Work, in_batches
from tests.benchmarks.workloads import WORKLOADS

ROUNDS = {
    "aioloader": {"rate_per_s": [80.0, 90.0, 100.0], "p50_us": [15.0, 16.0, 14.0]},
    "aioloader-thread": {"rate_per_s": [95.0, 95.0, 95.0]},
    "dataloader-map": {"rate_per_s": [20.0, 20.0, 20.0], "p50_us": [60.0, 60.0, 60.0]},
    "dataloader-iterable": {"rate_per_s": [32.0, 30.0, 25.0], "p50_us": [51.0, 50.0, 49.0]},
    "spdl-region": {"rate_per_s": [60.0, 60.0, 60.0]},
    "serial": {"rate_per_s": [50.0, 50.0, 50.0]},
}

FACTS: dict[str, Any] = {
    "command": "make",
    "date": "2026-01-02T03:04:05+00:00",
    "duration_s": 5400,
    "machine": {"processor": "a chip", "cores": 2},
    "versions": {"python": "3.11.7"},
    "workers": 2,
    "rounds": 5,
    "is_quick": False,
}


def measurement(*, rate: float = 1.0, num_records: int = 64, content: int = 1, order: int = 1) -> Measurement:
    return Measurement(numbers={"rate_per_s": rate}, num_records=num_records, content=content, order=order, first_at_s=0.0, last_at_s=1.0)


@pytest.mark.parametrize(
    ("goal", "value", "is_reached"),
    [
        (Goal(number="rate_per_s", over="dataloader", at_least=3.0), 3.0, True),
        (Goal(number="rate_per_s", over="best peer", at_least=2.0), 1.5, False),
        (Goal(number="rate_per_s", over="best ordered peer", at_least=2.0), 3.0, True),
        (Goal(number="rate_per_s", over="workers x serial", at_least=0.97), 0.9, False),
        (Goal(number="p50_us", at_most=20.0), 15.0, True),
        (Goal(number="p50_us", over="dataloader", at_most=0.2), 15 / 51, False),
        (Goal(number="p50_us", minus="dataloader", at_most=0.0), -35.0, True),
        (Goal(number="p50_us", over="grain", at_most=1.0), None, None),
        (Goal(number="peak_mib", at_most=1.0), None, None),
    ],
)
def test_a_goal_is_judged_by_the_median_round(goal: Goal, value: float | None, is_reached: bool | None) -> None:
    verdict = judge(goal, ROUNDS, workers=2)
    assert verdict.value == (None if value is None else pytest.approx(value))
    assert verdict.is_reached is is_reached


def test_a_reference_group_is_as_good_as_its_best_member() -> None:
    assert reference("dataloader", "rate_per_s", ROUNDS, workers=2, is_rate=True) == [32.0, 30.0, 25.0]
    assert reference("dataloader", "p50_us", ROUNDS, workers=2, is_rate=False) == [51.0, 50.0, 49.0]
    assert reference("best peer", "rate_per_s", ROUNDS, workers=2, is_rate=True) == [60.0, 60.0, 60.0]


def test_rounds_in_which_the_machine_was_slow_for_all_do_not_move_a_ratio() -> None:
    rounds = {"aioloader": {"rate_per_s": [30.0, 3.0, 300.0, 33.0]}, "dataloader-map": {"rate_per_s": [10.0, 1.0, 100.0, 11.0]}}
    verdict = judge(Goal(number="rate_per_s", over="dataloader", at_least=3.0), rounds, workers=2)
    assert verdict.value == pytest.approx(3.0)


def test_contestants_that_delivered_the_same_do_not_differ() -> None:
    assert differences({"serial": measurement(), "aioloader": measurement(), "spdl-region": measurement(order=9)}, 64) == []


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (measurement(num_records=63), "aioloader delivered 63 of 64 records"),
        (measurement(content=2), "aioloader delivered other content than serial"),
        (measurement(order=2), "aioloader delivered another order than serial"),
    ],
)
def test_a_contestant_that_did_other_work_is_named(one: Measurement, text: str) -> None:
    assert differences({"serial": measurement(), "aioloader": one}, 64) == [text]


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=9))
def test_a_row_holds_median_and_extremes(rates: list[float]) -> None:
    row = summarize("aioloader", [measurement(rate=rate) for rate in rates])
    summary = row.numbers["rate_per_s"]
    assert row.rounds == len(rates)
    assert summary.lowest == min(rates)
    assert summary.highest == max(rates)
    assert sum(rate <= summary.median for rate in rates) * 2 >= len(rates)


def test_the_table_and_the_json_show_rows_goals_and_disagreements() -> None:
    rows = [summarize(name, [measurement(rate=rate) for rate in numbers["rate_per_s"]]) for name, numbers in ROUNDS.items()]
    result = Result(
        workload=WORKLOADS["overhead"],
        num_records=64,
        rows=rows,
        left_out={"grain": "grain is not installed"},
        disagreements=["other content"],
    )
    text = as_text(result, workers=2, cores=2)
    lines = text.splitlines()
    assert lines[2].split()[0] == "aioloader-thread"  # the fastest comes first
    assert "left out: grain: grain is not installed" in text
    assert "NOT THE SAME WORK: other content" in text
    assert "MISSED: aioloader rate_per_s / dataloader at least 8: 3" in text
    assert "aioloader / best peer: 1.5 (more is better)" in text
    (written,) = as_json([result], FACTS, workers=2, cores=2)["workloads"]
    assert [row["contestant"] for row in written["rows"]] == list(ROUNDS)
    assert [goal["is_reached"] for goal in written["goals"]] == [False, False]


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=6, unique=True), st.booleans())
def test_a_digest_tells_content_and_order_apart(values: list[int], is_full: bool) -> None:
    def digest(numbers: list[int]) -> Digest:
        found = Digest(is_full=is_full)
        for number in numbers:
            found.add({"input_ids": torch.full((4, 3), number)})
        return found

    forward, backward, shorter = digest(values), digest(values[::-1]), digest(values[1:])
    assert forward.num_records == 4 * len(values)
    assert forward.content == backward.content
    assert forward.order != backward.order
    assert (shorter.num_records, shorter.order) != (forward.num_records, forward.order)


def test_a_task_and_a_measurement_survive_their_journey() -> None:
    settings = Settings(workers=2, cache="build", iterations_per_ms=9000, is_quick=True)
    task = Task(workload="tail", contestant="grain", num_records=64, is_check=True, launched_at_s=1.5, settings=settings)
    assert Task.from_json(task.to_json()) == task
    assert Measurement.from_json(measurement().to_json()) == measurement()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokens(num_records=128, batch_size=64),
        lambda: PythonLoop(num_records=64, batch_size=32, iterations=10),
        lambda: Arrays(num_records=8, batch_size=4, side=16),
        lambda: HeavyTail(num_records=64, batch_size=16, wait_s=0.0),
    ],
)
def test_work_is_a_function_of_the_index(make: Callable[[], Work]) -> None:
    work = make()
    once, again = MakeBatch(work, as_tensors=False), MakeBatch(make(), as_tensors=True)
    assert [index for batch in in_batches(work) for index in batch] == list(range(len(Records(work))))
    for batch in in_batches(work):
        for name, array in once(batch).items():
            assert np.array_equal(array, again(batch)[name].numpy())


def test_texts_are_tokenized_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("texts")
    prepare_texts(folder, num_bytes=200_000, vocabulary=1000)
    work = Texts(num_records=4, batch_size=2, folder=str(folder))
    samples = [work.sample(work.record(index)) for index in range(2)]
    batch = work.collate(samples)
    assert len(work.record(0)) == work.text_bytes
    assert batch["input_ids"].shape == (2, max(len(sample["input_ids"]) for sample in samples))
    assert all(0 < len(sample["input_ids"]) < work.text_bytes / 2 for sample in samples)


def test_a_tree_counts_descendants_and_what_they_used() -> None:
    code = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\nsys.stdin.read()"
    before_s = tree_cpu_s(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.pid in tree_pids(os.getpid())
        assert tree_cpu_s(process.pid) >= 0.15
        assert tree_cpu_s(os.getpid()) - before_s >= 0.15
        assert tree_pss_bytes(process.pid) > 2**20
    assert tree_cpu_s(os.getpid()) - before_s >= 0.15  # it ended and was waited for
    assert tree_pids(process.pid) == [process.pid]
    assert tree_pss_bytes(process.pid) == 0


def test_every_workload_names_contestants_and_goals() -> None:
    for workload in WORKLOADS.values():
        assert set(workload.contestants) <= CONTESTANTS.keys()
        assert set(OURS) <= set(workload.contestants)
        assert workload.goals


@pytest.mark.parametrize(
    ("engine_us", "bound"),
    [(20.0, "50,000 records/s on any number of cores, so that more cores alone would not do"), (2.0, "500,000 records/s on any number")],
)
def test_the_reason_of_the_overhead_row_is_computed_from_the_run(engine_us: float, bound: str) -> None:
    ours = {"cpu_us_per_record": 24.0, "engine_us_per_record": engine_us, "trainer_us_per_record": 1.0, "workers_us_per_record": 3.0}
    found = {"aioloader": ours, "dataloader-map": {"rate_per_s": 25_000.0}, "serial": {"cpu_us_per_record": 1.6}}
    (goal, _) = WORKLOADS["overhead"].goals
    text = no_work(goal, found, workers=2, cores=2)
    assert "200,000 records/s, 8 times those of dataloader-map, leave 10 us of CPU for each of them on 2 cores" in text
    assert f"aioloader takes 24 (3 the workers, {engine_us:.3g} the engine, 1 the trainer); `serial`" in text
    assert "samples, 1.6." in text
    assert "passes nothing" not in text
    assert f"The engine is one process: {engine_us:.3g} us bound it to {bound}" in text
    found["dataloader-map"]["workers_us_per_record"] = 0.0
    assert "; dataloader-map passes nothing from one process to another." in no_work(goal, found, workers=2, cores=2)
    assert no_work(goal, {"aioloader": ours}, workers=2, cores=2) == ""


@pytest.mark.parametrize(
    ("rate", "share"), [(1900.0, "95.0% of that: the cores bound it"), (1000.0, "50.0% of that: this program did not have the cores")]
)
def test_the_reason_of_a_row_bound_by_the_cores_says_what_they_have_time_for(rate: float, share: str) -> None:
    found = {"aioloader": {"rate_per_s": rate, "cpu_us_per_record": 1000.0}}
    text = shared_cores(Goal(number="rate_per_s", over="workers x serial", at_least=0.97), found, workers=2, cores=2)
    assert f"takes 1,000 us of CPU a record, of which 2 cores have time for 2,000 records/s; it reached {share}" in text


def test_a_peer_that_is_above_what_the_workers_can_do_had_a_head_start() -> None:
    goal = Goal(number="rate_per_s", over="best ordered peer", at_least=1.0)
    found = {"aioloader": {"rate_per_s": 99.0}, "pool-64": {"rate_per_s": 105.0}, "serial": {"rate_per_s": 50.0}}
    text = head_start(goal, found, workers=2, cores=2)
    assert "2 workers make 100 records/s and no more; pool-64 is above that" in text
    assert text.endswith("aioloader reaches 99.0% of it")
    assert head_start(goal, {**found, "pool-64": {"rate_per_s": 100.0}}, workers=2, cores=2) == ""
    assert head_start(goal, {"aioloader": found["aioloader"], "serial": found["serial"]}, workers=2, cores=2) == ""


def handovers() -> Result:
    numbers = {"aioloader": {"p50_us": 25.0, "cold_us": 158.0}, "floor": {"p50_us": 9.5, "cold_us": 120.0}}
    measured = {name: dataclasses.replace(measurement(), numbers=one) for name, one in numbers.items()}
    rows = [summarize(name, [one]) for name, one in measured.items()]
    return Result(workload=WORKLOADS["handover"], num_records=64, rows=rows, left_out={})


@pytest.mark.parametrize("workload", ["handover", "handover-async"])
def test_a_batch_that_is_ready_is_shown_beside_the_floor_with_warm_and_with_cold_caches(workload: str) -> None:
    assert "floor" in WORKLOADS[workload].contestants
    text = as_text(dataclasses.replace(handovers(), workload=WORKLOADS[workload]), workers=2, cores=2)
    assert "  aioloader - floor: p50_us 25 - 9.5 = 15.5; cold_us 158 - 120 = 38" in text.splitlines()


def test_a_missed_hand_over_says_what_any_loader_takes() -> None:
    assert "memory that is there, takes 9.5 us, and 120 with the cold caches" in as_text(handovers(), workers=2, cores=2)


def test_resume_is_judged_beside_a_start_from_the_beginning() -> None:
    (goal,) = WORKLOADS["resume"].goals
    found = {"aioloader": {"first_batch_ms": [130.0]}, "cold": {"first_batch_ms": [100.0]}, "cold-thread": {"first_batch_ms": [10.0]}}
    verdict = judge(goal, found, workers=2)
    assert (verdict.value, verdict.is_reached) == (1.3, False)


def test_what_is_not_measured_is_named_with_the_reason() -> None:
    assert tail().startswith("not measured: object store with 30 ms latency")
    assert "no source that reads object stores" in tail()
    assert len(tail().splitlines()) == 1


def test_a_position_of_the_sharded_numbers_is_found_from_the_number() -> None:
    shards = Shards()
    order = IndexedOrder(shards.shard_sizes, SHUFFLE, seed=0, epoch=0)
    for position in (0, 1, 10**8, 10**9 - 1):
        shard, row = order.locate_one(position)
        (number,) = shards.fetch(shard, [row])
        assert shards.position(number) == position


def test_the_tables_for_the_readme_have_every_workload_its_goals_why_they_are_missed_and_who_took_no_part() -> None:
    text = as_markdown(json.loads(json.dumps(as_json([handovers()], FACTS, workers=2, cores=2))))
    lines = text.splitlines()
    assert lines[0].startswith("Medians of 5 rounds with 2 workers on 2 cores of a chip (2026-01-02, 90 minutes; `make`)")
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert rows.keys() == WORKLOADS.keys()
    assert rows["handover"].endswith("| p50_us (cold_us) | 25 (158) | - | - | 9.5 (120) floor | **missed**: p50_us at most 20: 25 |")
    assert rows["memory"].endswith("| not in this run | - | - | - | - |")
    assert any(line.startswith('- `handover` misses "aioloader p50_us at most 20": `floor`') for line in lines)
    assert "- `handover` was run without aioloader-thread, dataloader-map, " in text
    assert any(line.startswith("| object store") and "not measured" in line for line in lines)
    assert "| aioloader | 25 |" in lines


def test_readme_md_has_a_row_for_every_workload() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for workload in WORKLOADS.values():
        assert f"| `{workload.name}`: {workload.title} | " in readme


def test_cpu_time_is_told_apart_by_process() -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\n"
    named = f"import ctypes; ctypes.CDLL(None).prctl(15, b'aioloader-engine', 0, 0, 0)\n{code}print(flush=True); input()"
    before = cpu_by_process_s(os.getpid())
    subprocess.run([sys.executable, "-c", code], check=True)
    with subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        parts, total_s = cpu_by_process_s(os.getpid()), tree_cpu_s(os.getpid())
    assert "engine" not in before
    assert parts["engine"] >= 0.15
    assert parts["workers"] - before["workers"] >= 0.15  # it ended and was waited for
    assert sum(parts.values()) == pytest.approx(total_s, abs=0.1)
