"""`aioloader check`: the placement of any job without running it, and states that do or do not belong together."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  a loader needs it; loaded here, where it takes none of a test's time

from aioloader import AlreadySharded, FixedBatch, Loader, Mesh, StackCollator
from aioloader.cli import check
from aioloader.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser()
    check.add_parser(whole.add_subparsers())
    return whole


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit status and what was printed on stdout and stderr."""
    options = parser().parse_args(["check", *arguments])
    status = options.run(options)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_options_are_frozen() -> None:
    (subparsers,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = {
        " ".join(action.option_strings) or action.dest: (action.default, action.choices) for action in subparsers.choices["check"]._actions
    }
    assert options == {
        "-h --help": (argparse.SUPPRESS, None),
        "states": (None, None),
        "--world-size": (None, None),
        "--layout": (None, None),
        "--lanes": (None, None),
        "--accumulation": (None, None),
        "--reader": ("all", ("all", "group")),
        "--format": ("table", ("table", "json")),
        "--all": (False, None),
    }


def test_the_table_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--world-size", "8", "--layout", "pp=2,dp=-1,tp=2", "--lanes", "4", "--reader", "group")
    assert (status, err) == (0, "")
    assert out == (
        "8 ranks: pp=2, dp=2, tp=2 (outermost first)\n"
        "4 lanes on 2 data-parallel ranks: accumulation 2\n"
        "may go on with the same global batches on dp_size 1, 2, 4\n"
        "\n"
        "rank  dp  pp  tp  lanes  same micro-batches as  reads\n"
        "0     0   0   0   0 2    0 1 4 5                yes\n"
        "1     0   0   1   0 2    0 1 4 5                no\n"
        "2     1   0   0   1 3    2 3 6 7                yes\n"
        "3     1   0   1   1 3    2 3 6 7                no\n"
        "4     0   1   0   0 2    0 1 4 5                no\n"
        "5     0   1   1   0 2    0 1 4 5                no\n"
        "6     1   1   0   1 3    2 3 6 7                no\n"
        "7     1   1   1   1 3    2 3 6 7                no\n"
    )


def test_a_job_of_data_parallel_ranks_needs_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--world-size", "2")
    assert out.splitlines()[-3:] == [
        "rank  dp  lanes  same micro-batches as  reads",
        "0     0   0      0                      yes",
        "1     1   1      1                      yes",
    ]


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--layout", "dp=2,tp=2", "--accumulation", "2", "--reader", "group", "--format", "json")
    found = json.loads(out)
    assert {
        name: found[name] for name in ("world_size", "layout", "dp_size", "num_lanes", "accumulation", "resumable_dp_sizes", "reader")
    } == {
        "world_size": 4,
        "layout": {"dp": 2, "tp": 2},
        "dp_size": 2,
        "num_lanes": 4,
        "accumulation": 2,
        "resumable_dp_sizes": [1, 2, 4],
        "reader": "group",
    }
    assert found["groups"] == [
        {"dp_rank": 0, "lanes": [0, 2], "ranks": [0, 1], "readers": [0]},
        {"dp_rank": 1, "lanes": [1, 3], "ranks": [2, 3], "readers": [2]},
    ]
    assert found["ranks"][3] == {"rank": 3, "dp_rank": 1, "pp_rank": 0, "cp_rank": 0, "tp_rank": 1, "ep_rank": 0}


def test_thousands_of_ranks_are_summarised_unless_all_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--world-size", "4096", "--layout", "pp=4,dp=256,tp=4", "--reader", "group"]
    _, short, _ = run(capsys, *job)
    assert len(short.splitlines()) < 45
    assert "\n0    0      0 1 2 3 ... 3072 3073 3074 3075 (16)              0\n" in short
    assert "\n... 224 more ...\n" in short
    assert short.endswith("\n255  255    1020 1021 1022 1023 ... 4092 4093 4094 4095 (16)  1020\n(--all prints every rank)\n")
    _, whole, _ = run(capsys, *job, "--all")
    assert len(whole.splitlines()) == 4096 + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "16", "--layout", "dp=4,tp=2"], "--layout: expected sizes whose product is the world size, 16, got dp=4, tp=2"),
        (["--world-size", "8", "--layout", "dp=2,dp=4"], "--layout: expected each axis once, got dp twice"),
        (["--world-size", "8", "--layout", "pp=2,tp=4"], "--layout: expected a data-parallel axis"),
        (["--world-size", "-8"], "--layout: expected a world size of 1 or more, got -8"),
        (["--layout", "dp"], "--layout: expected AXIS=SIZE,..., got 'dp'; write e.g. pp=2,dp=4,tp=2"),
        (["--layout", "dp=two"], "--layout: expected AXIS=SIZE,..., got 'dp=two'"),
        (["--layout", "dp=-1"], "--layout: expected all sizes, where no world size is known"),
        (["--lanes", "8"], "--world-size: expected the number of ranks, or --layout with all sizes, got neither"),
        (["--world-size", "8", "--lanes", "0"], "--lanes: expected an integer, 1 or more, got 0"),
        (["--world-size", "8", "--accumulation", "-1"], "--accumulation: expected an integer, 1 or more, got -1"),
        (["--world-size", "8", "--lanes", "12"], r"Loader\(lanes=\): expected a positive multiple of dp_size \(8\), got 12"),
        (["--world-size", "8", "--lanes", "8", "--accumulation", "1"], r"Placement\.of\(lanes=\): expected lanes or accumulation"),
        ([], "arguments: expected either a layout or STATE files, got neither"),
        (["a.json", "--world-size", "8"], "arguments: expected either a layout or STATE files, got both"),
    ],
)
def test_what_is_no_job_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        run(capsys, *arguments)


def states(directory: Path, *, source: Any = None, steps: tuple[int, ...] = (2, 2), **options: Any) -> list[str]:
    """Save the states of the ranks of a run after so many steps and return the paths."""
    paths = []
    for rank, num_steps in enumerate(steps):
        mesh = Mesh(dp_rank=rank, dp_size=len(steps))
        data = [{"x": number} for number in range(40)] if source is None else source
        loader = Loader(data, batch=FixedBatch(2), collate=StackCollator(), mesh=mesh, workers=0, host="thread", **options)
        with loader:
            batches = iter(loader)
            for _ in range(num_steps):
                next(batches)
            path = directory / f"rank{rank}.json"
            path.write_text(json.dumps(loader.state_dict()))
            paths.append(str(path))
    return paths


def test_one_state_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = states(tmp_path)[1]
    status, out, err = run(capsys, path)
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: fingerprint ")
    assert "\n  rank 1 of 2, lanes 1 of 2\n  after step 2; epochs 0\n" in out


def test_the_states_of_one_run_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # C063
    status, out, err = run(capsys, *states(tmp_path))
    assert (status, err) == (0, "")
    hashes = {line.rpartition(" ")[2] for line in out.splitlines() if ": fingerprint " in line}
    assert len(hashes) == 1


def test_states_of_different_configurations_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # C063
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, other = states(tmp_path / "a", seed=0)[0], states(tmp_path / "b", seed=1)[1]
    status, out, err = run(capsys, first, other)
    assert status == 1
    assert err == f"{other}: fingerprint.seed: expected 0 as in {first}, got 1\n"
    hashes = {line.rpartition(" ")[2] for line in out.splitlines() if ": fingerprint " in line}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("steps", "chosen", "message"),
    [
        ((2, 3, 3), (0, 1, 2), "micro-batches delivered: .*lane 0: 2, lane 1: 3, lane 2: 3"),
        ((2, 2, 2), (0, 2), "state of rank 1: .* got 'missing'"),
    ],
)
def test_states_that_are_not_those_of_all_ranks_after_one_step(
    steps: tuple[int, ...], chosen: tuple[int, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = states(tmp_path, steps=steps)
    status, _, err = run(capsys, *(paths[rank] for rank in chosen))
    assert status == 1
    assert re.search(message, err)


def test_a_stream_that_is_split_already_has_another_source_on_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    streams = [AlreadySharded([{"x": number} for number in range(size)]) for size in (40, 44)]
    paths = [states(tmp_path / name, source=stream)[rank] for rank, (name, stream) in enumerate(zip("ab", streams, strict=True))]
    assert run(capsys, *paths)[0] == 0


def test_json_of_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = states(tmp_path)
    status, out, _ = run(capsys, *paths, "--format", "json")
    found = json.loads(out)
    assert (status, found["belong_together"], found["reasons"]) == (0, True, [])
    assert [one["path"] for one in found["states"]] == paths


@pytest.mark.parametrize("text", [None, "{", '{"version": 2}', "[]"])
def test_a_file_without_a_state_is_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json: expected the state of a loader, as JSON, got "):
        run(capsys, str(path))
