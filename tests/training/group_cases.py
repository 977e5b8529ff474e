"""What test_broadcast.py looks at: a broadcast, and a roll call. Run as `python -m tests.training.group_cases results.json`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.groups.roll_call import RollCall
from tests.training.gradient_cases import Weights, refusal
from tests.training.ranks import Store, run_ranks


def buffers(rank: int) -> dict[str, Tensor]:
    value = rank + 1
    return {
        "with gaps": torch.full((4, 6), float(value))[:, ::2],
        "expanded": torch.full((1, 3), float(value)).expand(4, 3),
        "one, expanded": torch.full((1,), float(value)).expand(4),
        "transposed": torch.full((2, 3), float(value)).t(),
        "channels last": torch.full((2, 3, 4, 4), float(value)).contiguous(memory_format=torch.channels_last),
        "number": torch.tensor(value),
        "empty": torch.zeros(0, 3),
        "bool": torch.full((3,), rank == 0),
        "int16": torch.full((3,), value, dtype=torch.int16),
        "float8": torch.full((3,), float(value)).to(torch.float8_e4m3fn),
        "complex": torch.full((3,), complex(value, value)),
    }


def any_layout(rank: int) -> Any:
    model, strides = Weights(p=1), {}
    for name, buffer in buffers(rank).items():
        model.register_buffer(name, buffer)
        strides[name] = buffer.stride()
    GradientSynchronizer(model).broadcast_model()
    expected = buffers(0)
    return {
        name: torch.equal(buffer.float() if name == "float8" else buffer, expected[name].float() if name == "float8" else expected[name])
        and buffer.stride() == strides[name]
        for name, buffer in model.named_buffers()
    }


def other_frozen_part(rank: int) -> Any:
    model = Weights(p=1)
    model.frozen = nn.Linear(2 + rank, 2).requires_grad_(False)
    return refusal(GradientSynchronizer(model).broadcast_model)


def roll_call_in_time(rank: int) -> Any:
    """Rank 1 calls the roll while rank 0 waits for it in a collective, hears from rank 0, signs twice more, and comes after all."""
    group, polls = DataParallelGroup.resolve(timeout_s=20.0), itertools.count()
    roll_call = RollCall([0, 1], rank)
    if rank == 1:
        roll_call.hold("elsewhere", time.monotonic() + 20.0, lambda missing: not missing and next(polls) > 2)
    group.reduce_numbers([1.0], "counts")
    group.reduce_numbers([1.0], "both are through")
    return roll_call.is_open


def two_ranks(rank: int, store: Store) -> Any:
    return {case.__name__: case(rank) for case in (any_layout, other_frozen_part, roll_call_in_time)}


def main(path: str) -> None:
    Path(path).write_text(json.dumps(run_ranks(2, two_ranks)))


if __name__ == "__main__":
    main(sys.argv[1])
