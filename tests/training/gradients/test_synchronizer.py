"""GradientSynchronizer: the average on every rank, one round a step, the same collectives whatever was used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from tests.training.gradient_cases import network, network_loss
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.training.gradient_cases", tmp_path_factory.mktemp("gradients"))


@pytest.fixture
def ranks(results: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results["two_ranks"]
    return found


def difference(found: dict[str, Any], expected: dict[str, Any], scale: float) -> float:
    """Return the largest difference, relative to the largest gradient of each parameter."""
    pairs = [(torch.tensor(found[name]).double() * scale, torch.tensor(expected[name]).double()) for name in expected]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("buckets", ["one", "many"])
def test_accumulated_gradients_equal_those_of_one_process(results: dict[str, Any], ranks: list[dict[str, Any]], buckets: str) -> None:
    expected = results["reference"]["gradients"]
    for rank in ranks:
        assert difference(rank["accumulation"][buckets]["gradients"], expected, scale=2.0) < 1e-6


def test_gradients_are_the_same_bits_on_all_ranks_and_in_every_run(ranks: list[dict[str, Any]]) -> None:
    found = [rank["accumulation"][name]["gradients"] for rank in ranks for name in ("one", "again", "many")]
    assert all(other == found[0] for other in found)


def test_one_round_whatever_the_number_of_micro_batches(results: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in network().parameters())
    for rank in ranks:
        assert rank["accumulation"]["one"]["num_rounds"] == 1
        assert rank["accumulation"]["one"]["num_bytes"] == num_bytes
        assert rank["accumulation"]["many"]["num_bytes"] == num_bytes


def test_bfloat16_on_the_wire_halves_the_bytes(results: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    narrow, wide = ranks[0]["accumulation"]["bf16"], ranks[0]["accumulation"]["one"]
    assert 2 * narrow["num_bytes"] == wide["num_bytes"]
    assert narrow["gradients"] == ranks[1]["accumulation"]["bf16"]["gradients"]
    assert 0 < difference(narrow["gradients"], wide["gradients"], scale=1.0) < 2**-6


def test_losses_hardly_drift_with_bfloat16_on_the_wire(ranks: list[dict[str, Any]]) -> None:
    """C061: 50 steps with half of the bytes."""
    wide, narrow = (torch.tensor([rank["drift"][name]["losses"] for rank in ranks]).mean(0) for name in ("float32", "bfloat16"))
    assert wide[-10:].mean() < 0.9 * wide[:10].mean(), "it trains"
    drift = (wide - narrow).abs() / wide
    assert 0 < drift.max() < 1e-3
    assert ranks[0]["drift"]["float32"]["num_bytes"] == 2 * ranks[0]["drift"]["bfloat16"]["num_bytes"]


def test_only_the_last_micro_batch_communicates(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["last_micro_batch_only"]
        assert found["gradients"] == {"p": [16.5]}
        (first_calls, first_rounds), (calls, rounds) = found["seen"]
        assert (first_calls, first_rounds) == (0, 0)
        assert calls == 3  # the comparison of models, once; one bucket; the usage map
        assert rounds == 1


def test_a_parameter_used_on_one_rank_is_averaged_on_both(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["uneven_use"]["gradients"] == {"here": [2.0], "both": [0.5], "nowhere": None}
        assert rank["uneven_use"]["parameters"] == {"here": [-2.0], "both": [-0.5], "nowhere": [0.0, 0.0]}
        assert rank["no_gradient_at_all"] == {"p": [2.0]}


def test_clipping_follows_synchronization(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["clip"]
        for kind, message in found["refused"]:
            assert kind == "ConfigError"
            assert (
                message
                == "clip_grad_norm(): expected synchronized gradients, got an open accumulation window; call sync_gradients() first."
            )
        assert found["norm"] == pytest.approx((1.5**2 + 2.5**2) ** 0.5, rel=1e-6)
        assert found["parameters"] == ranks[0]["clip"]["parameters"]
        assert torch.tensor(found["parameters"]).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_half_precision_does_not_overflow(results: dict[str, Any]) -> None:
    for rank in results["half_precision"]:
        assert rank["float16"] == {"values": [30_000.0], "dtype": "torch.float16"}
        assert rank["bfloat16"]["dtype"] == "torch.bfloat16"
        assert rank["bfloat16"]["values"] == [pytest.approx(30_000.0, rel=2**-7)]
        assert rank["float32 over float16"] == {"values": [60_000.0], "dtype": "torch.float32"}


def test_tied_parameters_count_once_and_frozen_ones_not_at_all(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["tied_and_frozen"] == {"gradient": [1.5], "frozen": [float(number)], "num_bytes": 64}


@pytest.mark.parametrize(
    ("case", "kind", "parts"),
    [
        ("sparse", "ConfigError", ["gradient of p: expected dense gradients, got sparse ones"]),
        ("changed", "ConfigError", ["got 1 that were frozen, unfrozen or exchanged since; make a new GradientSynchronizer"]),
        ("other_model", "SynchronizationError", ["sync_gradients, step 0", "build the same model on every rank"]),
    ],
)
def test_what_would_go_wrong_silently_is_refused(ranks: list[dict[str, Any]], case: str, kind: str, parts: list[str]) -> None:
    for rank in ranks:
        assert rank["refusals"][case][0] == kind
        assert all(part in rank["refusals"][case][1] for part in parts)


def test_a_missing_rank_ends_the_wait_with_its_circumstances(results: dict[str, Any]) -> None:
    found = results["missing_rank"][0]
    kind, message = found["refused"]
    assert kind == "SynchronizationError"
    assert message.startswith("sync_gradients, step 17, bucket 1 of 1 (float32[3], p): on dp_rank 0: expected all 2 data-parallel ranks")
    assert "got no sign of dp_rank 1 within 0.5 s" in message
    assert found["gradients"] == {"p": None}  # half an average cannot be applied
    assert found["num_rounds"] == 1


def test_broadcast_gives_all_ranks_the_model_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["same_start"] for rank in ranks)
    assert first["own"] != second["own"]
    assert first["after"] == second["after"] == first["own"]


def test_alone_nothing_is_communicated() -> None:
    model = network()
    synchronizer = GradientSynchronizer(model, Mesh())  # there is no process group: any collective would raise
    synchronizer.broadcast_model()
    network_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    synchronizer.sync_gradients()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(other is not None and torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (synchronizer.num_rounds, synchronizer.num_bytes) == (0, 0)
    assert synchronizer.clip_grad_norm() == pytest.approx(float(torch.cat([grad.flatten() for grad in before]).norm()))


def test_complex_gradients_do_not_travel_as_real_ones() -> None:
    model = nn.ParameterDict({"p": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    with pytest.raises(ConfigError, match=r"comm_dtype: expected parameters of real numbers, got torch\.complex64 for p; leave it"):
        GradientSynchronizer(model, Mesh(), comm_dtype=torch.bfloat16)


def test_repr_shows_live_counts() -> None:
    found = repr(GradientSynchronizer(network(), Mesh()))
    assert found == "GradientSynchronizer(a single rank, parameters=5, buckets=1, num_rounds=0, num_bytes=0)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes: expected 1 or more, got 0"),
        ({"comm_dtype": torch.int32}, "comm_dtype: expected a floating-point dtype, got torch.int32"),
        ({"timeout_s": 0}, "timeout_s: expected a number of seconds above 0, got 0"),
        ({"mesh": Mesh(dp_size=2)}, "expected a process group for dp_size 2, got none in this process"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSynchronizer(network(), **{"mesh": Mesh(), **options})
