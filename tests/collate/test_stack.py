"""StackCollator: stacks what has one shape, the same from columns as from samples, and says which sample differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioloader import BatchError, StackCollator
from aioloader.pools.transport import decode, encode_samples, write
from aioloader.sequences import Rows, columns_of

COLLATE = StackCollator()


def in_columns(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the samples as they arrive from a worker process."""
    encoded = encode_samples(samples)
    memory = memoryview(bytearray(encoded.nbytes))
    write(encoded, memory)
    columns = columns_of(decode(encoded.sizes, memory))
    assert columns is not None
    return columns


def joined(value: Any) -> Any:
    if not isinstance(value, Rows):
        return value
    return value.joined() if value.torch_dtype is None else torch.from_numpy(value.joined())


SAMPLES: list[dict[str, Any]] = [
    {
        "image": np.full((2, 3), number, np.float32),
        "tensor": torch.full((2,), number),
        "label": number,
        "score": number / 2,
        "flag": number % 2 == 0,
        "scalar": np.int16(number),
        "zero_d": np.array(number),
        "text": f"t{number}",
        "nothing": None,
    }
    for number in range(5)
]


@pytest.mark.parametrize("collate", [COLLATE, lambda samples: COLLATE.collate_columns(in_columns(samples))], ids=["samples", "columns"])
def test_what_is_of_one_shape_is_stacked(collate: Any) -> None:
    batch = {name: joined(value) for name, value in collate(SAMPLES).items()}
    assert list(batch) == list(SAMPLES[0])
    assert (batch["image"].dtype, batch["image"].shape) == (np.float32, (5, 2, 3))
    assert batch["image"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(batch["tensor"], torch.arange(5)[:, None].expand(5, 2))
    assert (batch["label"].tolist(), batch["label"].dtype) == ([0, 1, 2, 3, 4], np.int64)
    assert batch["score"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert (batch["flag"].tolist(), batch["flag"].dtype) == ([True, False, True, False, True], np.bool_)
    assert batch["scalar"].dtype == np.int16
    assert batch["zero_d"].tolist() == [0, 1, 2, 3, 4]
    assert batch["text"] == ["t0", "t1", "t2", "t3", "t4"]
    assert batch["nothing"] == [None] * 5


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "expected at least one sample, got none"),
        ([np.zeros(3)], "expected samples that are dicts, got ndarray"),
        ([{"x": 1}, {"y": 1}], r"expected fields \['x'\] as in the batch's first sample, got fields \['y'\] in sample 1"),
        ([{"x": 1}, 7], r"got int in sample 1"),
        (
            [{"x": np.zeros(2)}, {"x": np.zeros(3)}],
            r"StackCollator\['x'\]: expected ndarray float64\[2\].* got ndarray float64\[3\] in sample 1",
        ),
        ([{"x": np.zeros(2)}, {"x": np.zeros(2, np.int8)}], r"got ndarray int8\[2\] in sample 1; make the shapes equal"),
        ([{"x": np.zeros(2)}, {"x": None}], r"got NoneType in sample 1"),
        ([{"x": torch.zeros(2)}, {"x": np.zeros(2, np.float32)}], r"expected Tensor torch.float32\[2\]"),
    ],
)
def test_what_differs_is_named(samples: list[Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        COLLATE(samples)


def test_rows_of_several_lengths_are_refused_in_columns_too() -> None:
    with pytest.raises(BatchError, match=r"make the shapes equal in preprocess"):
        COLLATE.collate_columns(in_columns([{"x": np.zeros(length)} for length in (2, 3, 2)]))
