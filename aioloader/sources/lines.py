"""Cuts blocks of bytes into lines. Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["LineCutter"]


class LineCutter:
    """Takes the blocks of one file in order and gives its lines, each with the number of bytes it took up.

    A line of many blocks costs linear time: its pieces are joined once.
    """

    __slots__ = ("_lines", "_pieces")

    def __init__(self) -> None:
        self._lines: deque[tuple[bytes, int]] = deque()
        self._pieces: list[bytes] = []

    def feed(self, block: bytes, *, is_last: bool) -> None:
        """Take the next block; after the last one of the file, what is left is a line of its own."""
        first, *others = block.split(b"\n")
        self._pieces.append(first)
        if others:
            line = b"".join(self._pieces)
            self._lines.append((line, len(line) + 1))
            self._lines.extend((line, len(line) + 1) for line in others[:-1])
            self._pieces = [others[-1]]
        if is_last:
            line = b"".join(self._pieces)
            self._pieces = []
            if line:
                self._lines.append((line, len(line)))

    @property
    def has_lines(self) -> bool:
        """Return whether there is a line to take before the next block."""
        return bool(self._lines)

    def take_line(self) -> tuple[bytes, int] | None:
        """Return a line without its newline, and the bytes of both, or None until the next block."""
        return self._lines.popleft() if self._lines else None
