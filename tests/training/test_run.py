"""Training runs of real ranks: the gradient of the global batch, stopping together, exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioloader.training.loss import causal_lm_loss
from tests.training.fake_loader import TinyModel, language_batches
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
    assert first["error"][1:] == [
        "step 2: expected all 2 ranks to succeed, dp_rank [1] failed; look for the error in the log of that rank",
        [1],
    ]
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


def test_a_failing_model_is_raised_here_and_named_elsewhere_at_once(results: dict[str, Any]) -> None:
    first, second = results["failing_model"]
    assert second["error"] == ["ArithmeticError", "in the model", []]
    assert first["error"][0] == "SynchronizationError"
    assert first["error"][1].startswith("step 2: expected all 2 ranks to succeed, dp_rank [1] failed")
    assert first["error"][2] == [1]
    assert max(first["seconds"], second["seconds"]) < 10  # the deadline is 20 s


def test_evaluation_adds_up_uneven_ranks_and_leaves_no_trace(results: dict[str, Any]) -> None:
    expected = results["two_ranks"]
    for rank, plain in zip(results["observed"], expected, strict=True):
        assert rank["error"] is None
        assert rank["reports"] == plain["reports"]
        assert rank["parameters"] == plain["parameters"]
        assert [step for step, _, _ in rank["evaluations"]] == [5, 10]
        assert [count for _, _, count in rank["evaluations"]] == [5, 5]
    first, second = results["observed"]
    assert first["evaluations"] == second["evaluations"]

    model = TinyModel()
    model.load_state_dict({name: torch.tensor(value) for name, value in first["parameters"].items()})
    with torch.no_grad():
        pairs = [causal_lm_loss(model, batch) for batch in language_batches(65)[60:]]
    loss = sum(float(loss) for loss, _ in pairs) / sum(int(count) for _, count in pairs)
    assert first["evaluations"][-1][1] == pytest.approx(loss, rel=1e-6)


def test_a_slow_rank_is_named_on_all_and_logged_once(results: dict[str, Any]) -> None:
    first, second = results["observed"]
    assert first["ranks"] == second["ranks"] == [[4, [0, 1], [1]], [8, [0, 1], [1]]]  # B062, B098
    assert second["warnings"] == []
    assert len(first["warnings"]) == 2
    assert first["warnings"][0].startswith("step 4: dp_rank 1 is slow: 0.")


def test_padding_and_losses_are_reported(results: dict[str, Any]) -> None:
    first, second = results["two_ranks"]
    batches = language_batches(40)
    assert first["padding"] == second["padding"] == [sum(one.num_padding for one in batches[step * 4 : step * 4 + 4]) for step in range(10)]
    assert first["losses"] == [2] * 10


def test_an_evaluation_that_fails_on_one_rank_is_named_on_the_other(results: dict[str, Any]) -> None:
    first, second = results["failing_evaluation"]
    assert second["error"] == ["OSError", "the upstream failed", []]
    assert first["error"][1].startswith("evaluate: expected all 2 ranks to succeed, dp_rank [1] failed")


def test_checkpoints_written_in_the_background_continue_bit_for_bit(results: dict[str, Any]) -> None:
    assert results["background_names"] == ["step_00000004", "step_00000005"]
    for rank in range(2):
        first, second, whole = (results[name][rank] for name in ("background_half", "background_resumed", "two_ranks"))
        assert first["reports"] + second["reports"] == whole["reports"]
        assert second["parameters"] == whole["parameters"]


def test_a_save_in_the_background_that_fails_on_one_rank_ends_all(results: dict[str, Any]) -> None:
    first, second = results["failing_background"]
    assert second["error"][0] == "ConfigError"
    assert "loader_dp00001.json: expected data that JSON keeps unchanged" in second["error"][1]
    assert (first["error"][0], first["error"][2]) == ("SynchronizationError", [1])
    assert all(2 <= len(rank["reports"]) <= 3 for rank in (first, second))
    assert [name for name in results["unsaved_names"] if not name.startswith(".")] == ["step_00000001"]
