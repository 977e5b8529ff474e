"""What test_contract_end.py looks at: real ranks that come to unequal ends. Run as `python -m tests.contract.end_cases results.json`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aioloader import AioLoaderError, FixedBatch, Loader, Mesh, Trainer
from tests.contract.cases import INLINE, PROCESSES, THREADS, Options
from tests.contract.uneven import NUM_LANES, NUM_RECORDS, as_field, fails_at_20, tokens, uneven, uneven_slowly
from tests.training.ranks import Store, run_ranks

HOSTS: dict[str, Options] = {"inline": INLINE, "threads": {**THREADS, "workers": 1}, "processes": {**PROCESSES, "workers": 1}}


class Lines:
    """A stream: nobody knows how long it is."""

    def __iter__(self) -> Any:
        return iter(range(NUM_RECORDS))


def make(mesh: Mesh, **options: Any) -> Loader:
    defaults = {"preprocess": uneven, "batch": FixedBatch(2), "collate": as_field, "lanes": NUM_LANES, **THREADS, "workers": 1}
    source = options.pop("source", range(NUM_RECORDS))
    return Loader(source, mesh=mesh, **{**defaults, **options})


def entry_of(batch: Any) -> list[Any]:
    return [batch.step, batch.lane, batch["labels"].tolist(), batch["x"].tolist(), batch["name"], batch.is_filler]


def entries(batches: Any) -> list[Any]:
    return [entry_of(batch) for batch in batches]


def here() -> Mesh:
    return Mesh(dp_rank=dist.get_rank(), dp_size=dist.get_world_size())


def whole_passes(end: str, **options: Any) -> dict[str, Any]:
    """Two passes of one loader: what they deliver, or the error, with counts and the steps that the lanes stand at."""
    found: dict[str, Any] = {"passes": [], "error": None, "steps": [], "counts": []}
    with make(here(), end=end, **options) as loader:
        for _ in range(2):
            batches: list[Any] = []
            found["passes"].append(batches)
            try:
                for batch in loader:
                    batches.append(entry_of(batch))
            except AioLoaderError as error:
                found["error"] = f"{type(error).__name__}: {error}"
                break
            state = loader.state_dict()
            found["steps"].append([state["lanes"][str(lane)]["step"] for lane in range(loader.num_lanes) if str(lane) in state["lanes"]])
            found["counts"].append(loader.stats()["records"])
    return found


def resumed(end: str) -> list[dict[str, Any]]:
    """For some steps: the state after it, and what a new loader delivers from there; at the end of a pass that is the next one."""
    found = []
    with make(here(), end=end) as loader:
        states = [batch.state() for batch in loader]
    for at in (3, len(states) // 2, len(states) - 1):  # whole steps and begun ones
        with make(here(), end=end) as loader:
            loader.load_state_dict(json.loads(json.dumps(states[at])))
            found.append({"state": states[at], "rest": entries(loader), "after": loader.state_dict()})
    return found


def resumed_from(end: str, states: list[Any]) -> list[Any]:
    """What this rank delivers from merged states of another number of ranks."""
    found = []
    for state in states:
        with make(here(), end=end) as loader:
            loader.load_state_dict(state)
            found.append(entries(loader))
    return found


def left_early() -> list[Any]:
    """Passes that are left, begun again, and mixed with those of another loader."""
    found = []
    with make(here()) as loader, make(here(), end="pad") as other:
        for _ in range(2):
            found.append(entries(itertools.islice(loader, 5)))
        pairs = list(zip(loader, other, strict=False))
        found.append(entries(pair[0] for pair in pairs))
        found.append(entries(pair[1] for pair in pairs))
        found.append(entries(loader))
    return found


def consumed_async(slow: bool) -> dict[str, Any]:
    """A consumer whose loop must stay free while another rank takes its time."""
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.perf_counter() - started)

    async def consume() -> list[Any]:
        found, ticking = [], asyncio.ensure_future(tick())
        with make(here(), source=range(120)) as loader:
            async for batch in loader:
                found.append(entry_of(batch))
                if slow:
                    time.sleep(0.03)  # noqa: ASYNC251 - a training step blocks
        waits = loader.stats()["waits"]
        ticking.cancel()
        return [found, waits]

    found, waits = asyncio.run(consume())
    return {"batches": found, "longest_s": longest_s, "waits": waits}


def error_of(loader: Loader, **options: Any) -> dict[str, Any]:
    started, num_batches = time.perf_counter(), 0
    try:
        for _ in loader:
            num_batches += 1
            started = time.perf_counter()
    except AioLoaderError as error:
        kind, missing = type(error).__name__, getattr(error, "missing", None)
        return {"kind": kind, "text": str(error), "missing": missing, "waited_s": time.perf_counter() - started, "num_batches": num_batches}
    return {"kind": None}


def failing() -> dict[str, Any]:
    """Record 20 is in lane 2."""
    with make(here(), preprocess=fails_at_20) as loader:
        return error_of(loader)


def absent(rank: int, store: Store) -> dict[str, Any]:
    """Rank 1 stays away after two steps, alive, until the others have noticed."""
    with make(here(), end_timeout_s=2.0, prefetch_batches=2) as loader:
        if rank != 1:
            found = error_of(loader)
            store.set(f"noticed {rank}", "yes")
            return found
        batches = iter(loader)
        for _ in itertools.islice(batches, 2 * NUM_LANES // 3):
            pass
        store.wait(["noticed 0", "noticed 2"])
        with suppress(AioLoaderError):
            next(batches)
    return {}


def trained(end: str) -> dict[str, Any]:
    import torch

    from aioloader import PretrainCollator, StepReport
    from tests.training.fake_loader import TinyModel

    torch.set_num_threads(1)
    model, reports = TinyModel(), list[StepReport]()
    mesh = Mesh.from_env()
    loader = Loader(range(NUM_RECORDS), preprocess=tokens, batch=FixedBatch(2), collate=Placed(PretrainCollator()), lanes=NUM_LANES,
                    end=end, mesh=mesh, **{**THREADS, "workers": 1})  # fmt: skip
    result = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, max_steps=1000, on_step=reports.append).train()
    return {
        "stopped_by": result.stopped_by,
        "losses": [report.loss for report in reports],
        "targets": [report.num_targets for report in reports],
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
    }


class Placed:
    """Adds the places of tokens, which the model wants."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, samples: list[Any]) -> Any:
        import numpy as np

        fields = {name: value for name, value in self._inner(samples).items() if name != "attention_mask"}
        fields["position_ids"] = np.broadcast_to(np.arange(5), fields["input_ids"].shape).copy()
        return fields


def never_there(rank: int, store: Store) -> dict[str, Any]:
    """Rank 2 does not come to its first pass."""
    if rank == 2:
        store.wait(["missed 0", "missed 1"])
        return {}
    with make(here(), end_timeout_s=0.5) as loader:
        found = error_of(loader)
    store.set(f"missed {rank}", "yes")
    return found


def of_two(rank: int, store: Store) -> dict[str, Any]:
    ends = ("drop", "pad", "error")
    return {
        "whole": {
            f"{end} {host}": whole_passes(end, **HOSTS[host]) for end in ends for host in HOSTS if end == "drop" or host != "processes"
        },
        "stream": {end: whole_passes(end, source=Lines()) for end in ends},
        "one to one": {end: whole_passes(end, preprocess=None) for end in ("drop", "repeat", "error")},
        "not one to one": whole_passes("repeat"),
        "resumed": {end: resumed(end) for end in ("drop", "pad")},
        "left early": left_early(),
        "async": consumed_async(slow=rank == 1),
        "slow": whole_passes("drop", preprocess=uneven_slowly if rank else uneven, source=range(60)),
        "failing": failing(),
        "trained": {end: trained(end) for end in ("drop", "pad")},
    }


def of_three(rank: int, store: Store) -> dict[str, Any]:
    states = json.loads(Path(os.environ["MERGED_STATES"]).read_text())
    return {
        "whole": {end: whole_passes(end) for end in ("drop", "pad", "error")},
        "resumed": {end: resumed_from(end, states[end]) for end in ("drop", "pad")},
        "failing": failing(),
        "absent": absent(rank, store),
        "never there": never_there(rank, store),
    }


def killed(rank: int, store: Store) -> None:
    """Rank 2 is killed in the middle of a pass; the others write down what they notice."""
    with make(here(), end_timeout_s=3.0, prefetch_batches=2) as loader:
        if rank < 2:
            Path(os.environ["KILLED_RESULTS"] + str(rank)).write_text(json.dumps(error_of(loader)))
            return
        for _ in itertools.islice(loader, 4):
            pass
        os.kill(os.getpid(), signal.SIGKILL)


def main(path: str) -> None:
    from aioloader.state import merge

    results: dict[str, Any] = {"two": run_ranks(2, of_two)}
    parts = {end: [rank["resumed"][end] for rank in results["two"]] for end in ("drop", "pad")}
    states = {end: [merge([rank[at]["state"] for rank in ranks]) for at in range(3)] for end, ranks in parts.items()}
    Path(path + ".states").write_text(json.dumps(states))
    os.environ |= {"MERGED_STATES": path + ".states", "KILLED_RESULTS": path + ".killed"}
    results["states"] = states
    results["three"] = run_ranks(3, of_three)
    with suppress(AssertionError):  # one of them does not end well
        run_ranks(3, killed)
    results["killed"] = [json.loads(Path(f"{path}.killed{rank}").read_text()) for rank in range(2)]
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
