"""What only a CUDA machine can show: run there as `python -m tests.training.gpu_check`; it prints figures and ends with "ok".

Prefetch: batches arrive unchanged and in order from pinned and from pageable memory, and their copies overlap with work. Trainer: a run
on the GPU, with an NCCL world of one, a checkpoint written in the background, and resumed bit for bit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from aioloader.training import StepReport, Trainer
from aioloader.training.device_prefetch import DevicePrefetcher
from aioloader.training.precision.manager import MixedPrecisionManager
from tests.training.fake_loader import FakeBatch, FakeLoader, TinyModel, language_batches

MEGABYTES, NUM_BATCHES, WIDTH = 64, 30, 4096


class DeviceBatch(FakeBatch):
    """A batch that can be pinned and copied without waiting."""

    def to(self, device: torch.device, non_blocking: bool = False) -> DeviceBatch:
        return self._like({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})

    def pin_memory(self) -> DeviceBatch:
        return self._like({name: tensor.pin_memory() for name, tensor in self.items()})

    def _like(self, fields: dict[str, torch.Tensor]) -> DeviceBatch:
        batch = DeviceBatch(fields, index=self.index, num_tokens=self.num_tokens, is_filler=self.is_filler)
        batch.num_padding = self.num_padding
        return batch


def heavy_batches(*, pinned: bool) -> Iterator[DeviceBatch]:
    """Yield batches that are all the same number; their memory is let go at once and used again."""
    for index in range(NUM_BATCHES):
        batch = DeviceBatch({"x": torch.full((MEGABYTES * 2**18,), float(index))}, index=index)
        yield batch.pin_memory() if pinned else batch


def check_copies(device: torch.device) -> None:
    for pinned in (True, False):
        for index, batch in enumerate(DevicePrefetcher(heavy_batches(pinned=pinned), device)):
            assert batch.index == index
            assert bool((batch["x"] == index).all()), f"batch {index} was overwritten"
    print(f"prefetch: {NUM_BATCHES} batches of {MEGABYTES} MiB arrive unchanged, from pinned and from pageable memory")


def work(weight: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        weight = torch.tanh(weight @ weight)
    return weight


def check_overlap(device: torch.device) -> None:
    batches = [DeviceBatch({"x": torch.rand(MEGABYTES * 2**18)}, index=index).pin_memory() for index in range(NUM_BATCHES)]
    weight = torch.rand(WIDTH, WIDTH, device=device) / WIDTH

    def measure(depth: int | None) -> float:
        work(weight)
        torch.cuda.synchronize()
        started = time.perf_counter()
        if depth is None:
            for _ in batches:
                work(weight)
        elif depth == 0:
            for batch in batches:
                work(weight + batch.to(device)["x"][0])
        else:
            for batch in DevicePrefetcher(batches, device, depth=depth):
                work(weight + batch["x"][0])
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / NUM_BATCHES * 1e3

    measure(2)
    alone, blocking, ahead = measure(None), measure(0), measure(2)
    print(f"step of work alone {alone:.2f} ms, with copies before it {blocking:.2f} ms, with copies ahead of it {ahead:.2f} ms")
    assert ahead < (alone + blocking) / 2, "less than half of the copies is hidden"


def train(directory: str, max_steps: int, *, is_mixed: bool) -> list[float]:
    model = TinyModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options = {"precision": MixedPrecisionManager(model, optimizer)} if is_mixed else {"optimizer": optimizer, "max_grad_norm": 1.0}
    batches: list[FakeBatch] = [
        DeviceBatch(batch, index=batch.index, num_tokens=batch.num_tokens, is_filler=batch.is_filler) for batch in language_batches(40)
    ]
    reports: list[StepReport] = []
    Trainer(
        model,
        FakeLoader(batches, 2),
        max_steps=max_steps,
        device="cuda",
        checkpoint_dir=directory,
        checkpoint_every=5,
        checkpoint_async=True,
        eval_loader=FakeLoader(batches[36:], 1),
        eval_every=5,
        on_step=reports.append,
        **options,
    ).train()
    return [report.loss for report in reports]


def check_training() -> None:
    for is_mixed in (False, True):
        with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as halves:
            losses = train(whole, 10, is_mixed=is_mixed)
            again = train(halves, 5, is_mixed=is_mixed) + train(halves, 10, is_mixed=is_mixed)
        assert losses == again, (losses, again)
        assert losses[-1] < losses[0]
        print(
            f"trainer, {'bf16' if is_mixed else 'fp32'}: loss {losses[0]:.4f} to {losses[-1]:.4f}; 5 steps and 5 resumed are the same bits"
        )


def main() -> None:
    assert torch.cuda.is_available(), "expected a CUDA device, got none; run this on a machine that has one"
    device = torch.device("cuda", 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}")
    check_copies(device)
    check_overlap(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 4
    check_training()
    dist.destroy_process_group()
    print("ok")


if __name__ == "__main__":
    main()
