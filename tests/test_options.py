"""The loader's arguments: what is right passes unchanged, what is wrong is named."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import options
from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh


@given(value=st.integers(), at_least=st.integers(0, 5))
def test_an_int_passes_if_it_is_large_enough(value: int, at_least: int) -> None:
    if value >= at_least:
        assert options.check_int("where", value, at_least=at_least, do="do this") == value
    else:
        with pytest.raises(ConfigError, match=f"^where: expected an int of at least {at_least}, got {value}; do this.$"):
            options.check_int("where", value, at_least=at_least, do="do this")


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None, [2]])
def test_what_is_no_int_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="where: expected an int of at least 0, got"):
        options.check_int("where", value, at_least=0, do="do this")


def test_choices() -> None:
    assert options.check_choice("where", "b", ("a", "b")) == "b"
    for value in ("c", None, 3, ["a"]):
        with pytest.raises(ConfigError, match="where: expected one of 'a', 'b', got"):
            options.check_choice("where", value, ("a", "b"))


def test_callables() -> None:
    assert options.check_callable("where", len, expected="a function", do="give one") is len
    with pytest.raises(ConfigError, match="where: expected a function, got int 3; give one"):
        options.check_callable("where", 3, expected="a function", do="give one")


def test_what_is_still_to_come_says_so() -> None:
    error = options.not_yet("Loader(shuffle=)", expected="None", got=3)
    assert str(error) == "Loader(shuffle=): expected None (more is planned and not in this version yet), got 3; leave it out."


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (1 << 40, 1 << 40),
        ("7", 7),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        (" 1.5 KiB ", 1536),
        ("3kb", 3000),
        ("0.5MB", 500_000),
        ("1e3", 1000),
        ("1TB", 10**12),
    ],
)
def test_sizes(value: Any, nbytes: int) -> None:
    assert options.parse_bytes("where", value) == nbytes


@pytest.mark.parametrize(
    "value", [0, -1, True, 2.5, None, "", "GiB", "-2GiB", "0", "2 gigs", "2Gi", "1e999", "inf", "nan", "2GiB2", "1.2.3", b"2GiB"]
)
def test_sizes_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="where: expected a positive number of bytes"):
        options.parse_bytes("where", value)


@given(value=st.one_of(st.text(max_size=12), st.from_regex(r"[0-9.eE+-]{0,6} ?[kKmMgGtTiIbB]{0,3}", fullmatch=True)))
def test_any_text_is_a_size_or_refused(value: str) -> None:
    with contextlib.suppress(ConfigError):
        assert options.parse_bytes("where", value) > 0


@pytest.mark.parametrize(("ranks", "share"), [("1", 1), ("2", 2), ("1000", 1000), ("0", 1), ("", 1), ("two", 1), ("²", 1), ("-2", 1)])
def test_cpus_are_shared_between_local_ranks(monkeypatch: pytest.MonkeyPatch, ranks: str, share: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert options.default_workers() == max(1, len(os.sched_getaffinity(0)) // share)


def test_all_cpus_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert options.default_workers() == len(os.sched_getaffinity(0))


def test_lanes_default_to_the_ranks() -> None:
    lanes = options.lane_map(None, Mesh(dp_rank=1, dp_size=3))
    assert (lanes.num_lanes, list(lanes.served)) == (3, [1])
    assert list(options.lane_map(6, Mesh(dp_rank=1, dp_size=3)).served) == [1, 4]


@pytest.mark.parametrize("lanes", [0, -3, 4, True, 3.0, "3"])
def test_lanes_that_do_not_fit_are_refused(lanes: Any) -> None:
    with pytest.raises(ConfigError, match=r"Loader\(lanes=\): expected"):
        options.lane_map(lanes, Mesh(dp_rank=1, dp_size=3))
