"""`aioloader preprocess`: faults that people reported of others, by their number, exit statuses and what is printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioloader.cli.main import main
from aioloader.cli.meter import Meter
from aioloader.preprocess.result import Event
from tests.preprocess.cases import digests, documents, train, write_lines

pytest.importorskip("tokenizers")

TEXTS = documents(100)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("in") / "in.jsonl", TEXTS)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of which numbers 8, 50 and 99 are malformed."""
    path = write_lines(tmp_path_factory.mktemp("bad") / "bad.jsonl", TEXTS)
    rows = path.read_text().splitlines()
    for at in (7, 49, 98):
        rows[at] = rows[at][:-2]
    path.write_text("\n".join(rows))
    return path


def command(source: Path, tokenizer: Path, output: Path, *chosen: str) -> list[str]:
    defaults = [] if "--packing" in chosen else ["--seq-len", "32"]
    return ["preprocess", str(source), "--tokenizer", str(tokenizer), "--output", str(output), *defaults, "--workers", "0", *chosen]


def times(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in output.iterdir()}


def test_summary(lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(lines, tokenizer, tmp_path / "out", "--summary", "json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["ok"], facts["failed"], facts["dtype"]) == ("written", 100, 0, "uint16")
    assert facts["shape"] == [facts["tokens"] // 32, 32]
    assert facts["files"] == ["tokens.documents.npy", "tokens.npy"]
    assert main(command(lines, tokenizer, tmp_path / "other")) == 0
    assert f"documents: ok 100, failed 0\ntokens: {facts['tokens']:,} as uint16" in capsys.readouterr().out


def test_settings_that_changed_are_refused_and_the_same_ones_used_again(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K76: length, tokenizer and input; and the tokenizer used in between."""
    output = tmp_path / "out"
    assert main(command(lines, tokenizer, output)) == 0
    before = times(output)
    other = train(tmp_path / "other.json", vocab_size=400)
    for chosen, difference in (
        (command(lines, tokenizer, output, "--seq-len", "64"), "seq_len: 32 then, 64 now"),
        (command(lines, other, output), "tokenizer.sha256: "),
        (command(write_lines(tmp_path / "more.jsonl", TEXTS[1:]), tokenizer, output), "inputs.0.files: "),
    ):
        assert main(chosen) == 2
        assert difference in capsys.readouterr().err
    assert main(command(lines, tokenizer, tmp_path / "in between", "--special-tokens-in-text")) == 0
    assert main(command(lines, tokenizer, output)) == 0
    assert "is there already, and was made with the same settings" in capsys.readouterr().out
    assert times(output) == before
    os.utime(lines, ns=(1, 1))
    assert main(command(lines, tokenizer, output)) == 2
    assert "inputs.0.modified: " in capsys.readouterr().err
    assert times(output) == before


def test_other_settings_replace_it_where_that_is_asked_for(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(command(lines, tokenizer, output)) == 0
    before = times(output)
    assert main(command(lines, tokenizer, output, "--overwrite")) == 0
    assert times(output) == before, "the same settings overwrite nothing"
    assert main(command(lines, tokenizer, output, "--format", "pt", "--overwrite")) == 0
    assert main(command(lines, tokenizer, tmp_path / "fresh", "--format", "pt")) == 0
    assert digests(output) == digests(tmp_path / "fresh")
    assert set(digests(output)) == {"metadata.json", "tokens.pt", "tokens.documents.npy"}


def test_damaged_files_are_not_used_again(lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K76: a size at once, a content where that is asked for."""
    output = tmp_path / "out"
    assert main(command(lines, tokenizer, output)) == 0
    good = digests(output)
    data = bytearray((output / "tokens.npy").read_bytes())
    data[-1] ^= 1
    (output / "tokens.npy").write_bytes(data)
    assert main(command(lines, tokenizer, output)) == 0
    assert main(command(lines, tokenizer, output, "--verify")) == 1
    assert "tokens.npy: expected SHA-256" in capsys.readouterr().err
    (output / "tokens.npy").write_bytes(data[:-1])
    assert main(command(lines, tokenizer, output)) == 1
    assert f"tokens.npy: expected {len(data)} bytes, got {len(data) - 1}" in capsys.readouterr().err
    assert main(command(lines, tokenizer, output, "--overwrite")) == 0
    assert digests(output) == good


def test_all_documents_that_fail_are_no_success(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K77."""
    source = tmp_path / "bad.jsonl"
    source.write_text("{\n" * 20)
    assert main(command(source, tokenizer, tmp_path / "out", "--on-error", "skip", "--summary", "json")) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["ok"], facts["failed"]) == ("failed", 0, 20)
    assert digests(tmp_path / "out") == {}


def test_bad_documents_are_left_out_and_named(spoiled: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K78: with four workers, 97 documents in order and the places of 3."""
    chosen = ("--on-error", "skip", "--summary", "json", "--workers", "4", "--packing", "none")
    assert main(command(spoiled, tokenizer, tmp_path / "out", *chosen)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ok"], facts["failed"]) == (97, 3)
    assert [failure["place"] for failure in facts["failures"]] == [f"{spoiled}:{number}" for number in (8, 50, 99)]
    good = write_lines(tmp_path / "good.jsonl", [text for at, text in enumerate(TEXTS) if at not in (7, 49, 98)])
    assert main(command(good, tokenizer, tmp_path / "good", "--packing", "none")) == 0
    assert digests(tmp_path / "out")["tokens.npy"] == digests(tmp_path / "good")["tokens.npy"]
    reported = [json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    assert reported == facts["failures"]
    assert main(command(spoiled, tokenizer, tmp_path / "out", "--packing", "none")) == 2
    assert "an output with all documents, got one without 3 that failed" in capsys.readouterr().err


def test_the_first_bad_document_ends_a_strict_run(
    spoiled: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K78: with four workers it is always the first."""
    assert main(command(spoiled, tokenizer, tmp_path / "out", "--workers", "4")) == 1
    assert f"{spoiled}:8: ValueError: expected a JSON object, got " in capsys.readouterr().err
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_one_process_writes_to_a_directory_and_the_others_use_it(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """K75: ranks 0 and 1, and 2 and 3, with a directory each, all started at once; ten rounds."""
    for number in range(10):
        outputs = [tmp_path / f"round-{number}-{rank // 2}" for rank in range(4)]
        found = start_at_once([command(lines, tokenizer, output, "--limit", "30", "--summary", "json", "--quiet") for output in outputs])
        assert [fact["exit"] for fact in found] == [0] * 4
        assert [sorted(fact["status"] for fact in pair) for pair in (found[:2], found[2:])] == [["reused", "written"]] * 2
        assert [fact["tokens"] for fact in found] == [found[0]["tokens"]] * 4
        assert digests(outputs[0]) == digests(outputs[2])


def start_at_once(commands: list[list[str]]) -> list[dict[str, Any]]:
    """Run each in a process of its own and return its summary and exit status. Forked: a fresh interpreter imports for seconds."""
    go, went = os.pipe()
    ranks = [fork_rank(rank, arguments, go, went) for rank, arguments in enumerate(commands)]
    os.close(go)
    os.close(went)  # all of them read the end of it now
    found = []
    for child, output in ranks:
        with open(output, encoding="utf-8") as file:
            facts = json.loads(file.read() or "{}")
        found.append({**facts, "exit": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})
    return found


def fork_rank(rank: int, arguments: list[str], go: int, went: int) -> tuple[int, int]:
    """Return the process, which runs once the pipe `go` is at its end, and what its output can be read from."""
    output, own = os.pipe()
    child = os.fork()
    if not child:
        status = 99
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4"}
            os.close(went)
            os.read(go, 1)
            with open(own, "w", encoding="utf-8") as stdout, contextlib.redirect_stdout(stdout):
                status = main(arguments)
        finally:
            os._exit(status)
    os.close(own)
    return child, output


def test_files_that_nobody_claims_are_not_written_over(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokens.npy").write_text("precious")
    assert main(command(lines, tokenizer, tmp_path / "out")) == 2
    assert "got 'tokens.npy', of which nothing says where it came from" in capsys.readouterr().err
    assert (tmp_path / "out" / "tokens.npy").read_text() == "precious"


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        (["--seq-len", "0"], "seq_len: expected an int of at least 1"),
        (["--packing", "none", "--seq-len", "8"], "seq_len: expected none with packing 'none'"),
        (["--eos", "<never>"], "eos: expected a token of the vocabulary"),
        (["--tokenizer", "gone.json"], "tokenizer: expected an existing file"),
    ],
)
def test_what_is_asked_for_wrongly_has_status_2(
    lines: Path, tokenizer: Path, tmp_path: Path, chosen: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(lines, tokenizer, tmp_path / "out", *chosen)) == 2
    assert match in capsys.readouterr().err


def test_help_is_there_at_once() -> None:
    """C001: without importing what runs."""
    script = (
        "import sys; from aioloader.cli.main import main\n"
        "try: main(['preprocess', '--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'uvloop'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=15)
    assert "--seq-len" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_replaced() -> None:
    stream = Terminal()
    meter = Meter(stream, pause_s=0.0)
    meter.show(Event(kind="running", num_documents=10, num_tokens=2_000_000, fraction=0.5))
    meter.show(Event(kind="running", num_documents=1200, num_tokens=3_000_000))
    assert stream.getvalue().split("\r")[1].startswith("[############............]  50%  10 documents, 2.0 M tokens")
    assert " 50%  1,200 documents" in stream.getvalue().split("\r")[2]
    assert "\n" not in stream.getvalue()
    meter.clear()
    assert stream.getvalue().endswith(" \r")


def test_a_log_has_lines_now_and_then() -> None:
    stream = io.StringIO()
    meter = Meter(stream)
    meter.show(Event(kind="waiting"))
    meter.show(Event(kind="running", num_documents=10, num_tokens=2_000))
    meter.clear()
    assert stream.getvalue() == "another process writes to this directory; waiting for it\n"
    Meter(stream, is_quiet=True).show(Event(kind="waiting"))
    assert stream.getvalue().count("\n") == 1
