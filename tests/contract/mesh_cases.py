"""What test_contract_mesh.py looks at: four real ranks, two data-parallel times two tensor-parallel. Run as
`python -m tests.contract.mesh_cases results.json`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler, RandomSampler

from aioloader import (
    AioLoaderError,
    AlreadySharded,
    DistributedDataLoader,
    FixedBatch,
    Loader,
    Mesh,
    Pack,
    PretrainCollator,
    Quarantine,
    Shuffle,
)
from tests.contract.cases import INLINE, PROCESSES, THREADS, Options
from tests.contract.mesh_work import (
    Lengths,
    by_global_rank,
    collate,
    fails_and_says_so,
    keep,
    plain,
    tokens,
    unseeded,
    with_long_text,
    with_reader,
)
from tests.contract.uneven import NUM_LANES, NUM_RECORDS, as_field, fails_at_20
from tests.training.ranks import Store, run_ranks

LAYOUT = {"dp": 2, "tp": 2}
HOSTS: dict[str, Options] = {"inline": INLINE, "threads": {**THREADS, "workers": 1}, "processes": {**PROCESSES, "workers": 1}}


def here() -> Mesh:
    return Mesh.from_layout(dist.get_rank(), LAYOUT)


def make(source: Any = None, **options: Any) -> Loader:
    defaults = {"preprocess": with_reader, "batch": FixedBatch(2), "collate": collate, "lanes": NUM_LANES, "check_every": 1}
    defaults["mesh"] = options["mesh"] if "mesh" in options else here()
    return Loader(range(NUM_RECORDS) if source is None else source, **{**defaults, **HOSTS["threads"], **options})


def entry_of(batch: Any) -> list[Any]:
    shapes = {name: list(value.shape) if hasattr(value, "shape") else len(value) for name, value in batch.items() if value is not None}
    samples = [[sample.row, sample.seq, sample.sub, sample.epoch] for sample in batch.samples]
    values = [batch[name].tolist() for name in ("labels", "x", "reader") if name in batch]
    return [batch.step, batch.lane, batch.is_filler, batch.num_tokens, shapes, samples, values]


def passes(loader: Loader, number: int = 2) -> dict[str, Any]:
    """Return what some passes deliver, with the states in between, and the error if one ends in it."""
    found: dict[str, Any] = {"batches": [], "states": [], "error": None}
    with loader:
        for _ in range(number):
            batches: list[Any] = []
            found["batches"].append(batches)
            try:
                for batch in loader:
                    batches.append(entry_of(batch))
                    if len(batches) in (1, 4):
                        found["states"].append(loader.state_dict())
            except AioLoaderError as error:
                found["error"] = {"kind": type(error).__name__, "text": str(error), "missing": list(getattr(error, "missing", ()))}
                break
            found["states"].append(loader.state_dict())
    return found


def read_by_one(rank: int) -> dict[str, Any]:
    found = {
        f"{end} {host}": passes(make(read="group", end=end, **HOSTS[host]))
        for end, host in (("drop", "inline"), ("drop", "threads"), ("drop", "processes"), ("pad", "threads"))
    }
    found["long text"] = passes(make(read="group", collate=with_long_text), 1)
    found["no filter"] = passes(make(read="group", preprocess=keep))
    found["failing"] = passes(make(read="group", preprocess=fails_at_20, collate=as_field))
    found["resumed"] = passes(resumed(found["drop threads"]["states"][1], read="group"))
    found["resumed apart"] = passes(resumed(found["drop threads"]["states"][1], read="all", check_every=None))
    found["async"] = asyncio.run(consumed_async())
    return found


def resumed(state: Any, **options: Any) -> Loader:
    loader = make(**options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


async def consumed_async() -> Any:
    async with make(read="group") as loader:
        return {"batches": [[entry_of(batch) async for batch in loader]]}


def left_early(rank: int) -> list[Any]:
    """Loops that all ranks leave, some later than others, and a whole pass after them."""
    found = []
    with make(read="group", preprocess=keep) as loader:
        for length in (3, 5):
            found.append([entry_of(batch) for batch in itertools.islice(loader, length)])
        found.append([entry_of(batch) for batch in loader])
    return found


def reader_leaves(rank: int) -> Any:
    with make(read="group", preprocess=keep, check_every=None) as loader:
        if here().peer_rank == 0:
            for _ in itertools.islice(loader, 3):
                pass
            dist.barrier()
            return None
        found = passes(loader, 1)
        dist.barrier()
        return found


def drawn_by(seed: int) -> list[int]:
    """Return an order that the global rank decides, as that of a sampler seeded with it."""
    return random.Random(seed).sample(range(NUM_RECORDS), NUM_RECORDS)


def sampled(sampler: Any) -> Any:
    return DistributedDataLoader(list(range(NUM_RECORDS)), here(), 2, collator=as_field, sampler=sampler, check_every=1)


def torch_sampler() -> Any:
    return DistributedSampler(range(NUM_RECORDS), num_replicas=here().dp_size, rank=here().dp_rank)  # type: ignore[arg-type]


def misfits(rank: int) -> dict[str, Any]:
    state = passes(make(preprocess=plain), 1)["states"][1]
    return {
        "fits": passes(make(preprocess=plain)),
        "packed": passes(make(preprocess=tokens, batch=Pack(32, rows=1), collate=PretrainCollator()), 1),
        "seed": passes(make(preprocess=plain, seed=int(rank == 3))),
        "batch": passes(make(preprocess=plain, batch=FixedBatch(2 + rank % 2))),
        "resumed on some": passes(make(preprocess=plain) if rank else resumed(state, preprocess=plain)),
        "same coordinate": passes(make(preprocess=plain, mesh=Mesh(dp_rank=0, dp_size=2, tp_rank=rank % 2, tp_size=2))),
        "lanes": passes(make(preprocess=plain, lanes=NUM_LANES if rank else 2 * NUM_LANES)),
        "by global rank": passes(make(preprocess=by_global_rank)),
        "samples": passes(make(preprocess=Lengths())),
        "unseeded": passes(make(preprocess=unseeded)),
        "sampler": passes(sampled(drawn_by(rank))),
        "split sampler": passes(sampled(AlreadySharded(drawn_by(rank)))),
        "sampler that fits": passes(sampled(RandomSampler(range(NUM_RECORDS)))),
        "split sampler that fits": passes(sampled(torch_sampler())),
        "own mesh": passes(make(preprocess=plain, lanes=12, mesh=Mesh(dp_rank=rank, dp_size=4) if rank else here())),
        "unseeded, not checked": passes(make(preprocess=unseeded, check_every=None), 1),
        "alone": passes(make(mesh=Mesh(), seed=rank, preprocess=plain), 1),
    }


def quarantined(rank: int, store: Store) -> Any:
    """Return the state after a pass; of three passes, and two of a loader resumed after the first, the rows and what had failed by then."""
    options: Options = {"preprocess": fails_and_says_so, "shuffle": Shuffle(window=64), "on_error": Quarantine(), **HOSTS["processes"]}
    options |= {"read": "group", "lanes": 2, "end": "pad"}
    calls, failed = Path(os.environ["CALLS"]), []

    def note(loader: Loader) -> None:
        dist.barrier()
        rows = sorted(sample.row for batch in loader for sample in batch.samples)
        dist.barrier()
        failed.append([rows, sorted(map(int, calls.read_text().split()))])

    with make(**options) as loader:
        note(loader)
        state = loader.state_dict()
        note(loader)
        note(loader)
    with resumed(state, **options) as loader:
        note(loader)
        note(loader)
    return [state, failed]


def reader_is_killed(rank: int, store: Store) -> None:
    """The reader of the second group is killed; its peer, and the other group, write down what they notice."""
    loader = make(read="group", end_timeout_s=3.0)
    if rank != 2:
        started = time.perf_counter()
        found = passes(loader)
        found["seconds"] = time.perf_counter() - started
        Path(os.environ["KILLED_RESULTS"] + str(rank)).write_text(json.dumps(found))
        os._exit(0)  # the process group cannot be left in order any more
    for _ in itertools.islice(loader, 4):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def of_four(rank: int, store: Store) -> dict[str, Any]:
    return {
        "read by one": read_by_one(rank),
        "left early": left_early(rank),
        "reader leaves": reader_leaves(rank),
        "misfits": misfits(rank),
    }


def main(path: str) -> None:
    results: dict[str, Any] = {"four": run_ranks(4, of_four)}
    os.environ |= {"CALLS": path + ".calls"}
    results["quarantined"] = run_ranks(4, quarantined)
    os.environ |= {"KILLED_RESULTS": path + ".killed"}
    with suppress(AssertionError):  # one of them does not end well
        run_ranks(4, reader_is_killed)
    results["killed"] = {rank: json.loads(Path(f"{path}.killed{rank}").read_text()) for rank in (0, 1, 3)}
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
