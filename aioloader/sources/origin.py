"""What a stream is read from: an iterable, or a function that makes one for each pass; synchronous and asynchronous alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aioloader.errors import ConfigError, ResumeError
from aioloader.protocols import Json
from aioloader.sources.place import checked_state

__all__ = ["ASYNC", "SYNC", "Kind", "Origin", "describe", "has_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The words of one kind of iteration."""

    source: str
    start: Callable[[Any], Any]
    iter_method: str
    next_method: str
    close_method: str
    expected: str
    remedy: str


SYNC = Kind(
    source="IterableSource",
    start=iter,
    iter_method="__iter__",
    next_method="__next__",
    close_method="close",
    expected="an iterable of records or a function without arguments that returns one",
    remedy="pass a list or a generator function; for async iteration use AsyncIterableSource",
)
ASYNC = Kind(
    source="AsyncIterableSource",
    start=aiter,
    iter_method="__aiter__",
    next_method="__anext__",
    close_method="aclose",
    expected="an async iterable of records or a function without arguments that returns one",
    remedy="pass an async generator function (async def with yield); for plain iteration use IterableSource",
)


class Origin:
    """Starts passes over an upstream, each from the beginning or from a state.

    Raises:
        ConfigError: The upstream is neither iterable nor a function without arguments, or it is text or a mapping, whose
            characters or keys are hardly meant.
    """

    def __init__(self, kind: Kind, upstream: object) -> None:
        self.kind = kind
        self.upstream = upstream
        self._is_function = not hasattr(type(upstream), kind.iter_method)
        if isinstance(upstream, (str, bytes, bytearray, Mapping)) or (self._is_function and not _takes_no_arguments(upstream)):
            raise ConfigError(kind.source, expected=kind.expected, got=describe(upstream), do=kind.remedy)
        self._is_claimed = False
        self._first_state: Json | None = None
        self._last_made: object = None

    def __getstate__(self) -> dict[str, object]:
        """Travel without the iterator of the last pass, which seldom can."""
        return {**self.__dict__, "_last_made": None}

    def claim(self) -> None:
        """Note that a pass is to be made.

        Raises:
            ConfigError: The upstream gives its records once and was claimed before.
        """
        if self._is_claimed and self._is_once(self.upstream):
            raise self._used_up(self.upstream)
        self._is_claimed = True

    def begin(self, epoch: int, state: Json | None) -> tuple[Any, Callable[[], Json] | None]:
        """Return an iterator at `state`, None being the beginning, and what asks for its state where it has one.

        Raises:
            ConfigError: A function returned no iterable, or the iterator it returned before.
            ResumeError: There is a state and nothing to load it into.
        """
        iterable: Any = self._make() if self._is_function else self.upstream
        if has_state(iterable):
            self._load(iterable, epoch, state)
            iterator = self.kind.start(iterable)
            return iterator, iterable.state_dict
        _set_epoch(iterable, epoch)
        iterator = self.kind.start(iterable)
        if has_state(iterator):
            if state is not None:
                iterator.load_state_dict(state)
            return iterator, iterator.state_dict
        if state is not None:
            raise ResumeError(
                [(f"upstream {describe(self.upstream)}", "one with a state_dict", "one without")],
                do="resume with the upstream that the state was saved with",
            )
        return iterator, None

    def closing(self, iterator: object) -> Callable[[], Any] | None:
        """Return how to end an iteration; None for a stateful iterator that was given to us and is read again later."""
        if iterator is self.upstream and has_state(iterator):
            return None
        close = getattr(iterator, self.kind.close_method, None)
        return close if callable(close) else None

    def _load(self, iterable: Any, epoch: int, state: Json | None) -> None:
        """Bring a stateful iterable to `state` or to a beginning; one left in the middle of a pass must not go on there.

        A state knows its epoch, so it is loaded after `set_epoch`.
        """
        if self._first_state is None and not self._is_function:
            self._first_state = checked_state(describe(iterable), iterable.state_dict())
        elif state is None and self._first_state is not None:
            iterable.load_state_dict(self._first_state)
        _set_epoch(iterable, epoch)
        if state is not None:
            iterable.load_state_dict(state)

    def _make(self) -> Any:
        assert callable(self.upstream)
        made = self.upstream()
        if not hasattr(type(made), self.kind.iter_method) or isinstance(made, (str, bytes, Mapping)):
            if inspect.iscoroutine(made):
                made.close()  # it would complain that nobody awaited it
            where = f"{self.kind.source}({describe(self.upstream)})"
            raise ConfigError(where, expected=self.kind.expected, got=f"a function that returns {type(made).__name__}", do=self.kind.remedy)
        if made is self._last_made and self._is_once(made):
            raise self._used_up(made)
        self._last_made = made
        return made

    def _is_once(self, iterable: object) -> bool:
        return hasattr(type(iterable), self.kind.next_method) and not has_state(iterable)

    def _used_up(self, iterator: object) -> ConfigError:
        return ConfigError(
            f"{self.kind.source}.open",
            expected="an upstream that can be read again",
            got=f"a {type(iterator).__name__} that was opened before",
            do="a generator can be read once, so pass the function that makes it, or a list",
        )


def describe(upstream: object) -> str:
    """Return the name of a function, or of the type of anything else."""
    name = getattr(upstream, "__qualname__", None)
    if isinstance(name, str) and not inspect.isgenerator(upstream) and not inspect.isasyncgen(upstream):
        return name
    return type(upstream).__qualname__


def has_state(upstream: object) -> bool:
    """Return whether `upstream` can save and restore its own place."""
    return callable(getattr(upstream, "state_dict", None)) and callable(getattr(upstream, "load_state_dict", None))


def _set_epoch(upstream: Any, epoch: int) -> None:
    if callable(getattr(upstream, "set_epoch", None)):
        upstream.set_epoch(epoch)


def _takes_no_arguments(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True
