"""Training runs of real ranks: the gradient of the global batch, stopping together, exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.ranks import run_cases
from tests.training.training_cases import NUM_STEPS

pytestmark = pytest.mark.timeout(90)

STEP, LOSS, GRAD_NORM, LR, NUM_TOKENS, NUM_TARGETS, SKIPPED = range(7)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.training.training_cases", tmp_path_factory.mktemp("runs"))


def test_two_ranks_train_like_one(results: dict[str, Any]) -> None:
    alone, (first, second) = results["one_rank"][0], results["two_ranks"]
    assert [rank["error"] for rank in (alone, first, second)] == [None] * 3
    assert first["reports"] == second["reports"]
    assert first["parameters"] == second["parameters"]
    for one, two in zip(alone["reports"], first["reports"], strict=True):
        assert two == pytest.approx(one, rel=1e-5)
        assert two[NUM_TOKENS : SKIPPED + 1] == one[NUM_TOKENS : SKIPPED + 1]
    for name, value in alone["parameters"].items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name]), torch.tensor(value), rtol=1e-4, atol=1e-5)


def test_training_changes_something(results: dict[str, Any]) -> None:
    reports = results["two_ranks"][0]["reports"]
    assert len(reports) == NUM_STEPS
    assert reports[-1][LOSS] < reports[0][LOSS]
    assert reports[-1][LR] < reports[0][LR]


def test_each_rank_reports_its_own_records(results: dict[str, Any]) -> None:
    first, second = (rank["records"] for rank in results["two_ranks"])
    assert first[0] == [["fake", 0], ["fake", 2]]
    assert second[0] == [["fake", 1], ["fake", 3]]
    assert all(rank["times_fit"] for rank in results["two_ranks"])


def test_the_loss_is_weighted_by_tokens_however_samples_are_cut(results: dict[str, Any]) -> None:
    for rank in results["token_weighted"]:
        for loss, gradient, num_targets in rank:
            assert (loss, gradient, num_targets) == (1.6, pytest.approx(1.6, rel=1e-6), 20)


def test_a_run_that_was_interrupted_continues_bit_for_bit(results: dict[str, Any]) -> None:
    whole = results["two_ranks"]
    for rank in range(2):
        first, second = results["first_half"][rank], results["second_half"][rank]
        assert first["result"] == {"step": 5, "num_steps": 5, "stopped_by": "max_steps"}
        assert second["result"] == {"step": 10, "num_steps": 5, "stopped_by": "max_steps"}
        assert first["reports"] + second["reports"] == whole[rank]["reports"]
        assert first["records"] + second["records"] == whole[rank]["records"]
        assert second["parameters"] == whole[rank]["parameters"]


def test_checkpoints_are_kept_as_asked(results: dict[str, Any]) -> None:
    assert results["names"] == ["step_00000004", "step_00000005"]


def test_another_number_of_ranks_is_refused(results: dict[str, Any]) -> None:
    kind, message, _ = results["other_size"][0]["error"]
    assert kind == "ResumeError"
    assert "Saved by dp_size 2, this run has 1; restart with 2 ranks." in message
    assert results["other_size"][0]["num_closed"] == 1


def test_ranks_with_unequal_data_stop_together(results: dict[str, Any]) -> None:
    first, second = results["uneven"]
    assert first["result"] == second["result"] == {"step": 2, "num_steps": 2, "stopped_by": "data"}
    assert first["reports"] == second["reports"] == results["two_ranks"][0]["reports"][:2]
    assert first["parameters"] == second["parameters"]
    assert not first["has_gradients"]
    assert not second["has_gradients"]
    assert results["uneven_names"] == ["step_00000002"]


def test_sigterm_to_one_rank_stops_all_after_a_step_and_saves(results: dict[str, Any]) -> None:
    for rank in results["sigterm"]:
        assert rank["result"] == {"step": 4, "num_steps": 4, "stopped_by": "signal"}
        assert rank["handler_restored"]
    assert results["sigterm_names"] == ["step_00000004"]


def test_a_failing_loader_is_raised_here_and_named_elsewhere(results: dict[str, Any]) -> None:
    first, second = results["failing_upstream"]
    assert second["error"] == ["OSError", "the upstream failed", []]
    assert first["error"][0] == "SynchronizationError"
    assert first["error"][1].startswith("counts of step 2: on dp_rank 0: expected all 2 data-parallel ranks to take part")
    assert (first["num_closed"], second["num_closed"]) == (1, 1)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_checkpoint(results: dict[str, Any]) -> None:
    first, second = results["failing_save"]
    assert first["failure"][0] == "SynchronizationError"
    assert "dp_rank [1] failed" in first["failure"][1]
    assert first["failure"][2] == [1]
    assert second["failure"][:2] == [
        "ConfigError",
        "checkpoint, loader_dp00001.json: expected data that JSON keeps unchanged, got a value that comes back changed; "
        "use dicts with string keys, lists, strings and numbers.",
    ]
    for rank in (first, second):
        assert rank["latest"] == "step_00000001"
        assert rank["states"] == [{"rank": 0}, {"rank": 1}]
        assert rank["names"] == ["step_00000001", "step_00000003"]
