"""How fast `aioloader preprocess` is beside its tokenizer alone, what it costs, and whether kills leave a trace.

    python -m tests.benchmarks.preprocess_table [--megabytes 200] [--workers 1 2] [--folder DIR]

The text is that of the .py, .txt and .rst files of installed packages, one JSON line each, cut into documents of 12 KB at most. The
serial rate is that of `Tokenizer.encode`, text by text, on a sample of this text in one thread of a fresh process, nothing else done; the
ceiling is what as many such processes as there are workers reach at once with the quicker call that the command uses, which keeps no
offsets. `command` counts from the start of the process to its end, `steady` from
its first batch on. Memory is what the process tree has (PSS), as a line through the samples of the last two thirds of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.machine import describe_machine, describe_versions
from tests.benchmarks.tree import tree_cpu_s, tree_pss_bytes

_DOCUMENT_CHARACTERS = 12_000
_SAMPLE_BYTES = 8_000_000
_VOCABULARY = 16_000
_SEQ_LEN = 4096
_SAMPLE_EVERY_S = 1.0  # a look at the memory of the tree takes 10 ms of CPU time
_ADDRESS_SPACE_BYTES = 1 << 30


class Measured(NamedTuple):
    """One run of the command."""

    wall_s: float
    steady_mb_s: float
    cpu_s: float
    peak_mb: float
    growth_mb: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "aioloader-preprocess-table")
    parser.add_argument("--serial", help="measure the tokenizer alone on the lines of this file, and print MB/s")
    parser.add_argument("--plain", action="store_true", help="with --serial: by Tokenizer.encode")
    parser.add_argument(
        "--run", nargs=3, metavar=("OUTPUT", "WORKERS", "SAVE_EVERY_S"), help="preprocess, and print when the first batch came"
    )
    chosen = parser.parse_args()
    folder: Path = chosen.folder
    if chosen.serial:
        print(*_tokenize_serially(Path(chosen.serial), folder, is_plain=chosen.plain))
    elif chosen.run:
        _preprocess(folder / f"corpus-{chosen.megabytes}.jsonl", folder, Path(chosen.run[0]), int(chosen.run[1]), float(chosen.run[2]))
    else:
        _print_table(folder, chosen.megabytes, chosen.workers)


def _print_table(folder: Path, megabytes: int, workers: list[int]) -> None:
    corpus = _prepare(folder, megabytes)
    num_bytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.open(encoding="utf-8"))
    machine = describe_machine()
    print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']}; {describe_versions()}")
    print(f"{num_bytes / 1e6:.1f} MB of text; byte-level BPE, {_VOCABULARY:,} tokens; rows of {_SEQ_LEN:,}, .npy")
    print(f"address space of each process limited to {_ADDRESS_SPACE_BYTES >> 20} MiB")
    serial, cpu_s = _serial(folder, 1, "--plain")
    print(f"\n{'':24}{'MB/s':>8}{'of workers x serial':>21}{'of ceiling':>12}{'CPU s/MB':>10}{'peak MB':>9}{'growth MB':>11}")
    print(f"{'tokenizer alone':24}{serial:>8.2f}{1:>21.2f}{'':12}{cpu_s:>10.3f}")
    for number in workers:
        ceiling, cpu_s = _serial(folder, number)
        print(f"{f'{number} processes of it':24}{ceiling:>8.2f}{ceiling / serial / number:>21.2f}{1:>12.2f}{cpu_s:>10.3f}")
        output = folder / f"out-{number}"
        measured = _measure(folder, megabytes, output, number, num_bytes)
        for name, rate in ((f"command, {number} workers", num_bytes / 1e6 / measured.wall_s), ("  steady", measured.steady_mb_s)):
            print(f"{name:24}{rate:>8.2f}{rate / serial / number:>21.2f}{rate / ceiling:>12.2f}", end="")
            print(
                ""
                if name.startswith(" ")
                else f"{measured.cpu_s * 1e6 / num_bytes:>10.3f}{measured.peak_mb:>9.0f}{measured.growth_mb:>11.1f}"
            )
    print(f"\n{_kill_three_times(folder, megabytes, workers[-1], _digest(folder / f'out-{workers[-1]}'))}")


def _prepare(folder: Path, megabytes: int) -> Path:
    """Return the corpus, and make it and the tokenizer unless they are there."""
    from tests.benchmarks.real_work import prepare_texts

    folder.mkdir(parents=True, exist_ok=True)
    prepare_texts(folder, vocabulary=_VOCABULARY)
    corpus = folder / f"corpus-{megabytes}.jsonl"
    if not corpus.exists():
        left = megabytes * 1_000_000
        with open(corpus.with_suffix(".partial"), "w", encoding="utf-8") as file:
            for text in _texts():
                left -= len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
                if left <= 0:
                    break
        corpus.with_suffix(".partial").rename(corpus)
        if left > 0:
            print(f"only {megabytes - left / 1e6:.0f} MB of text are installed here")
    return corpus


def _texts() -> Iterator[str]:
    """Yield the documents in a mixed order that is always the same."""
    roots = [*site.getsitepackages(), str(Path(os.__file__).parent)]
    paths = sorted({path for root in roots for path in Path(root).rglob("*") if path.suffix in {".py", ".txt", ".rst"} and path.is_file()})
    random.Random(0).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        for start in range(0, len(text), _DOCUMENT_CHARACTERS):
            yield text[start : start + _DOCUMENT_CHARACTERS]


def _tokenize_serially(corpus: Path, folder: Path, *, is_plain: bool) -> tuple[float, float]:
    """Return the MB of text that the tokenizer takes in a second, given all of it at hand, and its CPU seconds for each."""
    from aioloader_adapters.transformers import open_tokenizer

    encode = open_tokenizer(str(folder / "tokenizer.json")).start()
    if is_plain:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731 - in place of the other
    texts, num_bytes = [], 0
    for line in corpus.open(encoding="utf-8"):
        texts.append(json.loads(line)["text"])
        num_bytes += len(texts[-1].encode())
        if num_bytes >= _SAMPLE_BYTES:
            break
    for text in texts[:20]:
        encode(text)
    started, cpu_started = time.perf_counter(), time.process_time()
    for text in texts:
        encode(text)
    return num_bytes / 1e6 / (time.perf_counter() - started), (time.process_time() - cpu_started) / (num_bytes / 1e6)


def _serial(folder: Path, num_processes: int, *options: str) -> tuple[float, float]:
    """Return the MB/s that so many processes reach at once, and their CPU seconds for each MB; medians of three."""
    corpus = next(folder.glob("corpus-*.jsonl"))
    command = [*_command(folder), "--serial", str(corpus), *options]
    rounds = []
    for _ in range(3):
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
        figures = np.array([process.communicate()[0].split() for process in running], dtype=float)
        rounds.append((figures[:, 0].sum(), figures[:, 1].mean()))
    rate, cpu_s = np.median(rounds, axis=0)
    return float(rate), float(cpu_s)


def _preprocess(corpus: Path, folder: Path, output: Path, workers: int, save_every_s: float) -> None:
    """Run as the command does, and print the seconds and documents from the first batch to the last."""
    from aioloader.preprocess import Event, PreprocessOptions, preprocess

    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    seen: list[tuple[float, int]] = []

    def on_event(event: Event) -> None:
        if event.kind == "running":
            seen[1:] = [(time.perf_counter(), event.num_documents)]

    options = PreprocessOptions(
        inputs=(str(corpus),),
        tokenizer=str(folder / "tokenizer.json"),
        output=str(output),
        seq_len=_SEQ_LEN,
        eos="id:0",
        workers=workers,
        save_every_s=save_every_s,
    )
    preprocess(options, on_event=on_event)
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    print(json.dumps({"share": (last - first) / max(1, last), "seconds": last_s - first_s}))


def _measure(folder: Path, megabytes: int, output: Path, workers: int, num_bytes: int) -> Measured:
    """Run it once, and look at its process tree on the way."""
    _remove(output)
    started = time.perf_counter()
    process = subprocess.Popen(_run_command(folder, megabytes, output, workers), stdout=subprocess.PIPE, text=True)
    samples: list[tuple[float, float]] = []
    cpu_s = 0.0
    while process.poll() is None:
        cpu_s = max(cpu_s, tree_cpu_s(process.pid))
        samples.append((time.perf_counter() - started, tree_pss_bytes(process.pid) / 1e6))
        time.sleep(_SAMPLE_EVERY_S)
    wall_s = time.perf_counter() - started
    assert process.stdout is not None
    steady: dict[str, Any] = json.loads(process.stdout.read())
    return Measured(
        wall_s=wall_s,
        steady_mb_s=num_bytes / 1e6 * steady["share"] / max(1e-9, steady["seconds"]),
        cpu_s=cpu_s,
        peak_mb=max(size for _, size in samples),
        growth_mb=_growth(samples, wall_s),
    )


def _growth(samples: list[tuple[float, float]], wall_s: float) -> float:
    """Return by how much a line through the samples rises from a third of the run to shortly before its end."""
    late = [(at, size) for at, size in samples if wall_s / 3 <= at <= wall_s - 1.0]
    if len(late) < 4:
        return float("nan")
    times, sizes = zip(*late, strict=True)
    return float(np.polyfit(times, sizes, 1)[0] * (times[-1] - times[0]))


def _kill_three_times(folder: Path, megabytes: int, workers: int, expected: dict[str, str]) -> str:
    """Kill the run at three random places, start it again each time, and compare."""
    output, total = folder / "out-killed", json.loads((folder / f"out-{workers}" / "metadata.json").read_text())["num_tokens"]
    _remove(output)
    command = _run_command(folder, megabytes, output, workers, save_every_s=0.25)
    kills = []
    for share in sorted(random.uniform(0.05, 0.85) for _ in range(3)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and _num_saved(output) < share * total:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills.append(f"{_num_saved(output) / 1e6:.2f} M")
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    verdict = "byte-identical" if _digest(output) == expected else "DIFFERENT"
    return f"killed three times, with {', '.join(kills)} tokens saved of {total / 1e6:.2f} M; resumed output {verdict}"


def _num_saved(output: Path) -> int:
    """Return the tokens before the saved place."""
    try:
        return int(json.loads((output / "progress.json").read_text())["position"]["tokens"])
    except (FileNotFoundError, TypeError):  # nothing saved yet
        return 0


def _run_command(folder: Path, megabytes: int, output: Path, workers: int, save_every_s: float = 2.0) -> list[str]:
    return [*_command(folder), "--megabytes", str(megabytes), "--run", str(output), str(workers), str(save_every_s)]


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.preprocess_table", "--folder", str(folder)]


def _digest(output: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.iterdir() if path.name != ".lock"}


def _remove(output: Path) -> None:
    if output.exists():
        for path in output.iterdir():
            path.unlink()


if __name__ == "__main__":
    main()
