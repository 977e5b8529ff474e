"""The benchmark suite: `python -m tests.benchmarks`, from the root of the repository.

Prints a table for each workload and writes everything to a JSON file, of which `--markdown` makes the tables of README.md. Ends with 1
if contestants did not do the same work or if aioloader failed; missing a goal is a number, not a failure.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.contestants import CONTESTANTS, OURS
from tests.benchmarks.launching import ROOT, adopt_orphans
from tests.benchmarks.machine import describe_machine, describe_versions
from tests.benchmarks.markdown import as_markdown
from tests.benchmarks.rounds import Result, run_workload
from tests.benchmarks.synthetic_work import iterations_for
from tests.benchmarks.task import Settings
from tests.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["main"]

_DESCRIPTION = (
    "Measures aioloader beside its peers. All workloads take about 100 minutes on 2 cores that are free of other work: overhead, python, "
    "tokenizer, jpeg, large, tail, harm-10ms and memory about 10 minutes each, each of the others 1 to 6."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the workloads and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    if options.markdown is not None:
        print(as_markdown(json.loads(options.markdown.read_text())))
        return 0
    started_s = time.monotonic()
    rounds = options.rounds or (0 if options.quick else 5)
    settings = Settings(
        workers=options.workers, cache=str(Path(options.cache).resolve()), iterations_per_ms=iterations_for(1e-3), is_quick=options.quick
    )
    facts = {
        "command": shlex.join(["python", "-m", "tests.benchmarks", *given]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "workers": options.workers,
        "rounds": rounds,
        "is_quick": options.quick,
    }
    sizes = {"workers": options.workers, "cores": len(os.sched_getaffinity(0))}
    print(report.head(facts), flush=True)
    adopt_orphans()
    results: list[Result] = []
    for name in options.workloads:
        result = _run(WORKLOADS[name], options, settings, rounds)
        if result is not None:
            results.append(result)
            print(f"\n{report.as_text(result, **sizes)}", flush=True)
            facts["duration_s"] = round(time.monotonic() - started_s)
            _write(Path(options.json), json.dumps(report.as_json(results, facts, **sizes), indent=2))
    print(f"\n{report.tail()}", flush=True)
    return 1 if any(_is_broken(result) for result in results) else 0


def _run(workload: Workload, options: argparse.Namespace, settings: Settings, rounds: int) -> Result | None:
    lacking = [module for module in workload.requires if importlib.util.find_spec(module) is None]
    if lacking:
        print(f"\n{workload.name}: left out: {', '.join(lacking)} is not installed", flush=True)
        return None
    if workload.prepare is not None:
        workload.prepare(Path(settings.cache))
    usual = workload.num_quick_records if options.quick else workload.num_records
    num_records = math.ceil(usual * options.scale / 64) * 64  # whole batches of every size
    return run_workload(
        workload,
        [name for name in workload.contestants if name in options.contestants],
        settings,
        num_records=num_records,
        rounds=min(rounds, workload.max_rounds),
        timeout_s=options.timeout,
        note=lambda text: print(text, file=sys.stderr, flush=True),
    )


def _is_broken(result: Result) -> bool:
    return bool(result.disagreements) or any(name in result.left_out for name in OURS)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=_DESCRIPTION)
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), help=f"some of {','.join(WORKLOADS)}")
    parser.add_argument("--contestants", type=_names(CONTESTANTS), default=list(CONTESTANTS), help=f"some of {','.join(CONTESTANTS)}")
    parser.add_argument("--rounds", type=_positive, help="timed rounds (default 5; quick: none, the checked round counts)")
    parser.add_argument("--workers", type=_positive, default=2, help="of each contestant (default 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the usual number of records (default 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process (default 600)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, 10 to 20 minutes")
    parser.add_argument("--json", default=str(ROOT / "build" / "bench.json"), help="where the JSON goes (default build/bench.json)")
    parser.add_argument(
        "--markdown", type=Path, metavar="JSON", help="print what a run has written as tables for README.md, and run nothing"
    )
    parser.add_argument("--cache", default=str(ROOT / "build" / "bench"), help="folder of prepared data (default build/bench)")
    return parser


def _names(known: Mapping[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
        return names

    return parse


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a run that is stopped ends its processes
    sys.exit(main())
