"""MixedPrecisionManager: the same bits as a loop written by hand, on one rank and on two, from the start and after a resume."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioloader.errors import ConfigError, ResumeError
from aioloader.training.checkpoints.state_tree import join_state, split_state
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.precision.manager import MixedPrecisionManager
from aioloader.training.precision.masters import norm_or_router
from aioloader.training.precision.parts import fused_adamw
from aioloader.training.precision.transforms import ClipGradNorm, GradientStep, SkipNonFinite
from tests.training.gradient_cases import Weights, network
from tests.training.precision_cases import loss_of
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Layers this small run many times slower on several threads where other tests have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: Any = run_cases("tests.training.precision_cases", tmp_path_factory.mktemp("precision"))
    return list(found)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def sgd(named: Any) -> torch.optim.SGD:
    return torch.optim.SGD(named, lr=1.0)


def run(manager: MixedPrecisionManager, model: nn.Module, steps: range, dtype: torch.dtype = BF16) -> list[float]:
    losses = []
    for step in steps:
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch, dtype)
            manager.backward(loss)
        losses.append(float(loss.detach()))
        manager.step(gradient_scale=0.5)
    return losses


def reference(model: nn.Module, dtype: torch.dtype, num_steps: int) -> tuple[list[float], list[Tensor], list[float]]:
    """Train as the manager is to, written out: losses, masters and gradient norms."""
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.02, fused=True)
    scheduler = warm_up(optimizer)
    model = model.to(dtype)
    losses, norms = [], []
    for step in range(num_steps):
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch, dtype)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() * 0.5
            parameter.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters, 1.0)))
        optimizer.step()
        scheduler.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master.data)
    return losses, masters, norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twenty_steps_give_the_same_bits_as_a_loop_written_by_hand(dtype: torch.dtype) -> None:
    model = network()
    losses, masters, norms = reference(copy.deepcopy(model), dtype, 20)
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.02), compute_dtype=dtype, scheduler=warm_up)
    found_norms: list[float | None] = []
    found = []
    for step in range(20):
        found += run(manager, model, range(step, step + 1), dtype)
        assert manager.last_step is not None
        found_norms.append(manager.last_step.grad_norm)
    assert found == losses
    assert found_norms == norms
    assert all(torch.equal(one, other) for one, other in zip(manager.masters().values(), masters, strict=True))
    assert losses[-1] < losses[0]


def test_parameters_are_the_rounded_masters_and_gradients_are_gone_after_every_step() -> None:
    model = network()
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.02))
    places = [master.data_ptr() for master in manager.masters().values()]
    for step in range(3):
        run(manager, model, range(step, step + 1))
        masters = manager.masters()
        for name, parameter in model.named_parameters():
            assert (parameter.dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(parameter, masters[name].bfloat16())
            assert not torch.equal(parameter.float(), masters[name])
            assert parameter.grad is None
            assert masters[name].grad is None
    assert [master.data_ptr() for master in manager.masters().values()] == places


def test_masters_take_over_the_memory_of_float32_parameters() -> None:
    model = network()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.02))
    assert {name: master.data_ptr() for name, master in manager.masters().items()} == places


def test_updates_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    model = Weights(p=1)
    model.get_parameter("p").data.fill_(1.0)
    manager = MixedPrecisionManager(model, sgd, transforms=())
    for _ in range(8):
        model.get_parameter("p").grad = torch.full((1,), -(2.0**-10), dtype=BF16)
        manager.step()
    assert manager.masters()["p"].tolist() == [1.0 + 2.0**-7]
    assert model.get_parameter("p").tolist() == [1.0 + 2.0**-7]  # the next bfloat16 after 1; steps of 2**-10 never leave 1


def losses_of(order: Sequence[int], dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> list[float]:
    """Return the losses of 20 steps of four micro-batches, which come in this order, as they do when they are dealt to more ranks."""
    model = network()
    synchronizer = partial(GradientSynchronizer, accumulate_dtype=accumulate_dtype)
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.01), compute_dtype=dtype, synchronizer=synchronizer)
    assert manager.synchronizer is not None
    losses = []
    for step in range(20):
        found = {}
        for index in order:
            with manager.synchronizer.no_sync() if index != order[-1] else nullcontext():
                loss = loss_of(model, 4 * step + index, dtype)
                manager.backward(loss)
            found[index] = float(loss.detach())
        manager.synchronizer.sync_gradients()
        manager.step(gradient_scale=0.25)
        losses.append(math.fsum(found.values()) / 4)
    return losses


def test_float32_sums_of_bfloat16_gradients_do_not_depend_on_their_order_and_bfloat16_sums_do() -> None:
    def difference(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) / a for a, b in zip(one, other, strict=True))

    wide, narrow = ([losses_of(order, BF16, dtype) for order in ((0, 1, 2, 3), (2, 0, 3, 1))] for dtype in (torch.float32, None))
    assert difference(*wide) < 1e-5 < difference(*narrow)
    assert 0 < difference(losses_of((0, 1, 2, 3), torch.float32, None), wide[0]) < 2e-2
    assert wide[0][-1] < wide[0][0]


def test_the_mean_over_micro_batches_equals_one_big_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    found = []
    for size in (8, 2):
        model = network()
        manager = MixedPrecisionManager(model, sgd, compute_dtype=torch.float32, transforms=())
        for start in range(0, 8, size):
            manager.backward(nn.functional.mse_loss(model(inputs[start : start + size]), targets[start : start + size]))
        manager.step(gradient_scale=size / 8)
        found.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_the_scheduler_goes_on_once_for_each_optimizer_step_and_not_for_a_skipped_one() -> None:
    model = network()
    manager = MixedPrecisionManager(model, fused_adamw(lr=1.0), scheduler=warm_up)
    rates = []
    for step in range(3):
        run(manager, model, range(step, step + 1))
        rates.append(manager.optimizer.param_groups[0]["lr"])
        manager.backward(loss_of(model, step, BF16))
        info = manager.skip("no targets")
        assert (info.skipped, info.grad_norm) == ("no targets", None)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert rates == pytest.approx([0.4, 0.6, 0.8])
    assert (manager.num_steps, manager.num_skipped) == (3, 3)


class Transformer(nn.Module):
    """Tied, frozen, unused, float32 and integer parts in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.codes = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        output: Tensor = self.head(hidden)
        return output


def test_tied_frozen_unused_and_kept_parameters_and_buffers() -> None:
    model = Transformer()
    table = model.get_buffer("table").clone()
    start = copy.deepcopy(model.state_dict())
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.1), keep_fp32=norm_or_router)
    assert list(manager.masters()) == ["embedding.weight", "norm.weight", "norm.bias", "unused.weight", "unused.bias"]
    assert model.head.weight is model.embedding.weight
    assert manager.masters()["norm.weight"] is model.norm.weight
    model(torch.arange(10)).float().logsumexp(1).sum().backward()
    manager.step()
    dtypes = {str(p.dtype) for n, p in model.named_parameters() if not n.startswith("norm") and n != "codes"}
    assert dtypes == {"torch.bfloat16"}
    assert (model.norm.weight.dtype, model.codes.dtype) == (torch.float32, torch.int64)
    assert torch.equal(model.get_buffer("table"), table)
    assert torch.equal(model.frozen.weight, start["frozen.weight"].bfloat16())
    assert torch.equal(manager.masters()["unused.weight"], start["unused.weight"])
    assert not torch.equal(manager.masters()["embedding.weight"], start["embedding.weight"])
    assert not torch.equal(model.norm.weight, start["norm.weight"])
    assert torch.equal(model.head.weight, manager.masters()["embedding.weight"].bfloat16())


def test_an_optimizer_over_the_model_goes_on_with_the_masters_in_its_groups() -> None:
    model = network()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=0.1)
    manager = MixedPrecisionManager(model, optimizer, scheduler=warm_up(optimizer))
    run(manager, model, range(2))
    masters = set(map(id, manager.masters().values()))
    assert manager.optimizer is optimizer
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == masters
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    assert set(map(id, optimizer.state)) == masters


def test_the_optimizer_is_fused_where_torch_has_it_and_plain_elsewhere() -> None:
    fused = MixedPrecisionManager(network(), fused_adamw(lr=0.1, betas=(0.8, 0.9))).optimizer.param_groups[0]
    assert (fused["fused"], fused["betas"]) == (True, (0.8, 0.9))
    plain = MixedPrecisionManager(network(), fused_adamw(lr=0.1, differentiable=True)).optimizer.param_groups[0]  # no kernel for that
    assert (plain["fused"], plain["lr"]) == (None, 0.1)


def grow(step: GradientStep) -> None:
    """Remember the number of calls and report it."""
    step.counters["calls"] = step.counters.get("calls", 0) + 1
    step.metrics["calls"] = step.counters["calls"]


def test_transforms_run_in_order_on_scaled_float32_gradients() -> None:
    model = Weights(p=2)
    seen: list[list[float]] = []

    def look(step: GradientStep) -> None:
        assert step.gradients[0].dtype == torch.float32
        seen.append(step.gradients[0].tolist())

    manager = MixedPrecisionManager(model, sgd, transforms=(look, ClipGradNorm(1.0), look, grow))
    model.get_parameter("p").grad = torch.tensor([6.0, 8.0], dtype=BF16)
    info = manager.step(gradient_scale=0.5)
    assert seen[0] == [3.0, 4.0]
    assert seen[1] == pytest.approx([0.6, 0.8])
    assert info.metrics == {"grad_norm": 5.0, "calls": 1.0}
    assert manager.masters()["p"].tolist() == pytest.approx([-0.6, -0.8])


def test_a_transform_that_skips_ends_the_step_without_an_update() -> None:
    model = network()
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.1), transforms=(lambda step: step.skip("too large"), grow), scheduler=warm_up)
    before = copy.deepcopy(manager.state_dict())
    manager.backward(loss_of(model, 0, BF16))
    info = manager.step()
    assert (info.skipped, info.metrics) == ("too large", {})
    assert all(torch.equal(master, before["masters"][name]) for name, master in manager.masters().items())
    assert manager.optimizer.state_dict() == before["optimizer"]
    assert manager.state_dict()["scheduler"] == before["scheduler"]
    assert all(tensor.grad is None for tensor in (*model.parameters(), *manager.masters().values()))


def test_float16_skips_overflows_and_unscales_before_clipping() -> None:
    model = network()
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.02), compute_dtype=torch.float16, loss_scale="dynamic")
    norms = [nn.utils.get_total_norm(torch.autograd.grad(loss_of(model, 3, torch.float16), list(model.parameters())))]
    for factor in (1e5, 1.0):
        manager.backward(loss_of(model, 3, torch.float16) * factor)
        info = manager.step()
    assert (manager.num_steps, manager.num_skipped, manager.loss_scale) == (1, 1, 2.0**15)
    assert info.loss_scale == 2.0**15
    assert info.grad_norm == pytest.approx(float(norms[0]), rel=2e-3)


def test_a_fixed_loss_scale_changes_no_bit_of_a_bfloat16_run() -> None:
    found = []
    for loss_scale in (None, 256.0):
        model = network()
        manager = MixedPrecisionManager(model, fused_adamw(lr=0.02), loss_scale=loss_scale)
        found.append((run(manager, model, range(5)), {name: master.tolist() for name, master in manager.masters().items()}))
    assert found[0] == found[1]


def through_a_checkpoint(state: dict[str, Any]) -> Any:
    """Return the state as it comes out of a file: tensors copied, the rest as JSON."""
    tensors, tree = split_state(state, "precision")
    return join_state(json.loads(json.dumps(tree)), {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_resumed_run_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, MixedPrecisionManager]:
        model = network()
        transforms = (SkipNonFinite(), ClipGradNorm(1.0), grow)
        manager = MixedPrecisionManager(model, fused_adamw(lr=0.02), compute_dtype=dtype, scheduler=warm_up, transforms=transforms)
        return model, manager

    model, manager = make()
    run(manager, model, range(4), dtype)
    manager.backward(loss_of(model, 0, dtype) * float("inf"))
    manager.step()
    state = through_a_checkpoint(manager.state_dict())
    losses = run(manager, model, range(4, 8), dtype)
    other, resumed = make()
    for parameter in other.parameters():
        parameter.data.zero_()
    resumed.load_state_dict(state)
    assert run(resumed, other, range(4, 8), dtype) == losses
    assert resumed.last_step == manager.last_step
    first, second = (split_state(one.state_dict(), "precision") for one in (manager, resumed))
    assert first[1] == second[1]
    assert all(torch.equal(tensor, second[0][name]) for name, tensor in first[0].items())
    assert first[0].keys() == second[0].keys()
    assert manager.num_skipped == 1


def test_a_state_does_not_bring_the_kernels_of_another_device_with_it() -> None:
    saved = MixedPrecisionManager(network(), fused_adamw(lr=0.02)).state_dict()
    manager = MixedPrecisionManager(network(), lambda named: torch.optim.AdamW(named, lr=0.5))
    manager.load_state_dict(saved)
    assert (manager.optimizer.param_groups[0]["fused"], manager.optimizer.param_groups[0]["lr"]) == (None, 0.02)


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixedPrecisionManager(network(), sgd), r"\n  compute_dtype: expected 'bfloat16', got 'float16'"),
        (lambda: MixedPrecisionManager(wider(), sgd), r"\n  master 0.weight: expected 'float32\[17, 6\]', got 'float32\[16, 6\]'"),
        (lambda: MixedPrecisionManager(network(), fused_adamw(lr=1.0)), r"\n  optimizer: expected 'AdamW', got 'SGD'"),
        (lambda: MixedPrecisionManager(network(), sgd, scheduler=warm_up), r"\n  scheduler: expected 'LambdaLR', got 'none'"),
        (lambda: MixedPrecisionManager(network(), sgd, loss_scale=8.0), r"\n  loss_scale: expected 'fixed at 8', got \"{'initial': 65536"),
        (
            lambda: MixedPrecisionManager(network(), sgd, transforms=(grow,)),
            r"transforms: expected \['grow'\], got \['SkipNon",
        ),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(make: Callable[[], MixedPrecisionManager], message: str) -> None:
    saved = MixedPrecisionManager(network(), sgd, compute_dtype=torch.float16).state_dict()
    manager = make()
    before = copy.deepcopy(manager.state_dict()["masters"])
    with pytest.raises(ResumeError, match=message):
        manager.load_state_dict(saved)
    assert all(torch.equal(master, before[name]) for name, master in manager.masters().items())


def test_a_state_of_another_format_is_refused() -> None:
    manager = MixedPrecisionManager(network(), sgd)
    with pytest.raises(ResumeError, match="format: expected 1, got 'none'"):
        manager.load_state_dict({})


class Averages:
    """Hands out one gradient, as a synchronizer does."""

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._pairs = [(parameter, gradient)]

    def no_sync(self) -> Any:
        raise NotImplementedError

    def sync_gradients(self, step: int | None = None) -> None:
        raise NotImplementedError

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        return self._pairs


def test_float32_averages_of_a_synchronizer_are_used_as_they_are() -> None:
    model = Weights(p=2).bfloat16()
    gradient = torch.tensor([1.0 + 2.0**-20, -1.0])  # bfloat16 would lose the small part
    places = []
    manager = MixedPrecisionManager(
        model,
        sgd,
        transforms=(lambda step: places.append(step.gradients[0].data_ptr()),),
        synchronizer=Averages(model.get_parameter("p"), gradient),
    )
    manager.step()
    assert manager.masters()["p"].tolist() == [-1.0 - 2.0**-20, 1.0]
    assert places == [gradient.data_ptr()]


@pytest.mark.parametrize("gradient", [torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.int64), torch.ones(2).to_sparse()])
def test_a_gradient_that_does_not_fit_its_parameter_is_refused(gradient: Tensor) -> None:
    model = Weights(p=2).bfloat16()
    model.get_parameter("p").grad = torch.ones(2, dtype=BF16)
    manager = MixedPrecisionManager(model, sgd, synchronizer=Averages(model.get_parameter("p"), gradient))
    with pytest.raises(ConfigError, match=r"^gradient of p: expected a dense floating-point tensor of shape \[2\], got "):
        manager.step()
    assert manager.masters()["p"].tolist() == [0.0, 0.0]
    assert (manager.num_steps, model.get_parameter("p").grad) == (0, None)


def test_a_gradient_of_an_unknown_parameter_is_refused() -> None:
    model = Weights(p=2).bfloat16()
    manager = MixedPrecisionManager(model, sgd, synchronizer=Averages(nn.Parameter(torch.ones(2)), torch.ones(2)))
    with pytest.raises(ConfigError, match="gradients: expected those of parameters that were trainable when the masters were made"):
        manager.step()


def complex_weights() -> nn.Module:
    model = Weights()
    model.register_parameter("p", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


def stepped() -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MixedPrecisionManager(network(), sgd, compute_dtype=torch.float64),
            "compute_dtype: expected torch.bfloat16, ",
        ),
        (lambda: MixedPrecisionManager(frozen(), sgd), "model: expected trainable parameters, got none"),
        (lambda: MixedPrecisionManager(complex_weights(), sgd), "parameter p: expected floating-point numbers, got"),
        (lambda: MixedPrecisionManager(network(), lambda named: None), "optimizer: expected a torch optimizer, .*got NoneType"),  # type: ignore[arg-type,return-value]
        (lambda: MixedPrecisionManager(network(), lambda named: sgd(named[1:])), r"got 1 of them missing \(first 0.weight\)"),
        (lambda: MixedPrecisionManager(network(), sgd(network().parameters())), r"got 5 of them missing \(first 0.weight\)"),
        (lambda: MixedPrecisionManager(*stepped()), "optimizer: expected one that has not stepped yet, got state of 2 parameters"),
        (lambda: MixedPrecisionManager(network(), sgd, transforms=(ClipGradNorm,)), "transforms: expected functions of a Grad"),  # type: ignore[arg-type]
        (lambda: MixedPrecisionManager(network(), sgd, transforms=(1.0,)), "transforms: expected functions of a GradientStep, got 1.0"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_it_says_what_it_is() -> None:
    expected = "MixedPrecisionManager(bfloat16, parameters=5, loss_scale=1, num_steps=0, num_skipped=0)"
    assert repr(MixedPrecisionManager(network(), sgd)) == expected


# On two ranks: C003, C027, K72, K73.


def test_both_ranks_hold_the_same_bits_after_five_steps(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["same_parameters"] for rank in ranks)
    assert first == second
    assert first["parameters"] != first["before"]
    assert all(norm > 0 for norm in first["norms"])


def test_a_nan_on_one_rank_skips_the_step_on_both(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["not_finite_on_one_rank"] for rank in ranks)
    assert first == second
    reasons = [reason for reason, _, _ in first["seen"]]
    unknown = "averaged gradient of 0.weight is not finite on rank 0"
    known = "gradient of 0.weight is not finite in the backward pass of rank 1"
    assert reasons == [None, unknown, known, None, unknown, known]
    parameters = [found for _, found, _ in first["seen"]]
    assert parameters[0] == parameters[1] == parameters[2] != parameters[3]
    assert parameters[3] == parameters[4] == parameters[5] == first["after"]
    assert all(cleared for _, _, cleared in first["seen"])


def test_too_many_steps_with_nan_raise_on_both_ranks_and_name_parameter_and_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kind, message = rank["not_finite_on_one_rank"]["refused"]
        assert kind == "StallError"
        assert "SkipNonFinite, step 7: expected at most 2 steps in a row" in message
        assert "gradient of 0.weight is not finite in the backward pass of rank 1" in message


def test_an_overflow_on_one_rank_lowers_the_loss_scale_on_both(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["overflow_on_one_rank"] for rank in ranks)
    assert first == second
    assert first["seen"] == [[4096.0, True], [4096.0, False], [2048.0, False], [1024.0, True], [1024.0, True]]
    assert first["scale"] == 2048.0


def test_float16_gradients_whose_sum_overflows_are_averaged(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["large_float16"] == [-60_000.0 / 1024] * 3


def test_ranks_start_with_the_masters_of_the_first(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["broadcast"] for rank in ranks)
    assert first["own"] != second["own"]
    assert first["own"] == first["after"] == second["after"]
    assert first["rounded"]
    assert second["rounded"]


def test_layouts_that_do_not_fit_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["refusals"]
        assert found["model group"][0] == found["synchronizer"][0] == "ConfigError"
        assert "model_parallel_group: expected the 4 ranks of" in found["model group"][1]
        assert "got a group of 2 (all ranks of the job)" in found["model group"][1]
        assert "synchronizer: expected one made of the model as it is cast, got one that was made before" in found["synchronizer"][1]
