"""From how long a sample takes to preprocess and to train to numbers of workers and records in flight. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from aioloader.errors import ConfigError

__all__ = ["Advice", "suggest_async_config"]

_MUCH = 2.0
"""Above this ratio one of the two takes much longer; below it they are comparable."""


class Advice(NamedTuple):
    """What to pass to the loader, and why."""

    workers: int
    buffer_size: int
    reason: str


def suggest_async_config(preprocess_s: float, train_s: float, *, workers: int = 1) -> Advice:
    """Return how many workers keep a trainer busy, and how many records in flight keep the workers busy.

    Args:
        preprocess_s: Seconds that one sample takes in a worker: `stats()["mean_preprocess_s"]`.
        train_s: Seconds that one sample takes to train: `stats()["mean_train_s"]`.
        workers: How many there are now; never fewer are advised, since another epoch may need them.

    Raises:
        ConfigError: A time is not positive, or `workers` is not at least 1.
    """
    for name, value in (("preprocess_s", preprocess_s), ("train_s", train_s)):
        if not value > 0 or math.isinf(value):
            raise ConfigError(f"suggest_async_config({name}=)", expected="a positive number of seconds", got=value, do="measure it first")
    if workers < 1:
        raise ConfigError("suggest_async_config(workers=)", expected="at least 1", got=workers, do="pass the number of workers now")
    ratio = preprocess_s / train_s
    needed = max(workers, math.ceil(ratio))
    if ratio > _MUCH:
        return Advice(needed, 2 * needed, f"preprocessing takes {ratio:.1f} times as long as training: more workers first")
    if ratio < 1 / _MUCH:
        return Advice(needed, needed, f"training takes {1 / ratio:.1f} times as long as preprocessing: more in flight gains nothing")
    return Advice(needed, 2 * needed, "both take about as long: a buffer of twice the workers evens out what varies")
