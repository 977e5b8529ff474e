"""What worker processes are: no copies of the trainer, one thread each, and shared memory without a name or a quota.

A number like K54 is a reported fault; `test_contract_coverage.py` lists them all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import ConfigError, FixedBatch, Loader, SequenceSource
from aioloader.testing import resources
from tests.contract.cases import INLINE, PROCESSES, ROOT, THREAD_HOST, Options, as_list, collate, large, name_of, numbers, stack


def samples(loader: Loader) -> list[Any]:
    return [sample for batch in loader for sample in batch["samples"]]


def descendants() -> set[int]:
    return {pid for pid, _ in resources().processes}


def proportional_bytes(pids: set[int]) -> int:
    """Return the memory of processes in bytes; pages that several share count once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("num_records", [200_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(60)])])
def test_a_large_list_is_not_copied_page_by_page(num_records: int) -> None:
    """K47: workers get the records of a list and never the list."""
    words = [f"word number {number} of a long list" for number in range(num_records)]
    list_bytes = sum(map(sys.getsizeof, words))

    four_workers: Options = {**PROCESSES, "workers": 4}
    before = descendants()
    with Loader(
        SequenceSource(words), preprocess=lambda word: len(word), batch=FixedBatch(10_000), collate=collate, **four_workers
    ) as loader:
        iterator = iter(loader)
        delivered = numbers([next(iterator)])
        started = descendants() - before
        assert len(started) == 1 + 1 + 4, "the zygote, the sidecar, the workers"
        at_first = proportional_bytes(started)
        delivered += [number for _ in range(num_records // 10_000 - 1) for number in numbers([next(iterator)])]
        at_last = proportional_bytes(started)
        iterator.close()
    assert delivered == [len(word) for word in words]
    assert at_last - at_first < list_bytes, "less than one copy, whatever the four workers do"
    assert at_last < 1.3 * at_first


def in_dev_shm(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has mapped."""
    return {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in line}


@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_shared_memory_lies_in_no_file_system_that_could_be_full(options: Options) -> None:
    """K48: a small /dev/shm cannot end anything in a bus error, since nothing lies there."""
    before, own_before = descendants(), in_dev_shm(os.getpid())
    with Loader(range(40), preprocess=large, batch=FixedBatch(1), collate=stack, **options) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(10)]
        named = {pid: in_dev_shm(pid) - own_before for pid in [os.getpid(), *(descendants() - before)]}
        maps = Path("/proc/self/maps").read_text()
        iterator.close()
    assert [float(batch["image"][0, 0, 0]) for batch in kept] == list(range(10))
    assert "/memfd:aioloader-" in maps, "the batches do lie in shared memory"
    assert not any(named.values()), named


LARGE_BATCHES = """
    import os
    import numpy as np
    from aioloader import FixedBatch, Loader

    def preprocess(number):
        return np.full(25 << 20, number, np.uint8)

    def collate(samples):
        return {"x": np.stack(samples)}

    print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
    with Loader(range(8), preprocess=preprocess, batch=FixedBatch(4), collate=collate, workers=1, memory_limit="512MiB") as loader:
        for batch in loader:
            print(*batch["x"].shape, *batch["x"].amin(1).tolist(), *batch["x"].amax(1).tolist())
"""


@pytest.mark.timeout(60)
def test_batches_that_are_larger_than_all_of_dev_shm() -> None:
    """K48: it has 64 MiB, each batch 100."""
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "sh", "-c", small], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount anything")
    command = [*own_mounts, "sh", "-c", f'{small} && exec "$0" -c "$1"', sys.executable, textwrap.dedent(LARGE_BATCHES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    size, *batches = done.stdout.splitlines()
    assert int(size) == 64 << 20
    rows = [" ".join(map(str, range(first, first + 4))) for first in (0, 4)]
    assert batches == [f"4 {25 << 20} {numbers} {numbers}" for numbers in rows]


def test_a_lock_in_an_argument_is_named_before_anything_starts_and_does_without_workers() -> None:
    """K52: lambdas travel, a lock cannot."""
    lock = threading.Lock()

    def guarded(number: int) -> int:
        with lock:
            return number

    class Guarded:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, numbers: list[int]) -> dict[str, Any]:
            with self.lock:
                return collate(numbers)

    with Loader(range(6), preprocess=guarded, batch=FixedBatch(2), collate=Guarded(), **INLINE) as loader:
        assert numbers(loader) == list(range(6))

    one_worker: Options = {"batch": FixedBatch(2), **PROCESSES, "workers": 1}
    before = resources()
    with pytest.raises(ConfigError, match=r"^Loader\(preprocess=\).* lock"):
        Loader(range(6), preprocess=guarded, collate=lambda numbers: collate(numbers), **one_worker)
    with pytest.raises(ConfigError, match=r"^Loader\(collate=\).* lock"):
        Loader(range(6), preprocess=lambda number: number, collate=Guarded(), **one_worker)
    assert resources().since(before).count == 0
    with Loader(range(6), preprocess=lambda number: -number, collate=lambda numbers: collate(numbers), **one_worker) as loader:
        assert numbers(loader) == [-number for number in range(6)]


@pytest.fixture
def marked_interpreter() -> Iterator[None]:
    """Mark this process's memory in a way that a fork would inherit and a fresh interpreter does not."""
    sys.aioloader_test_mark = True  # type: ignore[attr-defined]
    yield
    del sys.aioloader_test_mark  # type: ignore[attr-defined]


@pytest.mark.usefixtures("marked_interpreter")
@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_workers_are_no_copies_of_the_trainer(options: Options) -> None:
    """K53: what the trainer has initialised, a GPU above all, is not there in a worker."""

    def inherited(number: int) -> tuple[bool, bool]:
        return hasattr(sys, "aioloader_test_mark"), "torch" in sys.modules

    assert inherited(0) == (True, True)
    with Loader(range(16), preprocess=inherited, batch=FixedBatch(2), collate=as_list, **options) as loader:
        assert set(samples(loader)) == {(False, False)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workers_beside_a_trainer_that_uses_the_gpu() -> None:
    """K53."""
    weights = torch.ones(1000, device="cuda")

    def on_the_cpu(number: int) -> torch.Tensor:
        return torch.full((1000,), float(number))

    def as_one(made: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(made)}

    with Loader(range(200), preprocess=on_the_cpu, batch=FixedBatch(2), collate=as_one, **PROCESSES) as loader:
        sums = [float((batch.to("cuda")["x"] * weights).sum()) for batch in loader]
    assert sums == [1000.0 * (4 * step + 1) for step in range(100)]


def test_a_worker_is_one_thread_on_the_cpus_of_the_trainer() -> None:
    """K54."""

    def facts(number: int) -> tuple[int, int, list[int]]:
        (torch.rand(200, 200) @ torch.rand(200, 200)).sum()  # starts the threads that there would be
        return torch.get_num_threads(), len(list(Path("/proc/self/task").iterdir())), sorted(os.sched_getaffinity(0))

    four_workers: Options = {**PROCESSES, "workers": 4}
    with Loader(range(64), preprocess=facts, batch=FixedBatch(2), collate=as_list, **four_workers) as loader:
        told = samples(loader)
    assert all(fact == (1, 1, sorted(os.sched_getaffinity(0))) for fact in told), told


def test_a_tokenizer_that_was_used_in_parallel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """K55: its threads do not exist in a forked process, and what they had locked would stay locked."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer = Tokenizer(WordLevel({"unknown": 0, **{f"word{number}": number for number in range(1, 100)}}, unk_token="unknown"))
    tokenizer.pre_tokenizer = Whitespace()
    texts = [" ".join(f"word{(number * step) % 120}" for step in range(20)) for number in range(100)]

    def tokenize(text: str) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch([text, text[:50], text[50:]])]

    assert len({tuple(encoding.ids) for encoding in tokenizer.encode_batch(texts)}) > 50
    made = []
    for options in (INLINE, PROCESSES):
        with Loader(
            SequenceSource(texts), preprocess=lambda text: {"ids": tokenize(text)}, batch=FixedBatch(4), collate=as_list, **options
        ) as loader:
            made.append(samples(loader))
    assert made[0] == made[1]
    assert len(made[0]) == 100
