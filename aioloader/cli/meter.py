"""How far a long command is, on a terminal or in a log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from aioloader.preprocess import Event

__all__ = ["Meter"]

_BAR = 24
_PAUSE_TERMINAL_S, _PAUSE_LOG_S = 0.2, 10.0


class Meter:
    """Shows one line that is replaced on a terminal, else a line now and then."""

    def __init__(self, stream: TextIO, *, is_quiet: bool = False, pause_s: float | None = None) -> None:
        self._stream = stream
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        self._pause_s = pause_s if pause_s is not None else _PAUSE_TERMINAL_S if self._is_terminal else _PAUSE_LOG_S
        self._started = self._shown = time.monotonic()
        self._fraction: float | None = None
        self._width = 0

    def show(self, event: Event) -> None:
        """Show where a run stands."""
        if self._is_quiet:
            return
        if event.kind == "waiting":
            self._print("another process writes to this directory; waiting for it")
        elif event.kind == "resumed":
            self._print("going on where an earlier run stood")
        else:
            self._fraction = event.fraction if event.fraction is not None else self._fraction
            now = time.monotonic()
            if now - self._shown >= self._pause_s:
                self._shown = now
                self._line(self._text(event, now - self._started))

    def clear(self) -> None:
        """Take the line away from the terminal."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _text(self, event: Event, seconds: float) -> str:
        rate = f"{event.num_tokens / 1e6:,.1f} M tokens, {event.num_tokens / seconds / 1e3:,.0f} k/s"
        text = f"{event.num_documents:,} documents, {rate}"
        if self._fraction is None:
            return text
        filled = round(self._fraction * _BAR)
        return f"[{'#' * filled}{'.' * (_BAR - filled)}] {self._fraction:4.0%}  {text}"

    def _line(self, text: str) -> None:
        if not self._is_terminal:
            self._print(text)
            return
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = max(self._width, len(text))

    def _print(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)
