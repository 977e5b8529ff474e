"""The command `aioloader`: one module for each subcommand, which imports what is heavy only when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from aioloader import __version__
from aioloader.cli import check, preprocess
from aioloader.errors import AioLoaderError

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; each subcommand sets `run`, a function from its arguments to the exit status."""
    parser = argparse.ArgumentParser(
        prog="aioloader", description="The asyncio-native streaming data loader for distributed PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"aioloader {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check.add_parser(subparsers)
    preprocess.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 all is well, 1 something does not fit together, 2 it was asked for wrongly."""
    options = make_parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except AioLoaderError as error:
        print(f"aioloader {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # What read the output has enough, such as `head`; the interpreter would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
