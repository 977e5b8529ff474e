"""The options of a shuffle are checked once, and say what decides the order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.order.shuffle import Shuffle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"Shuffle\(window=\): expected an integer, 1 or more, got 0; give .* shuffle=None"),
        ({"window": 2.0}, r"Shuffle\(window=\): .* got 2\.0"),
        ({"window": True}, r"Shuffle\(window=\): .* got True"),
        ({"window": None}, r"Shuffle\(window=\): .* got None"),
        ({"shards_in_window": 0}, r"Shuffle\(shards_in_window=\): expected an integer, 1 or more, or None, got 0; give .* None for all"),
        ({"shards_in_window": "8"}, r"Shuffle\(shards_in_window=\): .* got '8'"),
        ({"seed": 1.5}, r"Shuffle\(seed=\): expected an integer or None, got 1\.5; leave it out"),
        ({"seed": False}, r"Shuffle\(seed=\): .* got False"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shuffle(**options)


def test_its_own_seed_goes_before_the_loaders() -> None:
    assert Shuffle().seed_or(5) == 5
    assert Shuffle(seed=0).seed_or(5) == 0


def test_the_fingerprint_is_json_and_differs_with_every_option() -> None:
    variants = [Shuffle(), Shuffle(window=2), Shuffle(shards_in_window=None), Shuffle(seed=1)]
    texts = {json.dumps(shuffle.fingerprint()) for shuffle in variants}
    assert len(texts) == len(variants)
    assert Shuffle().fingerprint() == {"kind": "Shuffle", "version": 1, "window": 8192, "shards_in_window": 16, "seed": None}
    assert json.loads(json.dumps(Shuffle().fingerprint())) == Shuffle().fingerprint()
