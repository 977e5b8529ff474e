"""Pickling for objects that move to another process, with errors that say which argument could not and what to do.

Functions and classes of the user's main module, lambdas and closures travel by value (cloudpickle), so a script needs no main
guard and a notebook works. Functions bound to a global random generator travel by name: by value, each worker would get a
private copy of the generator in the state it had in the trainer, and all would draw the same numbers.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
import traceback
from types import BuiltinMethodType, MethodType
from typing import Any

import cloudpickle

from aioloader.errors import AioLoaderError, ConfigError

__all__ = ["dumps", "pack_argument", "pack_error", "unpack_error"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BuiltinMethodType | MethodType):
            module = _global_generator(obj.__self__)
            if module is not None:
                return getattr, (sys.modules[module], obj.__name__)
        return super().reducer_override(obj)


def _global_generator(owner: object) -> str | None:
    """Return the module whose hidden global generator `owner` is, if it is one."""
    if owner is random._inst:
        return "random"
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and owner is numpy_random.mtrand._rand:
        return "numpy.random"
    return None


def dumps(value: Any) -> bytes:
    """Return `value` pickled so that a process that never saw the main module can load it."""
    spawned_main = sys.modules.get(
        "__mp_main__"
    )  # the main module in a process that multiprocessing spawned, such as a DataLoader's worker
    if spawned_main is not None:
        cloudpickle.register_pickle_by_value(spawned_main)
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def pack_argument(where: str, value: Any, *, do: str) -> bytes:
    """Return `dumps(value)`.

    Raises:
        ConfigError: It cannot be moved; says what inside it stands in the way.
    """
    try:
        return dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, NotImplementedError, OSError) as error:
        raise ConfigError(
            where, expected="something that can move to another process", got=f"{_name(value)}, which cannot ({error})", do=do
        ) from error


def pack_error(error: BaseException) -> bytes:
    """Return an error as bytes, with its cause where that can be moved and with the cause's traceback as text in any case.

    Facts of our own errors that cannot be moved become their `repr`; other errors that cannot be moved become text.
    """
    cause = error.__cause__
    if cause is not None and getattr(error, "remote_traceback", None) is None:
        error.add_note("Traceback where it happened:\n" + "".join(traceback.format_exception(cause)).rstrip())
    movable = _movable(error) or _movable(_with_plain_facts(error)) or dumps(AioLoaderError(f"{type(error).__name__}: {error}"))
    return pickle.dumps((movable, _movable(cause)))


def unpack_error(data: bytes | bytearray | memoryview) -> BaseException:
    """Return the error, with its cause."""
    error_bytes, cause_bytes = pickle.loads(data)
    error: BaseException = pickle.loads(error_bytes)
    error.__cause__ = None if cause_bytes is None else pickle.loads(cause_bytes)
    return error


def _with_plain_facts(error: BaseException) -> BaseException:
    """Return a copy of the error whose attributes can all be moved."""
    try:
        plain = copy.copy(error)
        for name, value in vars(plain).items():
            if not _moves(value):
                setattr(plain, name, repr(value))
    except BaseException:  # noqa: BLE001 - a foreign __reduce__ or __repr__ may raise anything
        return error
    return plain


def _moves(value: object) -> bool:
    try:
        pickle.loads(dumps(value))
    except BaseException:  # noqa: BLE001 - a foreign __reduce__ may raise anything
        return False
    return True


def _movable(error: BaseException | None) -> bytes | None:
    """Return an exception pickled, or None if it would not come back as what it is."""
    if error is None:
        return None
    try:
        data = dumps(error)
        again = pickle.loads(data)
        survives = type(again) is type(error) and str(again) == str(error)
    except BaseException:  # noqa: BLE001 - exceptions with several required arguments fail in many ways
        return None
    return data if survives else None


def _name(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name}" if name else f"a {type(value).__qualname__}"
