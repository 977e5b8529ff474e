"""What test_contract_peers.py looks at, on the ranks of mesh_cases.py. Run as `python -m tests.contract.peer_cases results.json`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aioloader import AioLoaderError, AlreadySharded, IterableSource, Loader, Mesh
from aioloader.dropin.distributed_loader import DistributedDataLoader
from tests.contract.mesh_cases import here, make
from tests.contract.mesh_work import Part, fails_where_told, slowly
from tests.contract.uneven import NUM_RECORDS, as_field, uneven
from tests.training.ranks import Store, run_ranks


def numbers(loader: Loader, length: int | None = None) -> list[list[int]]:
    return [[] if batch.is_filler else batch["labels"].tolist() for batch in itertools.islice(loader, length)]


def of(source: Any = None, **options: Any) -> Loader:
    return make(source, **{"preprocess": uneven, "collate": as_field, **options})


def or_error(loader: Loader) -> Any:
    try:
        return numbers(loader)
    except AioLoaderError as error:
        return f"{type(error).__name__}: {error}"


def begun_again(rank: int) -> list[Any]:
    """A loop that fails on some ranks, and is begun again on all."""
    os.environ["BAD_RECORD"] = "20"
    with of(preprocess=fails_where_told, check_every=100) as loader:
        failed = or_error(loader)
        del os.environ["BAD_RECORD"]
        return [failed, or_error(loader)]


def left_apart(rank: int) -> list[Any]:
    """A loop that some ranks leave for the next one, and others would go on with."""
    with of(check_every=1) as loader:
        return [numbers(loader, 9) if rank < 2 else or_error(loader), or_error(loader)]


def in_turns(rank: int) -> list[Any]:
    """Two loaders: one is left open while the other goes through passes of its own."""
    with of(read="group") as one, of(range(1000, 1000 + NUM_RECORDS), read="group", end="pad") as other:
        first = iter(one)
        head = [batch["labels"].tolist() for batch in itertools.islice(first, 3)]
        between = [numbers(other, 2), numbers(other)]
        return [head + [batch["labels"].tolist() for batch in first], *between]


def given_up(rank: int) -> list[Any]:
    """A loop in which peers wait in vain for a while, and a whole pass after it; the deadline is younger than the machine."""
    with of(read="group", preprocess=slowly, end_timeout_s=30.0, prefetch_batches=1) as loader:
        asyncio.run(until_it_takes_long(loader))
        dist.barrier()
        os.environ["QUICKLY"] = "1"
        return numbers(loader)


async def until_it_takes_long(loader: Loader) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            async for _ in loader:
                pass


def from_own_states(rank: int) -> list[Any]:
    """Peers that read ahead differently far."""
    options: dict[str, Any] = {"workers": 3, "buffer_size": 64} if rank % 2 else {"workers": 1, "buffer_size": 6}
    with of(**options) as loader:
        first = numbers(loader, 4)
        state = json.loads(json.dumps(loader.state_dict()))
    with of(**options) as loader:
        loader.load_state_dict(state)
        return [first, or_error(loader)]


def one_name(rank: int) -> list[Any]:
    """Records of different ranks that have one name: of sources that are split already, and of a tail that is filled up."""
    part = AlreadySharded(IterableSource(Part(here().dp_rank), name="part"))
    few = DistributedDataLoader(range(3), here(), 2, collator=as_field, tail="pad", check_every=1)
    with of(part, preprocess=None) as split, few:
        return [or_error(split), or_error(few.loader)]


def played(rank: int) -> list[Any]:
    """Ranks of a mesh that is larger than the job, one after another."""
    found = []
    for dp_rank in (rank, rank + 4):
        with of(mesh=Mesh(dp_rank=dp_rank, dp_size=8), lanes=8, end="pad") as loader:
            found.append(numbers(loader))
    return found


def never_closed(rank: int) -> list[int]:
    """The descriptors that are open after loops of loaders that nobody closes."""
    found = []
    for _ in range(6):
        numbers(of(read="group", check_every=100))
        gc.collect()
        dist.barrier()
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    return found


CASES = (begun_again, left_apart, in_turns, given_up, from_own_states, one_name, played, never_closed)


def of_four(rank: int, store: Store) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


def main(path: str) -> None:
    Path(path).write_text(json.dumps(run_ranks(4, of_four)))


if __name__ == "__main__":
    main(sys.argv[1])
