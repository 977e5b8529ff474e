"""A mixture with a ramp, packed by best fit, stopped on 4 ranks and continued on 2: the global batches are those of one run on 1 rank.

    python examples/elastic.py

Ranks are played one after another, so no launcher is needed; under torchrun each of them is a process with `Mesh.from_env()`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from aioloader import Loader, Mesh, Mixture, Pack, PretrainCollator, Ramp, Shuffle
from aioloader.state import describe, merge

LANES = 4
CODE = [{"text": f"def f{number}(x): return x + {number}" * (1 + number % 7)} for number in range(400)]
WEB = [{"text": f"page {number} says hello " * (1 + number % 5)} for number in range(900)]


def tokenize(record: dict[str, str]) -> dict[str, Any]:
    """Return bytes as tokens."""
    return {"input_ids": list(record["text"].encode())}


def loader(dp_rank: int, dp_size: int) -> Loader:
    """Return the loader of one rank: nothing but the mesh differs."""
    mixture = Mixture(
        {"code": (CODE, 0.2), "web": (WEB, 0.8)},
        schedule=Ramp([(0, {"code": 0.2, "web": 0.8}), (600, {"code": 0.6, "web": 0.4})]),
    )
    return Loader(
        mixture,
        preprocess=tokenize,
        batch=Pack(512, rows=2, strategy="best_fit"),
        collate=PretrainCollator(),
        shuffle=Shuffle(seed=1),
        lanes=LANES,
        mesh=Mesh(dp_rank=dp_rank, dp_size=dp_size),
        workers=0,
    )


def play(dp_size: int, num_steps: int, state: Any = None) -> tuple[list[Any], Any]:
    """Return what all ranks deliver in some steps, and one state for all of them."""
    delivered, states = [], []
    for dp_rank in range(dp_size):
        with loader(dp_rank, dp_size) as one:
            if state is not None:
                one.load_state_dict(state)
            batches = iter(one)
            for batch in itertools.islice(batches, num_steps * LANES // dp_size):
                delivered.append((batch.step, batch.lane, batch["input_ids"].tolist(), batch["document_ids"].tolist()))
            states.append(batches.state())
    return sorted(delivered), merge(states)


def main() -> None:
    """Compare an uninterrupted run with one that changes its number of ranks, and make one batch again."""
    whole, _ = play(1, 9)
    first, state = play(4, 5)
    second, _ = play(2, 4, json.loads(json.dumps(state)))  # through a file, say
    print(describe(state))
    with loader(0, 1) as replayer:
        again = replayer.replay(step=7, lane=3, state=state)
    same = first + second == whole and again["input_ids"].tolist() == whole[7 * LANES + 3][2]
    print(f"elastic: {len(whole)} micro-batches on 1 rank, and on 4 and then 2 ranks: {'equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
