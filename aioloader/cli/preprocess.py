"""`aioloader preprocess`: documents to token files, offline."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from aioloader.cli.meter import Meter
from aioloader.errors import AioLoaderError, ConfigError

if TYPE_CHECKING:
    from aioloader.preprocess import Preprocessed

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Tokenizes and packs documents into files that training reads memory-mapped. Memory stays flat, whatever the size of the input. The
files do not depend on the number of workers; a run that was killed goes on where it stood when the same command is given again."""

_EPILOG = """\
examples:
  aioloader preprocess corpus/*.jsonl --tokenizer gpt2 --seq-len 4096 --output packed
  aioloader preprocess books/ --tokenizer tokenizer.json --packing none --per-input --dtype int32 --output tokens

Exit status: 0 all is well, 1 a document failed (with --on-error skip: all of them) or the disk did, 2 it was asked for wrongly."""

_MOST_FAILURES = 20


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "preprocess",
        help="tokenize and pack documents into files, offline",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser.add_argument_group("input"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_output(parser.add_argument_group("output"))
    _add_running(parser.add_argument_group("running"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Preprocess and return the exit status.

    Raises:
        ConfigError: It was asked for wrongly.
    """
    from aioloader.preprocess import PreprocessOptions, preprocess

    names = PreprocessOptions.__dataclass_fields__
    given = vars(arguments) | {"inputs": tuple(arguments.inputs)}
    options = PreprocessOptions(**{name: value for name, value in given.items() if name in names})
    meter = Meter(sys.stderr, is_quiet=arguments.quiet)
    try:
        result = preprocess(options, on_event=meter.show)
    except ConfigError:
        raise
    except AioLoaderError as error:
        meter.clear()
        print(f"aioloader preprocess: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        meter.clear()
        print("aioloader preprocess: interrupted; the same command goes on where this one stood.", file=sys.stderr)
        return 130
    finally:
        meter.clear()
    print(json.dumps(_facts(result)) if arguments.summary == "json" else _summary(result))
    return 1 if result.status == "failed" else 0


def _add_input(group: Any) -> None:
    group.add_argument("inputs", nargs="+", metavar="INPUT", help="files, directories or patterns of one kind: .jsonl, .parquet, or text")
    group.add_argument("--text-field", default="text", metavar="NAME", help="field or column with the text (default: text)")
    group.add_argument("--split", default="train", metavar="NAME", help="split of a data set of the hub, given as hf:NAME (default: train)")
    group.add_argument("--hub-config", metavar="NAME", help="configuration of a data set of the hub")
    group.add_argument("--limit", type=int, metavar="N", help="read so many documents at most")
    group.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="stop at a document that fails, or leave it out and report it"
    )


def _add_tokens(group: Any) -> None:
    group.add_argument("--tokenizer", required=True, metavar="NAME", help="tokenizer.json, or a path or name for AutoTokenizer")
    group.add_argument(
        "--eos", default="auto", metavar="TOKEN", help="token (id:5 for number 5) that ends each document (default: the tokenizer's)"
    )
    group.add_argument("--no-eos", dest="eos", action="store_const", const=None, help="end documents with nothing")
    group.add_argument(
        "--bos", nargs="?", const="auto", metavar="TOKEN", help="begin each document with this token, or with the tokenizer's own"
    )
    group.add_argument("--no-bos", dest="bos", action="store_const", const=None, help="begin documents with nothing (default)")
    group.add_argument("--pad", default="auto", metavar="TOKEN", help="token that fills rows up with best_fit (default: that of --eos)")
    group.add_argument("--special-tokens-in-text", action="store_true", help="text that reads like a special token becomes that token")
    group.add_argument(
        "--dtype", choices=("auto", "uint16", "uint32", "int32", "int64"), default="auto", help="type on disk (default: the narrowest)"
    )


def _add_output(group: Any) -> None:
    group.add_argument("--output", required=True, metavar="DIR", help="directory to write to")
    group.add_argument("--format", choices=("npy", "pt", "bin", "mds"), default="npy", help="what to write (default: npy)")
    group.add_argument("--seq-len", type=int, metavar="N", help="tokens per row")
    group.add_argument(
        "--packing",
        choices=("concat", "best_fit", "none"),
        default="concat",
        help="cut documents at row ends, fit whole ones into rows, or write an uncut stream (default: concat)",
    )
    group.add_argument("--per-input", action="store_true", help="a file of its own for each INPUT: tokens_0, tokens_1, ...")
    group.add_argument("--overwrite", action="store_true", help="replace what a run with other settings or inputs wrote")
    group.add_argument("--verify", action="store_true", help="compare checksums where a finished output is used again")


def _add_running(group: Any) -> None:
    group.add_argument("--workers", "--num-proc", type=int, metavar="N", help="processes (default: one per CPU; 0: this one)")
    group.add_argument(
        "--save-every", dest="save_every_s", type=float, default=2.0, metavar="S", help="seconds between saved places (default: 2)"
    )
    group.add_argument("--summary", choices=("text", "json"), default="text", help="how to print what came of it")
    group.add_argument("--quiet", action="store_true", help="show no progress")


def _facts(result: Preprocessed) -> dict[str, Any]:
    """Return the summary as JSON."""
    metadata = result.metadata
    facts: dict[str, Any] = {
        "status": result.status,
        "output": str(result.output),
        "ok": result.num_documents,
        "failed": result.num_failed,
        "failures": [{"place": one.place, "error": one.error} for one in result.failures],
    }
    if metadata is not None:
        facts |= {
            "tokens": metadata.num_tokens,
            "shape": list(metadata.shape),
            "dtype": metadata.dtype,
            "dropped_tail": metadata.dropped_tail,
            "padding": metadata.details["padding_tokens"],
            "files": sorted(metadata.files),
        }
    return facts


def _summary(result: Preprocessed) -> str:
    """Return the summary as text."""
    lines = [f"documents: ok {result.num_documents:,}, failed {result.num_failed:,}"]
    lines += [f"  {one.place}: {one.error}" for one in result.failures[:_MOST_FAILURES]]
    if result.num_failed > _MOST_FAILURES:
        lines.append(f"  and {result.num_failed - _MOST_FAILURES:,} more, all of them in {result.output / 'failures.jsonl'}")
    metadata = result.metadata
    if metadata is None:
        return "\n".join([*lines, "nothing was written, since every document failed"])
    shape = " x ".join(f"{length:,}" for length in metadata.shape)
    verb = "is there already, and was made with the same settings" if result.status == "reused" else "written"
    lines.append(
        f"tokens: {metadata.num_tokens:,} as {metadata.dtype}[{shape}]; {metadata.details['padding_tokens']} of padding, "
        f"{metadata.dropped_tail} left out at the end"
    )
    return "\n".join([*lines, f"{result.output}: {verb}"])
