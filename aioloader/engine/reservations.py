"""Segments that workers write samples to before their micro-batch exists. None is reused while anybody may write or look."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.engine.layout import Layout
from aioloader.engine.output import TensorArray
from aioloader.engine.placement import Reserved
from aioloader.pools.chunk import Destination, Room
from aioloader.runtime.segments import Arena, Segment

__all__ = ["Reservations", "rooms_of"]

_MIN_ROW_BYTES = 1 << 14  # below this a copy costs less than the bookkeeping
_MIN_BATCH_BYTES = 1 << 21  # below this, chunks that end with the micro-batch cost more than a copy


def rooms_of(layout: Layout, num_rows: int) -> dict[str, Room]:
    """Return the first row of each field whose rows are large; none if the micro-batch has another number of samples."""
    rooms: dict[str, Room] = {}
    if layout.nbytes < _MIN_BATCH_BYTES:
        return rooms
    for field in layout.arrays:
        row_bytes = np.dtype(field.dtype).itemsize * field.num_elements // max(1, num_rows)
        if len(field.shape) > 1 and field.shape[0] == num_rows and row_bytes >= _MIN_ROW_BYTES:
            rooms[field.name] = (field.dtype, field.shape[1:], field.offset)
    return rooms


class Reservations:
    """Reserved segments of an arena that keeps descriptors.

    Each goes back to the arena when the engine's last view of it is gone and, if it became a micro-batch, the trainer has
    returned it.
    """

    def __init__(self, arena: Arena) -> None:
        self.num_open = 0
        """Segments that are reserved and no micro-batch yet."""
        self.nbytes = 0
        """Bytes of those."""
        self._arena = arena
        self._by_number: dict[int, _Reservation] = {}
        self._by_address: dict[int, _Reservation] = {}
        """Those that are no micro-batch yet, by where they begin."""
        self._dropped: list[int] = []

    def reserve(self, nbytes: int, num_rows: int, rooms: dict[str, Room]) -> Reserved:
        """Return a segment of at least `nbytes` for samples to be written to."""
        self.collect()
        segment = self._arena.take(nbytes)
        view = np.frombuffer(segment.memory, np.uint8)
        one = _Reservation(segment, num_rows, rooms, _address(view), weakref.ref(view, self._dropper(segment.number)))
        self._by_number[segment.number] = self._by_address[one.address] = one
        self._count_open(one, 1)
        destination = Destination(segment.number, segment.nbytes, rooms, num_rows, segment.descriptor, view)
        strides = {name: np.dtype(dtype).itemsize * math.prod(shape) for name, (dtype, shape, _) in rooms.items()}
        return Reserved(destination, strides)

    def claim(self, layout: Layout, fields: Mapping[str, Any]) -> tuple[Segment, frozenset[str]] | None:
        """Return the segment in which the large fields of a micro-batch lie already, all rows in order; None if there is none."""
        self.collect()
        for field in layout.arrays:
            one = self._by_address.get(_address(fields[field.name].pieces[0]) - field.offset)
            if one is not None and one.holds(layout, fields):
                del self._by_address[one.address]
                self._count_open(one, -1)
                one.is_claimed = True
                return one.segment, frozenset(one.rooms)
        return None

    def give_back(self, number: int) -> None:
        """Take a segment back from the trainer, reserved once or not."""
        one = self._by_number.get(number)
        if one is None:
            self._arena.give_back(number)
            return
        one.is_returned = True
        self.collect(number)

    def _dropper(self, number: int) -> Callable[[object], None]:
        dropped = self._dropped  # not self: the callback may come when all else is gone
        return lambda _: dropped.append(number)

    def collect(self, *numbers: int) -> None:
        """Give back what nobody needs any more. Views may die at any moment, so this is done only when the arena is at rest."""
        if not numbers and not self._dropped:
            return  # as nearly always
        while self._dropped:
            numbers = (*numbers, self._dropped.pop())
        for number in numbers:
            one = self._by_number.get(number)
            if one is not None and one.view() is None and (one.is_returned or not one.is_claimed):
                del self._by_number[number]
                if not one.is_claimed:
                    del self._by_address[one.address]
                    self._count_open(one, -1)
                self._arena.give_back(number)

    def _count_open(self, one: _Reservation, number: int) -> None:
        self.num_open += number
        self.nbytes += number * one.segment.nbytes


class _Reservation:
    def __init__(
        self, segment: Segment, num_rows: int, rooms: dict[str, Room], address: int, view: weakref.ref[npt.NDArray[np.uint8]]
    ) -> None:
        self.segment = segment
        self.rooms = rooms
        self.address = address
        self.view = view
        self.is_claimed = False
        self.is_returned = False
        self._num_rows = num_rows

    def holds(self, layout: Layout, fields: Mapping[str, Any]) -> bool:
        """Return whether all rows of the fields that have rooms lie there, and where the layout wants them.

        With fewer rows than were reserved, others might still be written, over what the shorter layout puts there.
        """
        if layout.nbytes > self.segment.nbytes:
            return False
        present = {field.name: field for field in layout.arrays}
        for name, room in self.rooms.items():
            field = present.get(name)
            if field is None or field.offset != room[2] or fields[name].shape[0] != self._num_rows:
                return False
            if not _lies_at(fields[name], self.address + room[2], room):
                return False
        return True


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _lies_at(array: TensorArray, address: int, room: Room) -> bool:
    dtype, shape, _ = room
    for piece in array.pieces:
        if _address(piece) != address or piece.dtype.str != dtype or piece.shape[1:] != shape or not piece.flags.c_contiguous:
            return False
        address += piece.nbytes
    return True
