"""Loops of several ranks that are left, given up, failed and begun again; what looks like a misfit of ranks and is none.

The ranks of test_contract_mesh.py: 0 and 1 are peers, and 2 and 3.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from aioloader import ConfigError, Loader, Mesh
from tests.contract import peer_cases
from tests.contract.mesh_cases import make
from tests.contract.uneven import NUM_RECORDS, as_field, uneven
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(120)

KEPT = sorted(number for number in range(NUM_RECORDS) if uneven(number) is not None)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_cases("tests.contract.peer_cases", tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def whole() -> list[list[list[int]]]:
    """What each of the two data-parallel ranks delivers: all there is before the first lane ends."""
    found = []
    for dp_rank in range(2):
        with make(mesh=Mesh(dp_rank=dp_rank, dp_size=2), preprocess=uneven, collate=as_field) as loader:
            found.append(peer_cases.numbers(loader)[:15])
    return found


def of(found: Any, name: str) -> list[Any]:
    return [rank[name] for rank in found]


def test_a_loop_that_failed_on_some_ranks_is_begun_again_on_all(found: Any, whole: Any) -> None:
    """Those that failed have begun one check more than those that were told so."""
    for rank, (failed, again) in enumerate(of(found, "begun_again")):
        assert failed.startswith("PreprocessError" if rank < 2 else "SynchronizationError: end of data: expected all ranks to go on")
        assert again == whole[rank // 2]


def test_ranks_whose_loop_the_others_left_are_told(found: Any, whole: Any) -> None:
    for rank, (left, whole_loop) in enumerate(of(found, "left_apart")):
        assert left == whole[rank // 2][:9] if rank < 2 else "begin and leave loops on all ranks alike" in left
        assert whole_loop == whole[rank // 2]


def test_two_loaders_take_turns(found: Any, whole: Any) -> None:
    for rank, (first, start, padded) in enumerate(of(found, "in_turns")):
        assert first == whole[rank // 2]
        assert start == padded[:2]
    both = [itertools.chain.from_iterable(of(found, "in_turns")[rank][2]) for rank in (0, 2)]
    assert sorted(itertools.chain(*both)) == [number + 1000 for number in range(NUM_RECORDS) if uneven(number + 1000) is not None]


def test_peers_that_gave_up_waiting_go_on_in_the_next_loop(found: Any, whole: Any) -> None:
    assert of(found, "given_up") == [whole[0], whole[0], whole[1], whole[1]]


def test_peers_resume_each_from_its_own_state(found: Any, whole: Any) -> None:
    """How far ahead a source was read is a matter of timing."""
    for rank, (first, rest) in enumerate(of(found, "from_own_states")):
        assert first + rest == whole[rank // 2]


def test_records_of_different_ranks_may_have_one_name(found: Any) -> None:
    for rank, (split, few) in enumerate(of(found, "one_name")):
        assert sorted(itertools.chain.from_iterable(split)) == list(range(1000 * (rank // 2), 1000 * (rank // 2) + 24))
        assert [len(batch) for batch in few] == [2]


def test_ranks_of_a_larger_mesh_are_played_alone(found: Any) -> None:
    played = itertools.chain.from_iterable(of(found, "played"))
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(played))) == KEPT


def test_loaders_that_nobody_closes_leave_nothing_behind(found: Any) -> None:
    for descriptors in of(found, "never_closed"):
        assert descriptors[-1] - descriptors[1] < 30, "the groups of a loader take ten or more"


@pytest.mark.parametrize("device", ["meta", "no such device"])
def test_micro_batches_travel_where_groups_can_send_to(device: str) -> None:
    loader: Loader = make(mesh=Mesh(tp_size=2), read="group", read_device=device)
    with loader, pytest.raises(ConfigError, match=r"Loader\(read_device=\): expected 'cpu'"):
        next(iter(loader))
