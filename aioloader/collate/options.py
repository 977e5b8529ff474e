"""Checks of collator options, each raising a `ConfigError` that names the option."""

from __future__ import annotations

from aioloader.errors import ConfigError

__all__ = ["require_bool", "require_int"]


def require_int(where: str, value: object, *, minimum: int | None = None) -> None:
    """Refuse anything but an `int` of at least `minimum`; a bool is not a number.

    Raises:
        ConfigError: `value` is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or (minimum is not None and value < minimum):
        expected = "an int" if minimum is None else f"an int >= {minimum}"
        raise ConfigError(where, expected=expected, got=repr(value), do="give a whole number in this range")


def require_bool(where: str, value: object) -> None:
    """Refuse anything but True and False.

    Raises:
        ConfigError: `value` is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(where, expected="True or False", got=repr(value), do="give a bool")
