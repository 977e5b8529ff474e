"""Every wrong argument of the loader, in one list: the error says where, what was expected, what came and what to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioloader import ConfigError, FixedBatch, Loader, Mesh, Pack, PretrainCollator, Quarantine, ResumeError, Retry
from aioloader.sources import JsonLines, TextFiles
from tests.contract.cases import collate

_LOCK = threading.Lock()


def closes_over_a_lock(number: int) -> int:
    with _LOCK:
        return number


closes_over_a_lock.__module__ = "__main__"  # as in a script: travels by value


class Unmovable:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return collate(samples)


def numbers() -> Iterator[int]:
    yield from range(3)


def loader(**options: Any) -> Loader:
    """Return a good loader but for `options`; nothing is started."""
    source = options.pop("source", range(10))
    return Loader(source, **{"batch": FixedBatch(2), "collate": collate, "workers": 0, **options})


WRONG: list[tuple[dict[str, Any], str, str, str, str]] = [
    # argument, where, expected, got, do
    ({"workers": -1}, "Loader(workers=)", "an int of at least 0", "-1", "use 0 to run inline"),
    ({"workers": True}, "Loader(workers=)", "an int of at least 0", "True", "use 0 to run inline"),
    ({"workers": 1.5}, "Loader(workers=)", "an int of at least 0", "1.5", "use 0 to run inline"),
    ({"collate": None}, "Loader(collate=)", "a collator", "NoneType None", "there is no default"),
    ({"batch": None}, "Loader(batch=)", "a batching strategy", "None", "batch=FixedBatch(32)"),
    ({"batch": 32}, "Loader(batch=)", "a batching strategy", "32", "batch=FixedBatch(32)"),
    ({"preprocess": 7}, "Loader(preprocess=)", "a function, or None", "int 7", "pass a function"),
    ({"worker_cpus": [0], "workers": 0}, "Loader(worker_cpus=)", "worker processes to keep there", "pool='inline'", "leave it out"),
    (
        {"worker_cpus": [10**6], "workers": 1},
        "Loader(worker_cpus=)",
        "numbers of CPUs that this process may use",
        "[1000000]",
        "leave it out",
    ),
    ({"worker_cpus": "0", "workers": 1}, "Loader(worker_cpus=)", "numbers of CPUs", "'0'", "leave it out"),
    ({"worker_init": 7}, "Loader(worker_init=)", "a function, or None", "int 7", "pass a function"),
    (
        {"lanes": 3, "mesh": Mesh(dp_rank=0, dp_size=2)},
        "Loader(lanes=)",
        "a positive multiple of dp_size (2)",
        "3",
        "use dp_size x accumulation",
    ),
    ({"lanes": 0}, "Loader(lanes=)", "an int of at least 1", "0", "use dp_size x accumulation"),
    ({"pool": "fork"}, "Loader(pool=)", "one of 'process', 'thread', 'inline'", "'fork'", "choose one"),
    ({"host": "remote"}, "Loader(host=)", "one of 'process', 'thread'", "'remote'", "choose one"),
    ({"end": "wrap"}, "Loader(end=)", "one of 'drop', 'pad', 'repeat', 'error'", "'wrap'", "choose one"),
    ({"end": "repeat", "batch": Pack(8)}, "Loader(end='repeat')", "FixedBatch", "Pack", "use end='pad' or 'drop'"),
    ({"end_timeout_s": None}, "Loader(end_timeout_s=)", "a positive number of seconds", "None", "give a large one"),
    ({"buffer_size": 0}, "Loader(buffer_size=)", "an int of at least 1", "0", "allow at least one record"),
    ({"prefetch_batches": 0}, "Loader(prefetch_batches=)", "an int of at least 1", "0", "allow at least one batch"),
    ({"memory_limit": "2 potatoes"}, "Loader(memory_limit=)", "a positive number of bytes", "'2 potatoes'", "give a size"),
    ({"memory_limit": 0}, "Loader(memory_limit=)", "a positive number of bytes", "0", "give a size"),
    ({"epochs": 0}, "Loader(epochs=)", "an int of at least 1", "0", "None to run without end"),
    ({"seed": -1}, "Loader(seed=)", "an int of at least 0", "-1", "non-negative"),
    ({"seed": "1"}, "Loader(seed=)", "an int of at least 0", "'1'", "non-negative"),
    ({"timeout_s": 0}, "Loader(timeout_s=)", "a positive number of seconds", "0", "leave it out"),
    ({"timeout_s": 3, "workers": 0}, "Loader(timeout_s=)", "only they can be killed", "pool='inline'", "use pool='process' and workers"),
    ({"timeout_s": 3, "pool": "thread", "workers": 1}, "Loader(timeout_s=)", "worker processes", "pool='thread'", "leave it out"),
    ({"stall_timeout_s": -1}, "Loader(stall_timeout_s=)", "a positive number of seconds", "-1", "leave it out"),
    ({"max_restarts_per_minute": -1}, "Loader(max_restarts_per_minute=)", "0 or more", "-1", "use 0"),
    ({"on_error": "ignore"}, "Loader(on_error=)", "'raise', Retry(...), Quarantine(...)", "'ignore'", "choose one"),
    ({"on_error": {"OSError": Retry(1)}}, "Loader(on_error=)", "exception classes as keys", "'OSError'", "use e.g."),
    ({"shuffle": 1024}, "Loader(shuffle=)", "a Shuffle, or None", "1024", "pass e.g. shuffle=Shuffle(window=8192)"),
    ({"preprocess_batch_size": 8}, "Loader(preprocess_batch_size=)", "not in this version yet", "8", "leave it out"),
    ({"source": 42}, "Loader(source)", "", "int", ""),
    ({"source": {"a": 1}}, "Loader(source)", "", "dict", ""),
    ({"source": "s3://bucket/data"}, "Loader(source)", "", "s3://", ""),
    ({"source": numbers(), "workers": 1}, "Loader(source)", "something that can move to another process", "generator", "host='thread'"),
    ({"preprocess": closes_over_a_lock, "workers": 1}, "Loader(preprocess=)", "something that can move", "closes_over_a_lock", "workers=0"),
    ({"collate": Unmovable(), "workers": 1}, "Loader(collate=)", "something that can move", "Unmovable", "host='thread'"),
]


@pytest.mark.parametrize(("options", "where", "expected", "got", "do"), WRONG, ids=[f"{next(iter(case[0]))}-{case[3]}" for case in WRONG])
def test_a_wrong_argument_of_the_loader(options: dict[str, Any], where: str, expected: str, got: str, do: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(where)}") as caught:
        loader(**options)
    message = str(caught.value)
    assert re.search(r"expected .+, got .+; .+\.$", message, re.DOTALL), "where: expected X, got Y; do Z."
    for part in (expected, got, do):
        assert part in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedBatch(0), r"FixedBatch\(batch_size=.*expected .*, got 0; "),
        (lambda: Pack(0), r"Pack\(seq_len=.*expected .*, got 0; "),
        (lambda: Pack(8, strategy="tetris"), r"Pack\(strategy=.*expected .*'greedy'.*, got 'tetris'; "),  # type: ignore[arg-type]
        (lambda: Pack(8, overflow="wrap"), r"Pack\(overflow=.*expected .*, got 'wrap'; "),  # type: ignore[arg-type]
        (lambda: Retry(0), r"Retry\(num_retries\): expected at least 1, got 0; "),
        (lambda: Quarantine(max_fraction=2), r"Quarantine\(max_fraction=\): expected a share from 0 to 1.*, got 2; "),
        (lambda: Mesh(dp_rank=2, dp_size=2), r"Mesh\(.*expected .*, got 2; "),
        (lambda: Mesh.from_env({"RANK": "0"}), r"Mesh.from_env.*expected .*, got .*; "),
        (lambda: TextFiles("/no/such/folder"), r"expected .*, got .*/no/such/folder.*; "),
        (lambda: JsonLines([]), r"expected .*, got .*; "),
    ],
)
def test_a_wrong_option(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_state_of_another_configuration_names_every_difference() -> None:
    state = loader(seed=1, preprocess=closes_over_a_lock).state_dict()
    with pytest.raises(ResumeError) as caught:
        Loader(range(12), batch=Pack(8), collate=PretrainCollator(), workers=0, seed=2).load_state_dict(state)
    assert {what.partition(".")[0] for what, _, _ in caught.value.differences} == {"source", "batch", "collate", "preprocess", "seed"}
    assert "seed: expected 2 (this loader), got 1 (the state)" in str(caught.value)
    assert "resume with the configuration that saved it" in str(caught.value)


@pytest.mark.parametrize(
    "state", [None, {}, {"version": 1}, "text", {**loader().state_dict(), "version": 99}, {**loader().state_dict(), "lanes": {}}]
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ResumeError, match="the state does not belong to this loader"):
        loader().load_state_dict(state)


def test_a_state_of_other_lanes_or_ranks_is_refused() -> None:
    state = loader(lanes=2).state_dict()
    with pytest.raises(ResumeError, match=r"num_lanes: expected 4 \(this loader\), got 2 \(the state\)"):
        loader(lanes=4).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"dp_rank: expected 1 \(this loader\), got 0 \(the state\)"):
        loader(mesh=Mesh(dp_rank=1, dp_size=2)).load_state_dict(loader(mesh=Mesh(dp_rank=0, dp_size=2)).state_dict())


def test_a_difference_can_be_accepted_by_name() -> None:
    state = loader(seed=1).state_dict()
    with loader(seed=2) as other:
        other.load_state_dict(state, accept=["seed"])
        assert [batch["x"].tolist() for batch in other] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
