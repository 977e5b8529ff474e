"""Anonymous shared-memory segments: written by one process, viewed without a copy by another, recycled when the views are gone.

A segment is a memfd. Its descriptor travels once, with the first message that uses it; nothing has a name, so a crash leaves
nothing to clean. The writer reuses a segment only after the reader returned it: fresh pages cost more than the copy itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Arena", "HeldBytes", "PageLock", "Segment", "SegmentViews"]

_GRANULE_BYTES = 1 << 16
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Segment:
    """One piece of shared memory, on the side that owns it. Keeps a descriptor open only as long as somebody may need it."""

    def __init__(self, number: int, nbytes: int, *, keeps_descriptor: bool = False) -> None:
        self.number = number
        self.nbytes = nbytes
        self._keeps_descriptor = keeps_descriptor
        self._is_announced = False
        self.descriptor = os.memfd_create(f"aioloader-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            self.memory = _map(self.descriptor, nbytes).data
        except OSError:
            os.close(self.descriptor)
            raise

    @property
    def announced(self) -> bool:
        """Return whether the reader has the descriptor."""
        return self._is_announced

    def announce(self) -> None:
        """Note that the reader has the descriptor."""
        self._is_announced = True
        if not self._keeps_descriptor:
            self._close_descriptor()

    def close(self) -> None:
        """Unmap and close; the reader's views stay valid."""
        self.memory = memoryview(b"")
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Arena:
    """Hands out segments for writing and takes them back. Not thread-safe.

    Keeps at most `max_free_bytes` of returned segments; the rest goes back to the system. With `keeps_descriptors`, those of all
    segments stay open, for other processes yet to come.
    """

    def __init__(self, max_free_bytes: int = 1 << 28, *, keeps_descriptors: bool = False) -> None:
        self._max_free_bytes = max_free_bytes
        self._keeps_descriptors = keeps_descriptors
        self._next_number = 0
        self._free: list[Segment] = []
        self._used: dict[int, Segment] = {}
        self._is_closed = False
        self.retired: list[int] = []
        """Numbers of segments given back to the system since the reader was last told; it must forget their mappings."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes in segments that a reader holds or that are being written."""
        return sum(segment.nbytes for segment in self._used.values())

    def take(self, nbytes: int) -> Segment:
        """Return a segment of at least `nbytes` that nobody reads.

        Raises:
            RuntimeError: The arena was closed: nobody would close the segment.
        """
        if self._is_closed:
            raise RuntimeError(f"Arena: expected to be asked for {nbytes} bytes before it is closed, got asked after it; make another one.")
        fitting = [segment for segment in self._free if nbytes <= segment.nbytes <= 4 * max(nbytes, _GRANULE_BYTES)]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self._free.remove(segment)
        else:
            segment = Segment(self._next_number, _round_up(nbytes), keeps_descriptor=self._keeps_descriptors)
            self._next_number += 1
        self._used[segment.number] = segment
        return segment

    def give_back(self, number: int) -> None:
        """Take a segment back from its reader."""
        segment = self._used.pop(number)
        self._free.append(segment)
        while len(self._free) > 1 and sum(each.nbytes for each in self._free) > self._max_free_bytes:
            oldest = self._free.pop(0)
            self.retired.append(oldest.number)
            oldest.close()

    def close(self) -> None:
        """Close every segment; safe to call twice."""
        self._is_closed = True
        for segment in [*self._free, *self._used.values()]:
            segment.close()
        self._free.clear()
        self._used.clear()


class PageLock(Protocol):
    """Keeps mapped memory from being moved, so that a device can copy from it while the CPU goes on."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock a mapping; return whether that was possible."""

    def unlock(self, address: int) -> None:
        """Unlock it, before it is unmapped."""


class SegmentViews:
    """The reader's mappings of one writer's segments, page-locked once each where there is a `lock`.

    A mapping keeps no descriptor open. It lives as long as a view of it, also after `close`.
    """

    def __init__(self, lock: PageLock | None = None) -> None:
        self._lock = lock
        self._mappings: dict[int, npt.NDArray[np.uint8]] = {}
        self._watching: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    def attach(self, number: int, descriptor: int, nbytes: int) -> None:
        """Map a segment that the writer announced, and close its descriptor."""
        try:
            self._mappings[number] = _map(descriptor, nbytes, self._lock)
        finally:
            os.close(descriptor)

    def view(self, number: int, nbytes: int, on_release: Callable[[int], None]) -> npt.NDArray[np.uint8]:
        """Return uint8[nbytes] over a segment; `on_release(number)` is called when the last view made from it is gone."""
        owner = np.frombuffer(self._mappings[number].data, dtype=np.uint8, count=nbytes)
        self._watching[number] = weakref.ref(owner, lambda _: on_release(number))
        return owner

    def memory(self, number: int) -> memoryview:
        """Return a whole segment, to write to."""
        return self._mappings[number].data

    def forget(self, number: int) -> None:
        """Drop the mapping of a segment that its writer retired."""
        self._mappings.pop(number, None)
        self._watching.pop(number, None)

    def close(self) -> None:
        """Drop all mappings; nobody hears any more when views are gone. Each is unmapped when its last view is gone."""
        self._mappings.clear()
        self._watching.clear()


class HeldBytes:
    """Counts the bytes of memory that somebody still views."""

    def __init__(self) -> None:
        self.total = 0
        self._watching: dict[int, weakref.ref[Any]] = {}
        self._next_number = 0

    def hold(self, memory: memoryview) -> memoryview:
        """Return the same memory, counted until its last view is gone."""
        owner = np.frombuffer(memory, dtype=np.uint8)
        self.hold_with(owner, len(owner))
        return owner.data

    def hold_with(self, owner: object, nbytes: int) -> None:
        """Count so many bytes until an object is gone."""
        number = self._next_number
        self._next_number += 1
        self.total += nbytes
        self._watching[number] = weakref.ref(owner, lambda _: self._release(number, nbytes))

    def _release(self, number: int, nbytes: int) -> None:
        self.total -= nbytes
        del self._watching[number]


def _round_up(nbytes: int) -> int:
    """Return the next size of a geometric series, so that segments of similar use fit each other."""
    if nbytes <= _GRANULE_BYTES:
        return _GRANULE_BYTES
    step = max(_GRANULE_BYTES, 1 << (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_LIBC = _libc() if sys.platform != "win32" else None


def _map(descriptor: int, nbytes: int, lock: PageLock | None = None) -> npt.NDArray[np.uint8]:
    """Return uint8[nbytes] mapped from a descriptor. The mmap module would keep a duplicate of the descriptor open for each."""
    assert _LIBC is not None
    address = _LIBC.mmap(None, nbytes, _PROT_READ_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"shared memory: mapping {nbytes} bytes failed: {os.strerror(number)}; free memory or lower memory_limit")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    unlock = lock.unlock if lock is not None and lock.lock(address, nbytes) else None
    finalizer = weakref.finalize(memory, _unmap, address, nbytes, unlock)
    finalizer.atexit = False
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def _unmap(address: int, nbytes: int, unlock: Callable[[int], None] | None) -> None:
    if unlock is not None:
        unlock(address)
    assert _LIBC is not None
    _LIBC.munmap(address, nbytes)
