"""The process group and the stop signal of a training run, each taken for the run and given back after it."""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from aioloader.errors import SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.dp_group import is_distributed

__all__ = ["StopRequest", "local_device", "process_group", "stop_on_sigterm"]


@contextmanager
def process_group(mesh: Mesh, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Have a default process group of the mesh's data-parallel ranks inside; one that exists already is left as it is.

    Gloo for CPU tensors, NCCL for CUDA tensors. torchrun's environment names the meeting place.

    Raises:
        SynchronizationError: The ranks did not find each other.
    """
    if mesh.dp_size == 1 or is_distributed():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, rank=mesh.dp_rank, world_size=mesh.dp_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        message = f"on dp_rank {mesh.dp_rank}: expected to meet {mesh.dp_size} ranks, got {error}; start the script with torchrun"
        raise SynchronizationError("init_process_group", message) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(name: str | torch.device) -> torch.device:
    """Return the device of this process: `"cuda"` without a number means the GPU of torchrun's `LOCAL_RANK`, made current."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.received = False


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Turn SIGTERM into a request inside; outside of the main thread, where signals cannot be caught, nothing changes."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def receive(signum: int, frame: FrameType | None) -> None:
        request.received = True

    previous = signal.signal(signal.SIGTERM, receive)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
