"""Random numbers that belong to the record: `random`, `numpy.random` and torch are seeded for each one.

The seed is a function of (seed, epoch, record id), so augmentation is the same with any number of workers, any chunking and
after any resume. Seeding costs 3-8 us per generator, so worker processes seed lazily, at the first draw of a record.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
import threading
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from aioloader.protocols import RecordId

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np

__all__ = ["LazySeeding", "NamedSeeding", "Seeding", "SwappedSeeding", "record_rng", "record_seed"]

_MASK = (1 << 64) - 1
_Key = tuple[int, int, RecordId]
"""(seed, epoch, record id)."""

_DRAW_PAST_NUMPY = ("scipy.stats", "sklearn.utils")
"""Modules that draw from NumPy's hidden generator, past the functions wrapped here."""

_NO_RECORD: RecordId = ("", 0)

_current: ContextVar[_Key | None] = ContextVar("aioloader_record", default=None)
"""The record of this thread, where several threads of a process work; setting it costs as much as the rest of `begin`."""
_installed: LazySeeding | None = None
"""The seeding of a process of which one thread works."""


class Seeding(Protocol):
    """Brackets each record: `begin` before the function, `end` after it, also when it raised."""

    def begin(self, epoch: int, record: RecordId) -> None:
        """Make the generators those of this record."""

    def end(self) -> None:
        """Leave the record."""


def record_seed(seed: int, epoch: int, record: RecordId) -> int:
    """Return a 64-bit seed, well mixed, for one record of one epoch.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    shard, row = record
    value = (zlib.crc32(shard.encode()) << 32 | zlib.adler32(shard.encode())) & _MASK
    for part in (row, epoch, seed):
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


def record_rng() -> np.random.Generator:
    """Return a NumPy generator for the record being preprocessed; the same stream in every pool, also in threads.

    Raises:
        RuntimeError: Called outside a preprocess function.
    """
    import numpy as np

    key = _current.get() or (None if _installed is None else _installed.record_key)
    if key is None:
        raise RuntimeError(
            "record_rng: expected to be called inside a preprocess function, got a call outside; pass your own generator there."
        )
    return np.random.Generator(np.random.Philox(record_seed(*key)))


class SwappedSeeding:
    """Seeds all global generators for a record and puts the caller's state back after it. For the caller's own process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._put_back: list[Callable[[], None]] = []

    def begin(self, epoch: int, record: RecordId) -> None:
        """See `Seeding`."""
        _current.set((self._seed, epoch, record))
        seed = record_seed(self._seed, epoch, record)
        self._put_back = [_swap_random(seed), _swap_numpy(seed), _swap_torch(seed)]

    def end(self) -> None:
        """See `Seeding`."""
        for put_back in self._put_back:
            put_back()
        _current.set(None)


class NamedSeeding:
    """Gives `record_rng` its seed and leaves the global generators alone: threads share those."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self, epoch: int, record: RecordId) -> None:
        """See `Seeding`."""
        _current.set((self._seed, epoch, record))

    def end(self) -> None:
        """See `Seeding`."""
        _current.set(None)


class LazySeeding:
    """Seeds the global generators of this process at their first use in each record. For worker processes.

    `install` wraps the functions of `random` and `numpy.random` and so must run before user modules are imported; what they
    then import by name is wrapped too. Torch, whose generator is cheap to seed, is seeded for each record. NumPy and torch may
    be imported late, even by the preprocess function in the middle of a record: they are seeded as they arrive.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key: _Key = (seed, 0, _NO_RECORD)
        self._random_is_fresh = True
        self._numpy_is_fresh = True
        self._at_begin: list[Callable[[], None]] = []
        """What is seeded for each record, whether it draws or not."""
        self._thread = 0
        self._torch_generator: Any = None

    def use(self, seed: int) -> None:
        """Take another seed of the run."""
        self._seed = seed
        self._key = (seed, *self._key[1:])

    def install(self) -> None:
        """Wrap `random` now, and the others now or at the end of their import."""
        global _installed
        _installed = self
        self._thread = threading.get_ident()
        _wrap_functions(random, random._inst, self._refresh_random)
        arrivals = [("numpy.random", self._install_numpy), ("torch", self._install_torch)]
        arrivals += [(name, self._seed_numpy_always) for name in _DRAW_PAST_NUMPY]
        for name, arrive in arrivals:
            if name in sys.modules:
                arrive()
            else:
                sys.meta_path.insert(0, _AfterImport(name, arrive))

    def begin(self, epoch: int, record: RecordId) -> None:
        """See `Seeding`."""
        self._key = (self._seed, epoch, record)
        self._random_is_fresh = self._numpy_is_fresh = False
        for seed in self._at_begin:
            seed()

    def end(self) -> None:
        """See `Seeding`."""

    @property
    def record_key(self) -> _Key | None:
        """Return the record that is being preprocessed, or was last; None before the first, and in other threads than that of records."""
        return None if self._key[2] is _NO_RECORD or threading.get_ident() != self._thread else self._key

    def _install_numpy(self) -> None:
        numpy_random = sys.modules["numpy.random"]
        _wrap_functions(numpy_random, numpy_random.mtrand._rand, self._refresh_numpy)

    def _install_torch(self) -> None:
        self._torch_generator = sys.modules["torch"].default_generator
        self._at_begin.append(self._seed_torch)
        self._seed_torch()

    def _seed_numpy_always(self) -> None:
        self._at_begin.append(self._refresh_numpy)
        self._refresh_numpy()

    def _seed_torch(self) -> None:
        self._torch_generator.manual_seed(record_seed(*self._key) & _MASK >> 1)

    def _refresh_random(self) -> None:
        if not self._random_is_fresh:
            self._random_is_fresh = True
            random._inst.seed(record_seed(*self._key))

    def _refresh_numpy(self) -> None:
        if not self._numpy_is_fresh:
            self._numpy_is_fresh = True
            sys.modules["numpy.random"].mtrand._rand.seed(_numpy_words(record_seed(*self._key)))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `arrive` when the module `name` has been imported."""

    def __init__(self, name: str, arrive: Callable[[], None]) -> None:
        self._name = name
        self._arrive = arrive

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._arrive()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def _wrap_functions(module: Any, instance: Any, refresh: Callable[[], None]) -> None:
    """Replace each function of `module` that is bound to its hidden `instance` by one that refreshes the seed first."""
    for name in dir(module):
        method = getattr(module, name)
        if getattr(method, "__self__", None) is instance:
            setattr(module, name, _refreshing(method, refresh))


def _refreshing(method: Callable[..., Any], refresh: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        refresh()
        return method(*args, **kwargs)

    call.__name__ = call.__qualname__ = method.__name__
    call.__doc__ = method.__doc__
    call.__self__ = getattr(method, "__self__", None)  # type: ignore[attr-defined]
    return call


def _numpy_words(seed: int) -> list[int]:
    """Return NumPy's seed; one more word than `random` gets, since the same words would give both the same stream."""
    return [seed & 0xFFFFFFFF, seed >> 32, 1]


def _swap_random(seed: int) -> Callable[[], None]:
    state = random.getstate()
    random.seed(seed)
    return lambda: random.setstate(state)


def _swap_numpy(seed: int) -> Callable[[], None]:
    if "numpy" not in sys.modules:
        return lambda: None
    numpy_random = importlib.import_module("numpy.random")  # NumPy imports it at its first use, which is too late to seed it
    state = numpy_random.get_state()
    numpy_random.seed(_numpy_words(seed))
    return lambda: numpy_random.set_state(state)


def _swap_torch(seed: int) -> Callable[[], None]:
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if generator is None:
        return lambda: None
    state = generator.get_state()
    generator.manual_seed(seed & _MASK >> 1)
    return lambda: generator.set_state(state)
