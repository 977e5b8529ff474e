"""Train twice on two ranks: once undisturbed, once killed in mid-step and started again. Both must be the same run, bit for bit.

python examples/demo.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stdlib_corpus import stdlib_files, train_tokenizer

STEPS, CHECKPOINT_AT, KILL_IN, RANKS = 40, 20, 27, 2
HERE = Path(__file__).parent
WORK = HERE.parent / ".demo"
TOKENIZER = WORK / f"tokenizer-python{sys.version_info.major}.{sys.version_info.minor}.json"

Entry = dict[str, Any]
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Return 0 if the resumed run equals the uninterrupted one."""
    prepare()
    console.rule("an uninterrupted run")
    whole = start("uninterrupted")
    require(whole.wait() == 0, f"the uninterrupted run failed with exit code {whole.returncode}")

    console.rule(f"the same run, killed in the middle of step {KILL_IN}")
    broken = start("interrupted")
    wait_for_step(broken, "interrupted", KILL_IN - 1)
    kill(broken)
    before_kill = read("interrupted")
    require(all(entries[-1]["step"] == KILL_IN - 1 for entries in before_kill), f"the kill did not fall into step {KILL_IN}")

    console.rule(f"started again, from the checkpoint of step {CHECKPOINT_AT}")
    resumed = start("interrupted")
    require(resumed.wait() == 0, f"the resumed run failed with exit code {resumed.returncode}")
    return compare(read("uninterrupted"), before_kill, read("interrupted"))


def prepare() -> None:
    """Remove earlier runs and train the tokenizer if this is the first time."""
    for run in ("uninterrupted", "interrupted"):
        shutil.rmtree(WORK / run, ignore_errors=True)
    files = stdlib_files()
    console.print(f"corpus: {len(files)} modules of Python's standard library, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
    if not TOKENIZER.exists():
        console.print("training a byte-level BPE tokenizer on every tenth module")
        train_tokenizer(files[::10], vocab_size=8192, save_to=TOKENIZER)


def start(run: str) -> subprocess.Popen[bytes]:
    """Start torchrun on the training script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = [str(HERE / "pretrain.py"), "--tokenizer", str(TOKENIZER), "--output", str(WORK / run), "--steps", str(STEPS)]
    return subprocess.Popen([*launcher, *script], env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_step(process: subprocess.Popen[bytes], run: str, step: int) -> None:
    """Return in the middle of the step after `step`."""
    log = WORK / run / "rank0.jsonl"
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        require(process.poll() is None, f"the run ended with exit code {process.returncode} before step {step}")
        time.sleep(0.01)
    time.sleep(read(run)[0][-1]["seconds"] / 2)


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks with SIGKILL; whatever they had started must go by itself."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    ranks = psutil.Process(launcher.pid).children()
    launcher.kill()
    for rank in ranks:
        rank.kill()
    killed_at = time.monotonic()
    launcher.wait()
    while (left := [process for process in family if is_alive(process)]) and time.monotonic() < killed_at + 2.0:
        time.sleep(0.01)
    require(not left, f"2 s after the kill these processes are left: {left}")
    helpers, took_ms = len(family) - len(ranks), (time.monotonic() - killed_at) * 1000
    console.print(f"killed torchrun and {len(ranks)} ranks (SIGKILL); their {helpers} loader processes were gone {took_ms:.0f} ms later")


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process still runs; an orphaned zombie that nobody reaps does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read(run: str) -> list[list[Entry]]:
    """Return what each rank logged: one entry for each step, in the order of time."""
    logs = [WORK / run / f"rank{rank}.jsonl" for rank in range(RANKS)]
    return [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]


def compare(whole: list[list[Entry]], before_kill: list[list[Entry]], interrupted: list[list[Entry]]) -> int:
    """Print the losses side by side and return 0 if every step saw the same records and had the same loss on every rank."""
    expected = [{entry["step"]: entry for entry in entries} for entries in whole]
    resumed = [entries[len(before) :] for before, entries in zip(before_kill, interrupted, strict=True)]
    for entries in resumed:
        steps = [entry["step"] for entry in entries]
        require(steps == list(range(CHECKPOINT_AT + 1, STEPS + 1)), f"the resumed run made the steps {steps}")

    first, second = ({entry["step"]: entry for entry in run[0]} for run in (before_kill, resumed))
    table = Table("step", "uninterrupted", "until the kill", "resumed", "bit for bit", title="loss")
    for step in range(1, STEPS + 1):
        cells = [run.get(step) for run in (expected[0], first, second)]
        verdict = "equal" if same_steps(step, expected, interrupted) else "[bold red]different"
        table.add_row(str(step), *(f"{float.fromhex(entry['loss']):.4f}" if entry else "" for entry in cells), verdict)
    console.print(table)

    if not all(same_steps(step, expected, interrupted) for step in range(1, STEPS + 1)):
        console.print("demo: the resumed run differs from the uninterrupted one")
        return 1
    records = {tuple(record) for entries in resumed for entry in entries for batch in entry["records"] for record in batch}
    console.print(f"demo: resumed run equals the uninterrupted one: {len(resumed[0])} losses and {len(records)} record ids, bit for bit")
    return 0


def same_steps(step: int, expected: list[dict[int, Entry]], interrupted: list[list[Entry]]) -> bool:
    """Return whether each time that a rank made this step it was the one of the uninterrupted run."""
    return all(
        (entry["loss"], entry["records"]) == (whole[step]["loss"], whole[step]["records"])
        for whole, entries in zip(expected, interrupted, strict=True)
        for entry in entries
        if entry["step"] == step
    )


def require(condition: bool, otherwise: str) -> None:
    """End the demo with exit code 1 and a message unless the condition holds."""
    if not condition:
        sys.exit(f"demo: {otherwise}")


if __name__ == "__main__":
    sys.exit(main())
