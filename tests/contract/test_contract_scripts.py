"""A user's program needs no main guard, also under torchrun and in a notebook; `test_contract_preprocess.py` has those for one process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.contract.cases import ROOT, wait_until_dead

CLOSE_WITHIN_S = 2.0
CELL_TIMEOUT_S = 30.0

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

RANK_PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from aioloader import FixedBatch, Loader, Mesh

SHIFT = 100

def preprocess(number):
    return number + SHIFT

def collate(samples):
    return {"x": samples, "main": __name__}

async def numbers(loader):
    return [number async for batch in loader for number in batch["x"]]

rank = Mesh.from_env().dp_rank
with Loader(range(12), preprocess=preprocess, batch=FixedBatch(3), collate=collate, workers=2) as loader:
    in_a_loop = [number for batch in loader for number in batch["x"]]
    in_asyncio = asyncio.run(numbers(loader))
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps([in_a_loop, in_asyncio]))
with open(Path(sys.argv[1], "starts.txt"), "a") as starts:
    starts.write(f"{rank}\\n")
"""


@pytest.mark.timeout(90)
def test_a_script_without_a_guard_under_torchrun(tmp_path: Path) -> None:
    """Each rank runs the script once, and its helper processes never do."""
    script = tmp_path / "train.py"
    script.write_text(RANK_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        mine = [number + 100 for number in range(rank, 12, 2)]
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [mine, mine]
    assert sorted((tmp_path / "starts.txt").read_text().split()) == ["0", "1"]


def test_all_processes_find_modules_where_the_script_does(tmp_path: Path) -> None:
    """Another version of the package may be installed; the folder to work in may hold modules of any name; paths may be odd, and many."""
    for name in ("pickle", "socket", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not the one you want')")
    for name in ("scripts", "late"):
        (tmp_path / name).mkdir()
    for name in ("selectors", "tokenize"):
        (tmp_path / "late" / f"{name}.py").write_text("raise ImportError('named like one that the script has already')")
    shutil.copytree(ROOT / "aioloader", tmp_path / "first" / "aioloader", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "scripts" / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import selectors
            import sys
            import tokenize
            from pathlib import Path
            sys.path.insert(0, sys.argv[1])
            class Text(str):
                __repr__ = __str__ = lambda self: "something else"

            sys.path += [Path("no text"), Text("text"), "not UTF-8: \\udcff", "a 'quoted' \\n line"]
            sys.path += [f"/{number}/" + 16 * "long name " for number in range(1000)]
            import aioloader
            sys.path.insert(0, "late")

            def folders():
                return {module.__file__.removesuffix("aioloader/" + name) for module, name in
                        ((sys.modules["aioloader"], "__init__.py"), (sys.modules["aioloader.runtime.wire"], "runtime/wire.py"))}

            def collate(samples):
                return {"sidecar": folders(), "worker": samples[0]}

            loader = aioloader.Loader(range(3), preprocess=lambda _: folders(), batch=aioloader.FixedBatch(1), collate=collate, workers=2)
            with loader:
                for batch in loader:
                    print(*sorted({*batch["sidecar"], *batch["worker"], *folders()}))
            """
        )
    )
    command = [sys.executable, str(script), f"{tmp_path / 'first'}/"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{tmp_path / 'first'}/"] * 3


class Notebook:
    """A kernel that runs cells, as a notebook does."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = self._connect()

    def _connect(self) -> BlockingKernelClient:
        client: BlockingKernelClient = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=CELL_TIMEOUT_S)
        return client

    def start(self, cell: str) -> str:
        """Start a cell; returns its id."""
        return str(self.client.execute(textwrap.dedent(cell)))

    def next_text(self, cell_id: str) -> str | None:
        """Return the next thing that a cell prints, or what it raised; None at its end."""
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=CELL_TIMEOUT_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell_id:
                continue
            if kind == "stream":
                return str(content["text"])
            if kind == "error":
                return f"{content['ename']}: {content['evalue']}"
            if kind == "status" and content["execution_state"] == "idle":
                return None

    def run(self, cell: str) -> str:
        """Return all that a cell prints and raises."""
        cell_id = self.start(cell)
        return "".join(iter(lambda: self.next_text(cell_id), None))

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self.client = self._connect()

    def shut_down(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module", autouse=True)
def jupyter_loop() -> Iterator[None]:
    """Keep the loop that jupyter_client drives its sockets with, which it makes once for each thread, from looking left behind."""
    loop = ensure_event_loop()
    yield
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT), env=ENVIRONMENT)
    try:
        notebook = Notebook(manager)
        yield notebook
        notebook.client.stop_channels()
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)


FIRST_CELL = """
    import os
    from dataclasses import dataclass
    from aioloader import FixedBatch, Loader
    from aioloader.testing import resources, wait_until_clean

    FACTOR = 7

    @dataclass
    class Sample:
        number: int

    def preprocess(number):
        return Sample(number * FACTOR)

    def collate(samples):
        return {"x": [sample.number for sample in samples], "kinds": {type(sample) for sample in samples}}

    def make(records=range(6)):
        return Loader(records, preprocess=preprocess, batch=FixedBatch(3), collate=collate, workers=2)
"""

START_CELL = """
    running = iter(make(range(10**9)))
    next(running)
    print(*(pid for pid, _ in resources().processes))
"""


@pytest.mark.timeout(120)
def test_functions_and_classes_of_a_cell(notebook: Notebook) -> None:
    assert notebook.run(FIRST_CELL) == ""
    expected = "[0, 7, 14] {<class '__main__.Sample'>}\n[21, 28, 35] {<class '__main__.Sample'>}\n"
    with_await = """
        before = resources()
        async with make() as loader:
            async for batch in loader:
                print(batch["x"], batch["kinds"])
        print(wait_until_clean(before))
    """
    assert notebook.run(with_await) == f"{expected}nothing\n"
    without = """
        with make() as loader:
            for batch in loader:
                print(batch["x"], batch["kinds"])
        print(wait_until_clean(before))
    """
    assert notebook.run(without) == f"{expected}nothing\n"


@pytest.mark.timeout(120)
def test_a_cell_that_is_run_again_uses_what_it_now_says(notebook: Notebook) -> None:
    notebook.run(FIRST_CELL)
    show = """
        with make() as loader:
            print([batch["x"] for batch in loader])
    """
    assert notebook.run(show) == "[[0, 7, 14], [21, 28, 35]]\n"
    assert notebook.run("FACTOR = 2") == ""
    assert notebook.run(show) == "[[0, 2, 4], [6, 8, 10]]\n"
    assert notebook.run("def preprocess(number):\n    return Sample(-number)") == ""
    assert notebook.run(show) == "[[0, -1, -2], [-3, -4, -5]]\n"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("loop", "error"), [("for", "KeyboardInterrupt"), ("async for", "CancelledError")])
def test_interrupting_a_cell_ends_its_loop_and_leaves_the_kernel_usable(notebook: Notebook, loop: str, error: str) -> None:
    """The kernel cancels a cell that awaits, and raises in one that does not."""
    notebook.run(FIRST_CELL)
    cell_id = notebook.start(f"""
        before = resources()
        {loop} batch in make(range(10**9)):
            if batch.step == 5:
                print("running", flush=True)
    """)
    assert notebook.next_text(cell_id) == "running\n"
    notebook.manager.interrupt_kernel()
    assert list(iter(lambda: notebook.next_text(cell_id), None)) == [f"{error}: "]
    assert notebook.run("batch = None; print(wait_until_clean(before))") == "nothing\n"


@pytest.mark.timeout(120)
def test_restart_and_shutdown_of_a_kernel_leave_no_helper_process(notebook: Notebook) -> None:
    for end in (notebook.restart, notebook.shut_down):
        notebook.run(FIRST_CELL)
        helpers = [int(pid) for pid in notebook.run(START_CELL).split()]
        assert len(helpers) >= 4, "the zygote, the sidecar, the workers"
        end()
        assert not wait_until_dead(helpers, CLOSE_WITHIN_S)
