"""Checks of batching options, each raising a `ConfigError` that names the option."""

from __future__ import annotations

from collections.abc import Sequence

from aioloader.errors import ConfigError

__all__ = ["require_choice", "require_positive"]


def require_positive(where: str, value: object) -> None:
    """Refuse anything but an `int` of at least 1; a bool is not a count.

    Raises:
        ConfigError: `value` is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(where, expected="an int >= 1", got=repr(value), do="give a positive whole number")


def require_choice(where: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything but one of `choices`.

    Raises:
        ConfigError: `value` is something else; the message lists the choices.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(where, expected=f"one of {listed}", got=repr(value), do="use one of these names")
