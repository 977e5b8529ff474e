"""Fingerprints: what identifies data and functions across processes and versions of a script, small and JSON-compatible."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType
from typing import Any

from aioloader.errors import ConfigError
from aioloader.protocols import Json

__all__ = ["fingerprint_hash", "function_fingerprint", "object_fingerprint", "require_json"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""What makes the default `repr` of the same object differ from one process to the next."""


def fingerprint_hash(fingerprint: Json) -> str:
    """Return 16 hexadecimal digits that are equal for equal fingerprints only."""
    return _digest(json.dumps(fingerprint, sort_keys=True))


def function_fingerprint(function: Callable[..., Any] | None) -> Json:
    """Return what identifies a function or callable object: its name, its code, its settings. Small and JSON-compatible."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return {
            "partial": function_fingerprint(function.func),
            "arguments": _digest(_ADDRESS.sub("", repr((function.args, sorted(function.keywords.items()))))),
        }
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return {"name": function.__qualname__, "code": _digest(_code_text(code))}
    return object_fingerprint(function)


def object_fingerprint(value: Any) -> Json:
    """Return `value.fingerprint()` where there is one, else the name of its class and its code.

    What that returns may hold functions and other callables, of which the fingerprint is taken in turn.
    """
    own = getattr(value, "fingerprint", None)
    if callable(own) and not isinstance(value, type):
        facts = {name: object_fingerprint(fact) if callable(fact) else fact for name, fact in dict(own()).items()}
        return require_json(facts, where=f"{type(value).__qualname__}.fingerprint()")
    if hasattr(value, "__code__"):
        return function_fingerprint(value)
    code = getattr(type(value).__dict__.get("__call__"), "__code__", None)
    named = value if isinstance(value, type | BuiltinFunctionType) else type(value)
    return {"name": named.__qualname__, "code": _digest(_code_text(code)) if isinstance(code, CodeType) else None}


def require_json(value: Any, *, where: str) -> Json:
    """Return `value` as JSON gives it back: tuples become lists, keys become text.

    Raises:
        ConfigError: JSON refuses it.
    """
    try:
        copy = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            where, expected="JSON-compatible data", got=f"{value!r} ({error})", do="return str, int, float, bool, None, list, dict"
        ) from error
    return copy


def _code_text(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[_constant_text(one) for one in code.co_consts]}"


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):  # its order changes with PYTHONHASHSEED
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
