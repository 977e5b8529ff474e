from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from aioloader.testing import Resources, resources, wait_until_clean


def test_nothing_is_left_when_nothing_happened() -> None:
    before = resources()
    left = wait_until_clean(before, timeout_s=0)
    assert left == Resources()
    assert str(left) == "nothing"


def test_a_child_is_seen_until_it_is_reaped() -> None:
    before = resources()
    child = subprocess.Popen(["sleep", "60"])
    assert wait_until_clean(before, timeout_s=0).processes == {(child.pid, "sleep")}
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert {pid for pid, _ in resources().since(before).processes} == {child.pid}, "a zombie still holds a process id"
    child.wait()
    assert not resources().since(before).count


def test_a_grandchild_is_seen_also_after_its_parent_died() -> None:
    before = resources()
    script = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {pid for pid, _ in resources().since(before).processes} == {child.pid, grandchild}
        child.stdin.write("\n")
    assert {pid for pid, _ in resources().since(before).processes} == {grandchild}
    os.kill(grandchild, signal.SIGKILL)
    assert not wait_until_clean(before).count


def test_a_process_name_may_hold_brackets_and_spaces(tmp_path: Path) -> None:
    odd = tmp_path / "a) S (b"
    odd.symlink_to("/bin/sleep")
    before = resources()
    with subprocess.Popen([str(odd), "60"]) as child:
        held = resources().since(before).processes
        child.kill()
    assert held == {(child.pid, "a) S (b")}


def test_a_thread_is_seen_until_it_ends() -> None:
    before = resources()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="lingering")
    thread.start()
    assert wait_until_clean(before, timeout_s=0).threads == {(thread.native_id, "lingering")}
    stop.set()
    assert not wait_until_clean(before).count


def test_a_descriptor_is_seen_until_it_is_closed() -> None:
    before = resources()
    with Path("/dev/null").open() as file:
        left = wait_until_clean(before, timeout_s=0)
        assert left.descriptors == {(file.fileno(), "/dev/null")}
        assert str(left) == f"descriptors: {file.fileno()} (/dev/null)"
    assert not resources().since(before).count


def test_it_waits_for_what_ends_soon() -> None:
    before = resources()
    timer = threading.Timer(0.05, lambda: None)
    timer.start()
    assert not wait_until_clean(before, timeout_s=10).count


def test_cycles_that_hold_a_descriptor_are_collected() -> None:
    before = resources()
    reader, writer = os.pipe()

    class Holder:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            os.close(reader)
            os.close(writer)

    Holder()
    assert not wait_until_clean(before).count
