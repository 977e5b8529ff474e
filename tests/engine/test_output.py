"""Collated micro-batches: counts, provenance, arrays of every kind, and failures in their place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest

from aioloader.engine.assembler import Turn
from aioloader.engine.lane import LaneBatch
from aioloader.engine.output import Ready, TensorArray, collate, to_arrays
from aioloader.errors import BatchError, ConfigError
from aioloader.protocols import Group, Item
from tests.naming import stable_repr

STATE = {"some": "state"}


def run(collator: Callable[[list[Any]], Any]) -> Ready:
    items = [Item([1, 2], 4, 0, ("shard", 8)), Item([3, 4], 4, 1, ("shard", 8)), Item([5, 6], 5, 0, ("shard", 10))]
    group = Group([item.sample for item in items], items)
    batch = LaneBatch(lane=3, step=7, epoch=2, group=group, state={}, num_records=2, num_samples=3, oldest_seq=6)
    return collate(Turn(batch, 0, {}, (2, 6)), collator, lambda _turn, _num_tokens: STATE)


def test_a_batch_knows_where_it_comes_from_and_what_it_holds() -> None:
    ready = run(lambda samples: {"input_ids": np.array(samples), "attention_mask": np.array([[1, 0], [1, 1], [1, 1]]), "names": ["a"]})
    assert (ready.step, ready.lane, ready.epoch, ready.num_records) == (7, 3, 2, 2)
    assert ready.load_records() == [(("shard", 8), 4, 0), (("shard", 8), 4, 1), (("shard", 10), 5, 0)]
    assert (ready.num_tokens, ready.num_padding, ready.num_targets) == (5, 1, 0)
    assert ready.state is STATE
    assert list(ready.fields) == ["input_ids", "attention_mask", "names"]
    assert ready.fields["names"] == ["a"]
    assert ready.fields["input_ids"].array.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_the_collator_gets_a_list_of_its_own() -> None:
    def collator(samples: list[Any]) -> Mapping[str, Any]:
        samples.clear()
        return OrderedDict(empty=np.zeros(0))

    assert len(run(collator).load_records()) == 3


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), StopIteration(), GeneratorExit()], ids=repr)
def test_a_collator_that_fails_names_the_batch_and_its_first_record(error: BaseException) -> None:
    def fail(_samples: list[Any]) -> Any:
        raise error

    message = rf"stage collate, record shard\[8\], seq 4, lane 3: .* micro-batch 7 of lane 3 \(3 samples\): {type(error).__name__}"
    with pytest.raises(BatchError, match=message) as caught:
        run(fail)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("result", [None, [], np.zeros(3), "text"], ids=repr)
def test_a_collator_returns_a_mapping(result: Any) -> None:
    with pytest.raises(BatchError, match=r"collate: expected a dict of arrays or tensors, got \w+; return one array per field."):
        run(lambda _samples: result)


def test_errors_of_ours_and_interrupts_stay_what_they_are() -> None:
    for error in (ConfigError("x", expected="y", got=1, do="z"), KeyboardInterrupt()):

        def fail(_samples: list[Any], error: BaseException = error) -> Any:
            raise error

        with pytest.raises(type(error), match=r"x: expected|^$"):
            run(fail)


NUMPY_DTYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
NUMPY_DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("order", ["=", "<", ">"])
def test_numpy_dtypes(dtype: str, order: Literal["=", "<", ">"]) -> None:
    array = np.arange(6).astype(np.dtype(dtype).newbyteorder(order)).reshape(2, 3)
    (field,) = to_arrays({"x": array}).values()
    assert isinstance(field, TensorArray)
    assert field.dtype == dtype
    assert field.array.dtype == np.dtype(dtype)
    assert field.array.dtype.isnative
    assert np.array_equal(field.array, array)


def test_arrays_are_not_copied() -> None:
    array = np.zeros(5)
    assert to_arrays({"x": array})["x"].array is array


def test_scalars_are_arrays_without_dimension() -> None:
    field = to_arrays({"x": np.float32(2.5)})["x"]
    assert (field.dtype, field.array.shape, field.array.item()) == ("float32", (), 2.5)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        ["list"],
        3,
        None,
        np.array(["a", "bc"]),
        np.array([object()]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("a", int), ("b", float)]),
        np.str_("text"),
    ],
    ids=stable_repr,
)
def test_other_values_stay_as_they_are(value: Any) -> None:
    assert to_arrays({"x": value})["x"] is value


def test_tensors_of_every_dtype() -> None:
    torch = pytest.importorskip("torch")
    values = [torch.arange(4).to(getattr(torch, name)) for name in [*NUMPY_DTYPES, "bfloat16"]]
    values += [torch.arange(4, dtype=torch.float32).to(getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2")]
    for value in values:
        field = to_arrays({"x": value})["x"]
        again = torch.from_numpy(field.array)
        kind = getattr(torch, field.dtype)
        assert kind == value.dtype
        assert (again if again.dtype == kind else again.view(kind)).tolist() == value.tolist()


def test_tensors_of_every_shape() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24.0).reshape(4, 6)
    for value in [
        base.t(),
        base[::2, 1:],
        base[:, :0],
        torch.tensor(3.0),
        base.expand(2, 4, 6),
        torch.nn.Parameter(base),
        torch.complex(base, base).conj(),
        torch._neg_view(base),
    ]:
        field = to_arrays({"x": value})["x"]
        assert isinstance(field, TensorArray)
        assert field.array.shape == tuple(value.shape)
        assert torch.equal(torch.from_numpy(field.array), value.detach().resolve_conj().resolve_neg())


def test_a_tensor_that_numpy_cannot_hold_is_an_error_in_its_place() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BatchError, match="micro-batch 7 of lane 3"):
        run(lambda _samples: {"x": torch.eye(3).to_sparse()})
