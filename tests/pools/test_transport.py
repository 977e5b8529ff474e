"""Transport: whatever can be pickled comes back equal, of the same type, and its arrays view the memory they came in."""

from __future__ import annotations

import copyreg
import datetime
import decimal
import pickle
import random
import subprocess
import sys
import textwrap
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aioloader.pools.transport import Encoded, decode, encode, encode_samples, write
from tests.naming import stable_repr

ROOT = Path(__file__).parents[2]
ALIGNMENT = 64


def written(encoded: Encoded) -> memoryview:
    memory = memoryview(bytearray(b"\xee" * encoded.nbytes))
    write(encoded, memory)
    return memory


def moved(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.sizes, written(encoded))


def moved_samples(samples: list[Any]) -> list[Any]:
    encoded = encode_samples(samples)
    again = decode(encoded.sizes, written(encoded))
    again = list(again)
    return again


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, shape and every bit that counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return all(map(same, one.ravel().tolist(), other.ravel().tolist())) if one.dtype.hasobject else one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    if type(one).__module__ == "torch":
        torch = sys.modules["torch"]
        one, other = one.detach(), other.detach()
        return bool(one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other)))
    return bool(one == other)


def bits(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return torch.view_as_real(plain).reshape(-1).view(torch.uint8) if plain.is_complex() else plain.view(torch.uint8)


# Arrays

arrays = npst.arrays(
    dtype=st.one_of(
        npst.scalar_dtypes().filter(lambda dtype: dtype.kind not in "mM" or dtype.isnative),  # NumPy's pickles make these native
        npst.array_dtypes(st.sampled_from([np.dtype("i4"), np.dtype(">f8"), np.dtype("U2")]), max_size=2),
        npst.unicode_string_dtypes(max_len=3),
        npst.byte_string_dtypes(max_len=3),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4) | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=plain_values)
def test_any_nested_value_comes_back(value: Any) -> None:
    assert same(moved(value), value)


@settings(max_examples=60)
@given(samples=st.lists(plain_values, max_size=8))
def test_any_samples_come_back(samples: list[Any]) -> None:
    assert same(moved_samples(samples), samples)


DTYPES = ["bool", "i1", "u2", "<i4", ">i4", "i8", "f2", "f4", ">f8", "c8", "M8[s]", "m8[ns]", "U3", "S2", "V5", "O"]


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30), num_samples=st.integers(0, 9), num_fields=st.integers(0, 4))
def test_samples_of_one_kind_come_back(seed: int, num_samples: int, num_fields: int) -> None:
    """The same fields in each, some of them always of one dtype and shape, which is what travels as columns."""
    rng = random.Random(seed)
    makers = [field_maker(rng) for _ in range(num_fields)]
    samples = [{str(number): make() for number, make in enumerate(makers)} for _ in range(num_samples)]
    assert same(moved_samples(samples), samples)
    if num_fields:
        bare = [sample["0"] for sample in samples]
        assert same(moved_samples(bare), bare)


def field_maker(rng: random.Random) -> Callable[[], Any]:
    dtype = np.dtype(rng.choice(DTYPES))
    trailing = [rng.randint(0, 3) for _ in range(rng.randint(0, 2))]
    first = rng.choice([None, 0, 1, 4])
    kind = rng.choice(["array", "array", "plain", "mixed"])

    def make() -> Any:
        if kind == "plain" or (kind == "mixed" and rng.random() < 0.3):
            return rng.choice([None, 3, "text", [1, 2], np.float32(2)])
        shape = (rng.randint(0, 4) if first is None else first, *trailing)
        array = np.zeros(shape, dtype)
        if dtype.kind in "iuf":
            array[...] = np.array([rng.randint(0, 100) for _ in range(array.size)]).reshape(shape)
        return array

    return make


@pytest.mark.parametrize("num_samples", [1, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        np.arange(24).reshape(4, 6).T,
        np.arange(24)[::-2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.broadcast_to(np.arange(3), (4, 3)),
        np.arange(6).reshape(2, 3)[:, ::-1],
        np.array(3.5),
        np.zeros((0, 3)),
        np.zeros((3, 0)),
        np.zeros(0, np.int8),
        np.ma.masked_array([1, 2], [True, False]),
        np.array([{1}, None], object),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.float32(1.5),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
        np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    ],
    ids=repr,
)
def test_arrays_of_every_layout(value: Any, num_samples: int) -> None:
    for again in [moved(value), *moved_samples([value] * num_samples), *(one["x"] for one in moved_samples([{"x": value}] * num_samples))]:
        assert type(again) is type(value)
        assert again.dtype == value.dtype
        assert again.shape == value.shape
        assert np.array_equal(again, value)


def test_arrays_are_views_of_the_memory_and_writable() -> None:
    samples = [{"x": np.arange(100, dtype=np.int32), "y": np.zeros(number)} for number in range(5)]
    for encoded in (encode(samples), encode_samples(samples)):
        memory = written(encoded)
        again = decode(encoded.sizes, memory)
        whole = np.frombuffer(memory, np.uint8)
        for sample in again:
            assert np.shares_memory(sample["x"], whole)
            sample["x"][:] = 1
            sample["y"][:] = 2
        assert all((sample["x"] == 1).all() and (sample["y"] == 2).all() for sample in again)
        del sample, again


def test_buffers_are_aligned_and_columns_are_one_buffer_each() -> None:
    samples = [{"x": np.arange(number), "y": np.ones(3, np.int8), "text": "a"} for number in range(10)]
    encoded = encode_samples(samples)
    assert len(encoded.sizes) == 3
    assert encoded.sizes[1:] == (45 * 8, 30)
    assert encoded.nbytes % ALIGNMENT == 0
    again = decode(encoded.sizes, written(encoded))
    assert all(sample["x"].ctypes.data % 8 == 0 for sample in again)


def test_what_changes_after_writing_does_not_change_what_arrives() -> None:
    array = np.arange(5)
    encoded = encode([array])
    memory = written(encoded)
    array[:] = 0
    assert decode(encoded.sizes, memory)[0].tolist() == [0, 1, 2, 3, 4]


def test_memory_may_be_larger_than_what_was_written() -> None:
    encoded = encode_samples([np.arange(number) for number in range(6)])
    memory = memoryview(bytearray(encoded.nbytes + 1000))
    write(encoded, memory)
    assert [len(array) for array in decode(encoded.sizes, memory)] == list(range(6))


# Tensors

TENSOR_DTYPES = [
    "bool",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]
TENSOR_DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES)
@pytest.mark.parametrize("num_samples", [1, 6])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype(dtype: str, num_samples: int) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    values = [torch.arange(12, dtype=torch.float32).to(kind).reshape(3, 4), torch.zeros(0, 4, dtype=kind), torch.zeros((), dtype=kind)]
    for value in values:
        samples = [value.clone() for _ in range(num_samples)]
        assert same(moved(value), value)
        assert same(moved_samples(samples), samples)
        assert same(moved_samples([{"x": one, "n": 1} for one in samples]), [{"x": one, "n": 1} for one in samples])


def test_tensors_of_every_layout() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24.0).reshape(4, 6)
    values = [
        base.t(),
        base[::2, 1:],
        base[:, :0],
        base.expand(2, 4, 6),
        torch.complex(base, -base).conj(),
        torch._neg_view(base),
        base.to(torch.bfloat16).t(),
        base.clone().requires_grad_(),
        base.clone().requires_grad_() * 2,
    ]
    for value in values:
        for again in [moved(value), moved_samples([value] * 5)[3], moved_samples([{"x": value}] * 5)[4]["x"]]:
            assert same(again, value)
            assert again.requires_grad == value.requires_grad


def test_tensors_of_other_kinds() -> None:
    torch = pytest.importorskip("torch")
    parameter = moved_samples([torch.nn.Parameter(torch.ones(3))] * 5)[0]
    assert type(parameter) is torch.nn.Parameter
    assert parameter.tolist() == [1, 1, 1]
    sparse = moved([torch.eye(3).to_sparse()])[0]
    assert torch.equal(sparse.to_dense(), torch.eye(3))


def test_mixed_samples_of_tensors_come_back() -> None:
    torch = pytest.importorskip("torch")
    samples = [torch.zeros(2), torch.zeros(3), np.zeros(2), torch.zeros(2, dtype=torch.int8), torch.zeros(2, 2), None]
    assert same(moved_samples(samples), samples)
    assert same(moved_samples(samples[:2] * 3), samples[:2] * 3)


# Objects

Point = namedtuple("Point", "x y")


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(other.__dict__ == self.__dict__)

    __hash__ = None  # type: ignore[assignment]


class MyDict(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Plain(3),
        Point(1, [2]),
        MyDict(a=1),
        OrderedDict(b=1, a=2),
        {1: "one", (2, 3): "pair", None: "none"},
        {"set": {1, 2}, "frozen": frozenset([1, 2])},
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        decimal.Decimal("1.50"),
        1 << 200,
        "\ud800",
        bytearray(b"bytes"),
        Path("a/b"),
        range(3),
        ...,
        int,
    ],
    ids=stable_repr,
)
def test_objects_of_every_kind(value: Any) -> None:
    for again in [moved(value), *moved_samples([value] * 5), moved_samples([{"x": value, "y": np.zeros(2)}] * 5)[2]["x"]]:
        assert type(again) is type(value)
        assert again == value


def test_local_classes_travel_by_value() -> None:
    class Local(Plain):
        pass

    array = np.arange(1000)
    again = moved([Local(array), lambda: 3])
    assert np.array_equal(again[0].value, array)
    assert again[1]() == 3


def test_objects_of_the_main_module_can_be_loaded_where_the_main_module_is_another() -> None:
    """Plain pickle would name their class by its place, which is somewhere else in a worker."""
    program = """
        import pickle, sys
        import numpy as np
        from aioloader.pools.transport import encode, encode_samples, write
        class Record:
            def __init__(self, value): self.value = value
        for encoded in (encode([Record(np.arange(3)), "if __name__ == '__main__':"]), encode_samples([Record(np.arange(3))] * 9)):
            memory = memoryview(bytearray(encoded.nbytes))
            write(encoded, memory)
            pickle.dump((encoded.sizes, bytes(memory)), sys.stdout.buffer)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    stream = subprocess.run(command, capture_output=True, check=True, timeout=15, cwd=ROOT).stdout
    for _ in range(2):
        sizes, memory = pickle.loads(stream)
        stream = stream[len(pickle.dumps((sizes, memory))) :]
        again = decode(sizes, memoryview(bytearray(memory)))
        assert again[0].value.tolist() == [0, 1, 2]


def test_what_is_registered_later_is_known() -> None:
    pytest.importorskip("torch")

    class Late:
        pass

    encode([1])
    copyreg.pickle(Late, lambda _: (int, ("7",)))  # type: ignore[arg-type, return-value]
    try:
        assert moved([Late()]) == [7]
    finally:
        del copyreg.dispatch_table[Late]


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise OSError("not today")


@pytest.mark.parametrize(
    ("value", "error"), [(Unpicklable(), OSError), ((number for number in range(3)), TypeError)], ids=["own", "generator"]
)
def test_what_cannot_be_pickled_raises_its_own_error(value: Any, error: type[Exception]) -> None:
    in_columns = [{"x": np.zeros(2), "y": value}] * 5
    with pytest.raises(error, match=r"not today|cannot pickle"):
        encode(value)
    for samples in ([value] * 5, in_columns):
        with pytest.raises(error, match=r"not today|cannot pickle"):
            encode_samples(samples)


@given(count=st.integers(0, 20), size=st.integers(0, 5000))
def test_bytes_counted_are_bytes_needed(count: int, size: int) -> None:
    samples = [{"x": np.zeros(size, np.uint8)} for _ in range(count)]
    for encoded in (encode(samples), encode_samples(samples)):
        assert encoded.nbytes >= count * size
        assert encoded.nbytes <= (count + 1) * (size + 200) + 500
        assert len(encoded.sizes) == len(encoded.buffers)
        assert same(list(decode(encoded.sizes, written(encoded))), samples)


@pytest.mark.parametrize("key", [None, "x", 7])
def test_a_column_goes_to_its_room_or_among_the_others_and_never_both(key: Any) -> None:
    samples = [{key: np.full(4, number), "other": np.full(2, number)} for number in range(3)]
    elsewhere = memoryview(bytearray(200))
    encoded = encode_samples(samples, {"x": (np.dtype(int).str, (4,), 64)})
    assert len(encoded.placed) == (key == "x")
    memory = memoryview(bytearray(encoded.nbytes))
    write(encoded, memory, elsewhere)
    assert same(list(decode(encoded.sizes, memory, elsewhere)), samples)
