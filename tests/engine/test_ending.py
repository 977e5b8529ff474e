"""The end of a pass by arithmetic, against passes that run to their end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import Bucket, FixedBatch, Loader, Mesh, Pack, PretrainCollator, SftCollator, TokenBudget
from aioloader.engine.ending import NumSteps, num_steps, stopped_state
from tests.contract.cases import INLINE, collate, documents, some_or_many

BATCHINGS: dict[str, Any] = {
    "fixed": (FixedBatch(3), PretrainCollator()),
    "packed": (Pack(16, rows=2), PretrainCollator()),
    "best-fit": (Pack(8, rows=1, strategy="best_fit", overflow="drop"), PretrainCollator()),
    "bucket": (Bucket((4, 8), batch_size=2, overflow="drop"), SftCollator(pad_token_id=0)),
    "budget": (TokenBudget(24), SftCollator(pad_token_id=0)),
}


def with_labels(record: dict[str, Any]) -> Any:
    made = some_or_many(record)
    samples = made if isinstance(made, list) else [made]
    return made and [{**sample, "labels": sample["input_ids"]} for sample in samples]


@pytest.mark.parametrize("name", BATCHINGS)
def test_a_rank_that_stops_early_accounts_for_all_records(name: str) -> None:
    """At any micro-batch: what was delivered, filtered and dropped is all there is; and the next pass begins alike."""
    batching, collator = BATCHINGS[name]
    options: Any = {"preprocess": with_labels, "batch": batching, "collate": collator, "lanes": 4, "epochs": 2, **INLINE}
    with Loader(documents(60), mesh=Mesh(dp_rank=1, dp_size=2), **options) as loader:
        states = [batch.state() for batch in loader]
        end, plan = loader.state_dict(), loader._plan
    assert len(states) > 6
    for state in states:
        stopped = stopped_state(plan, state, 2)
        assert {**stopped, "lanes": None} == {**end, "lanes": None}
        for lane in stopped["lanes"].values():
            counts = lane["counts"]
            assert counts["records"] + counts["dropped_records"] == 2 * 15
            gone = ("delivered_samples", "dropped_samples", "batching_dropped_samples", "batching_empty_samples")
            assert sum(counts[key] for key in gone) == counts["samples"]
            assert (lane["epoch"], lane["seq"], lane["sub"]) == (2, 0, 0)
        assert {number: lane["step"] for number, lane in stopped["lanes"].items()} == {
            number: lane["step"] for number, lane in state["lanes"].items()
        }
    with Loader(documents(60), mesh=Mesh(dp_rank=1, dp_size=2), **options) as loader:
        loader.load_state_dict(stopped_state(plan, states[2], 2))
        assert next(iter(loader)).epoch == 2


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.sampled_from(["drop", "pad"]))
def test_the_number_of_steps_is_that_of_the_lanes(num_records: int, dp_size: int, accumulation: int, batch_size: int, end: str) -> None:
    lengths, steps = [], NumSteps(0, 0, 0)
    for dp_rank in range(dp_size):
        mesh = Mesh(dp_rank=dp_rank, dp_size=dp_size)
        lanes = dp_size * accumulation
        with Loader(range(num_records), batch=FixedBatch(batch_size), collate=collate, lanes=lanes, end=end, mesh=mesh, **INLINE) as loader:
            steps = num_steps(loader._plan, is_one_to_one=True) or steps
            batches = list(loader)
        real = [sum(batch.lane == lane and not batch.is_filler for batch in batches) for lane in range(dp_rank, lanes, dp_size)]
        assert max(real) == steps.own
        lengths += real
    assert (min(lengths), max(lengths)) == (steps.shortest, steps.longest)


def test_what_depends_on_the_data_is_not_guessed() -> None:
    options: Any = {"collate": collate, "mesh": Mesh(), **INLINE}
    with Loader(range(9), batch=FixedBatch(2), **options) as loader:
        assert num_steps(loader._plan, is_one_to_one=False) is None
    with Loader(iter(range(9)), batch=FixedBatch(2), host="thread", **options) as loader:
        assert num_steps(loader._plan, is_one_to_one=True) is None
    with Loader(documents(9), batch=Pack(8), **options) as loader:
        assert num_steps(loader._plan, is_one_to_one=True) is None
