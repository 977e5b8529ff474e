"""The command `aioloader`: its subcommands, exit statuses, and that asking for help loads nothing heavy."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from aioloader import __version__
from aioloader.cli.main import main, make_parser

HEAVY = ("torch", "numpy", "tokenizers", "transformers", "datasets", "pyarrow", "anyio")


def subcommands() -> dict[str, argparse.ArgumentParser]:
    action = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "aioloader.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)


def test_the_subcommands() -> None:
    assert sorted(subcommands()) == ["check", "preprocess"]


def test_every_subcommand_says_how_to_run_it() -> None:
    for name, parser in subcommands().items():
        assert callable(parser.get_default("run")), name
        assert all(action.help for action in parser._actions), name


def test_help_imports_nothing_heavy() -> None:
    code = (
        f"import sys, aioloader.cli.main as cli; cli.make_parser().format_help(); print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15)
    assert done.stdout == "[]\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"aioloader {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["sing"], ["check", "--no-such-option"], ["check", "--world-size", "many"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith("usage: aioloader")


def test_a_wrong_configuration_is_status_2_with_our_message_and_no_traceback() -> None:
    done = run("check", "--world-size", "12", "--layout", "dp=4,tp=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "aioloader check: --layout: expected sizes whose product is the world size, 12, got dp=4, tp=2, which is 8;"
    )
    assert done.stderr.count("\n") == 1


def test_output_that_nobody_reads_to_its_end_is_no_traceback() -> None:
    # More than a pipe holds, so that the writer is still writing when the reader leaves.
    command = [sys.executable, "-W", "error", "-m", "aioloader.cli.main", "check", "--world-size", "8192", "--all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"8192 ranks: dp=8192 (outermost first)\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=15) == 1
