"""`aioloader check`: what each rank of a job will read, without running it; and whether saved states belong together."""

from __future__ import annotations

import argparse
import json
from typing import Any

from aioloader.cli import check_states
from aioloader.cli.tables import elided, table
from aioloader.errors import ConfigError
from aioloader.order.layout import Layout
from aioloader.order.placement import Placement

__all__ = ["add_parser", "run"]

_MOST_LINES = 32
"""A larger job is summarised: one line for each group of peers, and no more lines than this."""

_DESCRIPTION = """\
Prints which lanes each rank serves, which ranks get the same micro-batches, and on how many data-parallel ranks the run may go on.
With STATE files: what each says, and whether they belong to one run."""

_EPILOG = """\
examples:
  aioloader check --world-size 16 --layout pp=2,dp=-1,tp=2 --lanes 8
  aioloader check rank0.json rank1.json

Exit status: 0 all is well, 1 the states do not belong together, 2 the layout or the arguments are wrong."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "check",
        help="print what each rank reads, without running; compare saved states",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("states", nargs="*", metavar="STATE", help="a loader's state as JSON; several: those of all ranks of a run")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks of the job")
    parser.add_argument("--layout", metavar="AXIS=SIZE,...", help="axes, outermost first; one size may be -1 (default: dp=-1)")
    parser.add_argument("--lanes", type=int, metavar="L", help="lanes of the run (default: one for each data-parallel rank)")
    parser.add_argument("--accumulation", type=int, metavar="G", help="instead of --lanes: micro-batches of a rank in a step")
    parser.add_argument("--reader", choices=("all", "group"), default="all", help="whether each peer reads, or one for all of them")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="how to print it")
    parser.add_argument("--all", action="store_true", help="print every rank, however many there are")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was asked for and return the exit status.

    Raises:
        ConfigError: The layout or the arguments are wrong, or a file holds no state.
    """
    asked = any(value is not None for value in (options.world_size, options.layout, options.lanes, options.accumulation))
    if bool(options.states) == asked:
        got = "both" if asked else "neither"
        do = "e.g. aioloader check --world-size 16 --layout pp=2,dp=-1,tp=2"
        raise ConfigError("arguments", expected="either a layout or STATE files", got=got, do=do)
    if options.states:
        return check_states.run(options.states, options.format)
    placement = _placement(options)
    print(json.dumps(_as_json(placement, options.reader), indent=2) if options.format == "json" else _as_text(placement, options))
    return 0


def _placement(options: argparse.Namespace) -> Placement:
    if options.layout is None and options.world_size is None:
        raise ConfigError("--world-size", expected="the number of ranks, or --layout with all sizes", got="neither", do="give one of them")
    layout = Layout.of(_axes("dp=-1" if options.layout is None else options.layout), options.world_size, where="--layout")
    for name, value in (("--lanes", options.lanes), ("--accumulation", options.accumulation)):
        if value is not None and value < 1:
            raise ConfigError(name, expected="an integer, 1 or more", got=value, do="leave it out for one lane on each data-parallel rank")
    return Placement.of(layout, lanes=options.lanes, accumulation=options.accumulation)


def _axes(text: str) -> list[tuple[str, int]]:
    axes = []
    for part in text.split(","):
        axis, _, size = part.partition("=")
        try:
            axes.append((axis.strip(), int(size)))
        except ValueError:
            raise ConfigError("--layout", expected="AXIS=SIZE,...", got=repr(part), do="write e.g. pp=2,dp=4,tp=2") from None
    return axes


def _as_json(placement: Placement, reader: str) -> dict[str, Any]:
    groups = [
        {
            "dp_rank": dp_rank,
            "lanes": list(placement.lanes(dp_rank)),
            "ranks": list(ranks),
            "readers": list(ranks[:1] if reader == "group" else ranks),
        }
        for dp_rank, ranks in enumerate(placement.groups())
    ]
    ranks = []
    for rank in range(placement.layout.world_size):
        mesh = placement.mesh(rank)
        ranks.append({"rank": rank, **{f"{axis}_rank": getattr(mesh, f"{axis}_rank") for axis in ("dp", "pp", "cp", "tp", "ep")}})
    return {
        "world_size": placement.layout.world_size,
        "layout": dict(placement.layout.sizes),
        "dp_size": placement.dp_size,
        "num_lanes": placement.num_lanes,
        "accumulation": placement.accumulation,
        "resumable_dp_sizes": list(placement.resumable_dp_sizes),
        "reader": reader,
        "groups": groups,
        "ranks": ranks,
    }


def _as_text(placement: Placement, options: argparse.Namespace) -> str:
    sizes = ", ".join(map(str, placement.resumable_dp_sizes))
    lines = [
        f"{placement.layout.world_size} ranks: {placement.layout.describe()} (outermost first)",
        f"{placement.num_lanes} lanes on {placement.dp_size} data-parallel ranks: accumulation {placement.accumulation}",
        f"may go on with the same global batches on dp_size {sizes}",
        "",
    ]
    if options.all or placement.layout.world_size <= _MOST_LINES:
        return "\n".join([*lines, *_rank_lines(placement, options.reader)])
    return "\n".join([*lines, *_group_lines(placement, options.reader), "(--all prints every rank)"])


def _rank_lines(placement: Placement, reader: str) -> list[str]:
    axes = [axis for axis in ("dp", "pp", "cp", "tp", "ep") if axis == "dp" or getattr(placement.mesh(0), f"{axis}_size") > 1]
    groups = [elided(ranks) for ranks in placement.groups()]
    lanes = [elided(placement.lanes(dp_rank)) for dp_rank in range(placement.dp_size)]
    rows = []
    for rank in range(placement.layout.world_size):
        mesh = placement.mesh(rank)
        coordinates = [str(getattr(mesh, f"{axis}_rank")) for axis in axes]
        reads = "yes" if reader == "all" or mesh.peer_rank == 0 else "no"
        rows.append([str(rank), *coordinates, lanes[mesh.dp_rank], groups[mesh.dp_rank], reads])
    return table(["rank", *axes, "lanes", "same micro-batches as", "reads"], rows)


def _group_lines(placement: Placement, reader: str) -> list[str]:
    rows = [
        [str(dp_rank), elided(placement.lanes(dp_rank)), elided(ranks), str(ranks[0]) if reader == "group" else "all"]
        for dp_rank, ranks in enumerate(placement.groups())
    ]
    lines = table(["dp", "lanes", "ranks with the same micro-batches", "reads"], rows)
    if len(rows) <= _MOST_LINES:
        return lines
    half = _MOST_LINES // 2
    return [*lines[: half + 1], f"... {len(rows) - 2 * half} more ...", *lines[-half:]]
