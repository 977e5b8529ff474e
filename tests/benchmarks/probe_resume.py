"""From making a loader to its first batch: resumed at a record of `ShardedNumbers`, or from the beginning.

The state at the record is written down, not run up to.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.sharded_work import Shards
from tests.benchmarks.task import Measurement
from tests.benchmarks.work import Work

__all__ = ["measure"]


def measure(feed: Feed, work: Work, first: int, digest: Digest) -> Measurement:
    """Note when the first batch came, and read `work.num_records`.

    Summed up is where in the order each number stands, counted from record `first`: the same from everywhere, if all is well.
    """
    import torch

    made_at_s = time.monotonic()
    batches: list[list[int]] = []
    arrivals_s: list[float] = []
    with feed as loader:
        if first:
            _resume(loader, first, work.batch_size)
        for batch in loader:
            arrivals_s.append(time.monotonic())
            batches.append(batch["number"].tolist())
            if len(batches) * work.batch_size >= work.num_records:
                break
    shards = Shards()
    for numbers in batches:
        digest.add({"position": torch.tensor([shards.position(number) - first for number in numbers])})
    return Measurement(
        numbers={"first_batch_ms": (arrivals_s[0] - made_at_s) * 1e3},
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=arrivals_s[0],
        last_at_s=arrivals_s[-1],
    )


def _resume(loader: Any, record: int, batch_size: int) -> None:
    state = json.loads(json.dumps(loader.state_dict()))
    state["source"].update(position=record, cursor=record)
    state["lanes"]["0"].update(seq=record, step=record // batch_size)
    loader.load_state_dict(state)
