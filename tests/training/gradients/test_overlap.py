"""Buckets leave during backward: the same averages, in the same order on all ranks, whatever happens in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.gradient_cases import gradients, network, network_loss
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.training.overlap_cases", tmp_path_factory.mktemp("overlap"))


@pytest.fixture
def ranks(results: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results["two_ranks"]
    return found


def mean_of(indexes: list[int], num_ranks: int = 2) -> dict[str, Any]:
    """Return the gradients that one process has of these micro-batches, over the number of ranks."""
    model = network()
    for index in indexes:
        (network_loss(model, index) / num_ranks).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-5, atol=1e-6)


def test_all_buckets_are_sent_before_backward_ends(ranks: list[dict[str, Any]]) -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in network().parameters())
    for rank in ranks:
        for step, found in enumerate(rank["sent_by_backward"]["steps"]):
            assert (found["sent"], found["rest"]) == (num_bytes, 0)
            assert found["gradients"] == ranks[0]["sent_by_backward"]["steps"][step]["gradients"]
            assert_close(found["gradients"], mean_of([4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3]))


def test_time_of_communication_is_told_apart_from_time_waited(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, measured = rank["sent_by_backward"], rank["sent_by_backward"]["measured"]
        assert found["rounds"] == 3
        assert measured["exposed_s"] > 0
        assert measured["communication_s"] > 0
        assert measured["overlap"] == pytest.approx(max(0.0, 1 - measured["exposed_s"] / measured["communication_s"]))


def test_several_backwards_without_no_sync_give_the_same_averages(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["several_backwards"]["gradients"] == ranks[0]["several_backwards"]["gradients"]
        assert rank["several_backwards"]["num_late_buckets"] == 5  # all are sent by the first backward, and again at the end
        assert_close(rank["several_backwards"]["gradients"], mean_of(list(range(8))))


def test_what_is_late_on_one_rank_is_sent_again_by_all(ranks: list[dict[str, Any]]) -> None:
    assert [rank["late_on_one_rank"] for rank in ranks] == 2 * [{"p": [3.0], "q": [1.0], "num_late_buckets": 1}]


def test_collectives_of_the_training_loop_may_come_between(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["other_collectives_between"] == 2 * [{"first": [2.0], "last": [0.5], "total": [3.0]}]


def test_a_parameter_used_only_under_no_sync_is_included(ranks: list[dict[str, Any]]) -> None:
    assert [rank["only_under_no_sync"] for rank in ranks] == 2 * [{"early": [1.5], "always": [2.0]}]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_a_tied_parameter_in_checkpointed_segments_counts_in_full(ranks: list[dict[str, Any]], kind: str) -> None:
    assert all(rank["tied_in_checkpoints"][kind] < 1e-6 for rank in ranks)


def test_a_compiled_model_is_synchronized_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["compiled"]["sent"] == 4 * sum(parameter.numel() for parameter in network().parameters())
        assert_close(rank["compiled"]["gradients"], mean_of([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("case", "there", "here"),
    [
        (
            "failed_and_synchronized",
            "got an error in the gradients of dp_rank 1",
            "got one that ended in an error; call discard_gradients()",
        ),
        ("failed_and_discarded", "got dp_rank 1 discarding its step", ""),
        ("failed_at_first", "got an error in the gradients of dp_rank 1", "got one that ended in an error; call discard_gradients()"),
    ],
)
def test_an_error_in_backward_ends_the_step_on_all_ranks(ranks: list[dict[str, Any]], case: str, there: str, here: str) -> None:
    first, second = (rank[case] for rank in ranks)
    assert first["refused"][0] == "SynchronizationError"
    assert first["refused"][1].startswith("sync_gradients, step 5: on dp_rank 0: expected the gradients of all 2 ranks")
    assert there in first["refused"][1]
    assert second["refused"][0] == ("ConfigError" if here else "nothing")
    assert here in second["refused"][1]
    for found in (first, second):
        assert found["dropped"] == {"first": None, "last": None}
        assert found["gradients"] == {"first": [2.0], "last": [0.5]}  # the next step is not touched by it


def test_a_model_that_is_frozen_while_another_learns_through_it_gets_its_own_gradients_only(ranks: list[dict[str, Any]]) -> None:
    assert [rank["generator_step"] for rank in ranks] == 2 * [{"p": [1.5]}]


def test_discarded_gradients_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["discarded_by_all"]["dropped"]
        assert_close(rank["discarded_by_all"]["gradients"], mean_of([0, 1]))


def test_a_sparse_gradient_on_one_rank_ends_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["sparse_on_one_rank"]["refused"][0] == "SynchronizationError"
    assert ranks[1]["sparse_on_one_rank"]["refused"] == [
        "ConfigError",
        "gradient of p: expected dense gradients, got sparse ones; make the embedding with sparse=False.",
    ]
    assert all(rank["sparse_on_one_rank"]["gradients"] == {"p": [1.0, 1.0, 1.0]} for rank in ranks)


def test_gradients_keep_the_memory_format_of_their_parameters(ranks: list[dict[str, Any]]) -> None:
    assert [rank["channels_last"] for rank in ranks] == [{"kept": True, "ratio": 1.5}, {"kept": True, "ratio": 0.75}]


def test_a_second_synchronizer_takes_over(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["taken_over"]["refused"][0] == "ConfigError"
        assert "use the GradientSynchronizer made last for this model" in rank["taken_over"]["refused"][1]
        assert_close(rank["taken_over"]["gradients"], mean_of([0, 1]))


def test_without_synchronization_replicas_differ(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["not_synchronized"] for rank in ranks)
    assert first["with"] == second["with"]
    assert first["without"] != second["without"]


def test_wide_sums_of_narrow_gradients_are_exact(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, itemsize in (("float32", 4), ("bf16 wire", 2)):
            found = rank["wide_sums"][name]
            assert found["during"]
            assert found["averages"] == [[True, "torch.float32", [768.0, 768.0]]]  # 512 x 1 and 512 x 2
            assert found["norm"] == pytest.approx(768 * 2**0.5)
            assert found["clipped"] == [pytest.approx(1.0)]
            assert found["own"] == ["torch.bfloat16", pytest.approx(1.0, rel=2**-8)]
            assert found["num_bytes"] == 2 * itemsize
            assert found["next"] == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("sharded", "layer 0: expected plain parameters, whole on every data-parallel rank, got one that is sharded by fully_shard"),
        ("lone", "parameter p: expected plain parameters, whole on every data-parallel rank, got a DTensor"),
        ("wrapped", "layer model: expected plain parameters, whole on every data-parallel rank, got one that is wrapped in Distributed"),
    ],
)
def test_models_that_something_else_synchronizes_are_refused(ranks: list[dict[str, Any]], kind: str, got: str) -> None:
    for rank in ranks:
        assert rank["refused_models"][kind][0] == "ConfigError"
        assert rank["refused_models"][kind][1].startswith(got)
        assert "leave GradientSynchronizer out: FSDP, DDP and DTensor synchronize" in rank["refused_models"][kind][1]


def test_accumulation_divides_the_bytes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (bytes_1, rounds_1), (bytes_4, rounds_4), (bytes_8, rounds_8) = (rank["bytes_of"][key] for key in ("1", "4", "8"))
        assert (rounds_1, rounds_4, rounds_8) == (8, 2, 1)
        assert bytes_1 == 4 * bytes_4 == 8 * bytes_8 > 0


def test_ranks_that_wait_for_different_things_are_told_so(results: dict[str, Any]) -> None:
    first, second = results["elsewhere"]
    assert first[0] == second[0] == "SynchronizationError"
    assert first[1].startswith("sync_gradients, step 4, bucket 1 of 1 (float32[3], p): on dp_rank 0:")
    assert "got dp_rank 1 waiting in 'counts of step 4'" in first[1]
    assert "got dp_rank 0 waiting in 'sync_gradients, step 4, bucket 1 of 1 (float32[3], p)'" in second[1]
