"""What a run takes of the process is given back: the signal handler, the process group."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from aioloader.errors import SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.process_group import local_device, process_group, stop_on_sigterm


def test_sigterm_becomes_a_request_and_the_old_handler_comes_back() -> None:
    seen: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        with stop_on_sigterm() as request:
            assert not request.received
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.received
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, original)


def test_outside_of_the_main_thread_no_handler_is_set() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with stop_on_sigterm() as request:
            found.append((request.received, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, True)]


def test_one_rank_makes_no_process_group() -> None:
    with process_group(Mesh(), torch.device("cpu"), 1.0):
        assert not dist.is_initialized()


def test_without_a_meeting_place_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    message = r"init_process_group: on dp_rank 1: expected to meet 2 ranks, got .*MASTER_ADDR.*; start the script with torchrun"
    with pytest.raises(SynchronizationError, match=message), process_group(Mesh(dp_rank=1, dp_size=2), torch.device("cpu"), 1.0):
        pytest.fail("the block must not run")
    assert not dist.is_initialized()


def test_a_cpu_needs_no_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "not a number")
    assert local_device("cpu") == torch.device("cpu")
