from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.drawer import RecordDrawer
from aioloader.order.mixture import Mixture
from aioloader.order.schedule import Ramp, Steps


class Files:
    def fingerprint(self) -> Mapping[str, Any]:
        return {"files": ["a.jsonl"]}


SOURCES: dict[str, tuple[Any, float]] = {"code": (Files(), 0.3), "web": ("not resolved", 0.7)}
HALF = {"code": 0.5, "web": 0.5}


def test_weights_of_the_sources_hold_until_the_schedule_has_a_point() -> None:
    assert Mixture(SOURCES).points == ((0, {"code": 0.3, "web": 0.7}),)
    assert Mixture(SOURCES, schedule=Ramp([(100, HALF)])).points == ((0, {"code": 0.3, "web": 0.7}), (100, HALF))
    assert Mixture(SOURCES, schedule=Steps([(0, HALF)])).points == ((0, HALF),)


def test_the_names_of_a_schedule_may_come_in_any_order() -> None:
    turned = Mixture(SOURCES, schedule=Steps([(0, {"web": 0.7, "code": 0.3})]))
    assert [list(weights) for _, weights in turned.points] == [["code", "web"]]
    assert RecordDrawer(turned).draw(30) == RecordDrawer(Mixture(SOURCES)).draw(30)


@settings(max_examples=30)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8))
def test_counts_stay_within_one_record_of_the_weights_as_given(weights: list[float]) -> None:
    mixture = Mixture({f"s{number}": (None, weight) for number, weight in enumerate(weights)})
    counts = [0] * len(weights)
    for position, source in enumerate(RecordDrawer(mixture).draw(400), start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - position * weight / sum(weights)) < 1


def test_the_fingerprint_is_json_and_tells_what_decides_the_order() -> None:
    mixture = Mixture(SOURCES, schedule=Ramp([(9, HALF)]), stop="repeat", repeats={"code": 2})
    fingerprint = mixture.fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint == {
        "kind": "Mixture",
        "sources": [["code", {"files": ["a.jsonl"]}], ["web", None]],
        "schedule": "Ramp",
        "unit": "records",
        "points": [[0, {"code": 0.3, "web": 0.7}], [9, HALF]],
        "weigh": "records",
        "stop": "repeat",
        "repeats": {"code": 2},
    }


def test_every_option_and_the_order_of_the_sources_change_the_fingerprint() -> None:
    by_tokens: dict[str, Any] = {"weigh": "tokens", "length": len}
    mixtures = [
        Mixture(SOURCES),
        Mixture(dict(reversed(SOURCES.items()))),
        Mixture({**SOURCES, "web": ("not resolved", 0.8)}),
        Mixture(SOURCES, stop="repeat"),
        Mixture(SOURCES, repeats={"web": 3}),
        Mixture(SOURCES, schedule=Steps([(5, HALF)])),
        Mixture(SOURCES, schedule=Ramp([(5, HALF)])),
        Mixture(SOURCES, **by_tokens),
        Mixture(SOURCES, schedule=Ramp([(5, HALF)]), **by_tokens),
        Mixture(SOURCES, schedule=Ramp([(5, HALF)], unit="tokens"), **by_tokens),
    ]
    assert len({json.dumps(mixture.fingerprint()) for mixture in mixtures}) == len(mixtures)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({}, {}, r"Mixture\(sources\): expected a dict from a name to \(source, weight\), got {}"),
        (["code"], {}, r"Mixture\(sources\): expected a dict from a name to \(source, weight\), got \['code'\]"),
        ({"code": 0.3}, {}, r"Mixture\(sources\): expected a dict .*, got 'code': 0.3; use e.g."),
        ({"": (None, 1)}, {}, r"Mixture\(sources\): expected a dict .*, got '': \(None, 1\)"),
        ({"code": (None, -1)}, {}, r"Mixture\(sources\): expected a finite weight >= 0 for 'code', got -1"),
        ({"code": (None, 0)}, {}, r"Mixture\(sources\): expected a positive finite sum of weights, got 0.0"),
        (SOURCES, {"weigh": "bytes"}, r"Mixture\(weigh=\): expected one of 'records', 'tokens', got 'bytes'"),
        (SOURCES, {"stop": "never"}, r"Mixture\(stop=\): expected one of 'first_exhausted', 'all_exhausted', 'repeat', got 'never'"),
        (SOURCES, {"weigh": "tokens"}, r"Mixture\(length=\): expected a function from a record to its tokens, got None; give e.g."),
        (SOURCES, {"length": len}, r"Mixture\(length=\): expected None with weigh='records', got .*; use weigh='tokens'"),
        (SOURCES, {"repeats": {"math": 2}}, r"Mixture\(repeats=\): expected names among 'code', 'web', got 'math'"),
        (SOURCES, {"repeats": {"web": 0}}, r"Mixture\(repeats=\) of 'web': expected an int >= 1, got 0"),
        (SOURCES, {"schedule": [(0, HALF)]}, r"Mixture\(schedule=\): expected Steps, Ramp or None, got \[\(0"),
        (SOURCES, {"schedule": Steps([(0, {"code": 1})])}, r"Mixture\(schedule=\): expected weights of 'code', 'web', got without 'web'"),
        (SOURCES, {"schedule": Ramp([(0, {**HALF, "x": 1})])}, r"Mixture\(schedule=\): .* got with unknown 'x'"),
        (SOURCES, {"schedule": Ramp([(0, HALF)], unit="tokens")}, r"Mixture\(schedule=\): expected unit='records' with weigh='records'"),
    ],
)
def test_wrong_options_are_refused(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(sources, **options)
