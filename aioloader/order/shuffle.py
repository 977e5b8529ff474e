"""The options of a shuffle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from aioloader.errors import ConfigError
from aioloader.order.permutation import ORDER_VERSION
from aioloader.protocols import Json

__all__ = ["Shuffle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Hands out records in another order in every epoch, which is the same for every topology.

    What is mixed depends on whether the source knows how many records it has:

        indexed    shards in random order    [s7 s2 s9] [s0 s4 s1] ...    shards_in_window = 3, records are mixed inside [ ]
        stream     records as they come      [r0 ... r8191] [r8192 ...    window = 8192, records are mixed inside [ ]

    An indexed source needs the shards of one window open at once. Shards share a window with others in each epoch. With
    `shards_in_window=None`, all shards are one window: any order is as likely as any other, and every record is a read from anywhere.

    A stream holds up to `window` records, and a record moves no further than that: data that are sorted stay so at large. Write the
    records of a stream in a random order.

    `aioloader.order.quality` measures how well an order mixes.

    Attributes:
        window: Records of a stream that are mixed with each other; resume reads no more than that again. Not used on indexed sources.
        shards_in_window: The most shards of an indexed source that are mixed with each other, or None for all. The default, 16, has at
            most 16 shards open. Batches of 16 from a thousand shards then come from 0.65 times as many shards as with None, batches
            of 64 from 0.25 times as many: raise it if shards differ much from each other. Not used on streams.
        seed: Decides the order, with the epoch; None takes the loader's seed.

    Raises:
        ConfigError: A size is not an integer of 1 or more, or the seed is not an integer.
    """

    window: int = 8192
    shards_in_window: int | None = 16
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _check_size("Shuffle(window=)", self.window, "an integer, 1 or more", "give the number of records to mix, or shuffle=None for none")
        if self.shards_in_window is not None:
            expected = "an integer, 1 or more, or None"
            _check_size("Shuffle(shards_in_window=)", self.shards_in_window, expected, "give the number of shards to mix, None for all")
        if self.seed is not None and not _is_integer(self.seed):
            raise ConfigError("Shuffle(seed=)", expected="an integer or None", got=repr(self.seed), do="leave it out to use the loader's")

    def seed_or(self, seed: int) -> int:
        """Return the shuffle's own seed, or `seed` (the loader's) if it has none."""
        return seed if self.seed is None else self.seed

    def fingerprint(self) -> dict[str, Json]:
        """Return what decides the order besides the epoch, the data, and the loader's seed."""
        return {
            "kind": "Shuffle",
            "version": ORDER_VERSION,
            "window": self.window,
            "shards_in_window": self.shards_in_window,
            "seed": self.seed,
        }


def _check_size(where: str, size: object, expected: str, do: str) -> None:
    if not _is_integer(size) or size < 1:
        raise ConfigError(where, expected=expected, got=repr(size), do=do)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
