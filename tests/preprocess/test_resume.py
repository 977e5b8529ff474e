"""A run that is killed and started again writes what an uninterrupted one writes, byte for byte."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioloader.errors import ConfigError, PreprocessError, SourceError
from aioloader.preprocess import Event, preprocess, rows
from aioloader.preprocess import run as run_module
from aioloader.preprocess.progress import read_progress
from tests.preprocess.cases import digests, documents, options, run, tokens_of, write_lines
from tests.preprocess.killing import kill_after, run_forked

TEXTS = documents(140)
NUM_BATCHES = 9
BATCH = 16


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_DOCUMENTS", BATCH)
    monkeypatch.setattr(rows, "BATCH_TOKENS", 700)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("in") / "in.jsonl", TEXTS)


def spoil(path: Path, *lines: int) -> None:
    """Make lines, counted from 0, no JSON."""
    texts = path.read_text().splitlines()
    for at in lines:
        texts[at] = "{"
    path.write_text("\n".join(texts))


@pytest.mark.parametrize("format", ["npy", "pt", "bin", "mds"])
def test_three_kills_leave_no_trace(lines: Path, tokenizer: Path, tmp_path: Path, format: Any) -> None:
    whole, broken = (options(lines, tokenizer, tmp_path / name, format=format) for name in ("whole", "broken"))
    preprocess(whole)
    draw = random.Random(format)
    for _ in range(3):
        assert kill_after(broken, draw.randint(1, 3))
        assert not (tmp_path / "broken" / "metadata.json").exists()
    preprocess(broken)
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


@pytest.mark.parametrize("chosen", [{"packing": "best_fit", "seq_len": 100}, {"packing": "none"}, {"limit": 100}, {"save_every_s": 1e9}])
def test_a_kill_after_any_batch_leaves_no_trace(lines: Path, tokenizer: Path, tmp_path: Path, chosen: dict[str, Any]) -> None:
    """Also after the last, where the loader's own state would begin the data anew; and where nothing was saved yet."""
    run(lines, tokenizer, tmp_path / "whole", **chosen)
    for num_events in itertools.count(1):
        output = tmp_path / str(num_events)
        if not kill_after(options(lines, tokenizer, output, **chosen), num_events):
            break
        run(lines, tokenizer, output, **chosen)
        assert digests(output) == digests(tmp_path / "whole"), f"killed after batch {num_events}"
    assert num_events > 1


def test_a_kill_between_two_inputs_leaves_no_trace(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", TEXTS[:20])
    sources = [other, lines, other]
    run(sources, tokenizer, tmp_path / "whole", per_input=True)
    for num_events in (2, 3, NUM_BATCHES + 2, NUM_BATCHES + 3):  # the last batch of a part and the first one of the next
        broken = options(sources, tokenizer, tmp_path / str(num_events), per_input=True)
        assert kill_after(broken, num_events)
        preprocess(broken)
        assert digests(tmp_path / str(num_events)) == digests(tmp_path / "whole")


@pytest.mark.parametrize("step", ["write_metadata", "file_facts", "write_failures"])
def test_a_kill_while_it_concludes_leaves_no_trace(
    lines: Path, tokenizer: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are written, and what says so is not."""
    run(lines, tokenizer, tmp_path / "whole")
    broken = options(lines, tokenizer, tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(broken, lambda event: None) == signal.SIGKILL
    preprocess(broken)
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


def test_a_kill_after_the_last_step_is_cleaned_up(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    run(lines, tokenizer, tmp_path / "out")
    before = digests(tmp_path / "out")
    (tmp_path / "out" / "progress.json").write_text("{}")
    assert run(lines, tokenizer, tmp_path / "out").status == "reused"
    assert digests(tmp_path / "out") == before


def test_a_place_is_replaced_whole(lines: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of writing a place leaves the one before."""
    run(lines, tokenizer, tmp_path / "whole")
    broken = options(lines, tokenizer, tmp_path / "broken")
    assert kill_after(broken, 4)
    saved = read_progress(tmp_path / "broken" / "progress.json")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(broken, lambda event: None) == signal.SIGKILL
    assert saved is not None
    assert saved.position is not None
    assert read_progress(tmp_path / "broken" / "progress.json") == saved
    preprocess(broken)
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


def test_a_resumed_run_skips_what_was_read(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """It does not begin again: the killed run had saved the place after batch 5."""
    broken = options(lines, tokenizer, tmp_path / "broken")
    assert kill_after(broken, 6)
    events: list[Event] = []
    preprocess(broken, on_event=events.append)
    assert events[0].kind == "resumed"
    assert events[-1].num_documents == len(TEXTS) - 5 * BATCH
    fractions = [event.fraction for event in events[1:] if event.fraction is not None]
    assert fractions == sorted(fractions)
    assert len(fractions) == len(events) - 1
    assert fractions[-1] == 1.0


def test_failures_are_counted_once(tokenizer: Path, tmp_path: Path) -> None:
    """Of the run before the kill and of the run after it."""
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    spoil(source, 3, 40, 75, 139)
    run(source, tokenizer, tmp_path / "whole", on_error="skip")
    broken = options(source, tokenizer, tmp_path / "broken", on_error="skip")
    for num_events in (3, 2, 2):
        assert kill_after(broken, num_events)
    result = preprocess(broken)
    assert [failure.place for failure in result.failures] == [f"{source}:{at + 1}" for at in (3, 40, 75, 139)]
    assert all("expected a JSON object" in failure.error for failure in result.failures)
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


def test_a_run_that_stopped_at_a_bad_document_goes_on_with_skip(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    spoil(source, 90)
    with pytest.raises(Exception, match=r"in.jsonl:91: .*--on-error skip"):
        run(source, tokenizer, tmp_path / "out")
    events: list[Event] = []
    result = preprocess(options(source, tokenizer, tmp_path / "out", on_error="skip"), on_event=events.append)
    assert events[0].kind == "resumed"
    assert result.num_documents == len(TEXTS) - 1
    run(source, tokenizer, tmp_path / "whole", on_error="skip")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_the_command_with_workers_is_killed_and_goes_on(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """A whole process tree: the command, its engine and two workers; then with another number of workers."""
    run(lines, tokenizer, tmp_path / "whole")
    script = (
        "import os, signal, sys\n"
        "from tests.preprocess.cases import options\nfrom aioloader.preprocess import preprocess, rows\n"
        f"rows.BATCH_DOCUMENTS = {BATCH}\n"
        f"chosen = options({str(lines)!r}, {str(tokenizer)!r}, {str(tmp_path / 'broken')!r}, workers=2)\n"
        "preprocess(chosen, on_event=lambda event: event.num_documents > 60 and os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=18, env=os.environ | {"PYTHONPATH": ".:examples"})
    assert killed.returncode == -signal.SIGKILL
    assert run(lines, tokenizer, tmp_path / "broken").status == "written"
    assert tokens_of(tmp_path / "broken").size
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


def test_a_run_that_left_documents_out_does_not_become_a_strict_one(tokenizer: Path, tmp_path: Path) -> None:
    """Else it would end well, with some missing."""
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    spoil(path, 1)
    assert kill_after(options(path, tokenizer, tmp_path / "out", on_error="skip"), 4)
    with pytest.raises(ConfigError, match="expected a run with all documents, got one without 1 that failed; use --on-error skip"):
        run(path, tokenizer, tmp_path / "out")
    with pytest.raises(PreprocessError, match=r"in\.jsonl:2: ValueError"):
        run(path, tokenizer, tmp_path / "out", overwrite=True)
    assert run(path, tokenizer, tmp_path / "out", on_error="skip").num_failed == 1


def test_a_run_in_which_nothing_was_saved_gives_way_to_other_settings(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """A wrong setting is noticed at the first document; who mends it has lost nothing, and needs no --overwrite."""
    for wrong, match in (
        ({"text_field": "body"}, "expected text in the field 'body'"),
        ({"format": "bin", "dtype": "uint32"}, "got uint32"),
    ):
        with pytest.raises((PreprocessError, ConfigError), match=match):
            run(lines, tokenizer, tmp_path / "out", **wrong)
    run(lines, tokenizer, tmp_path / "out")
    run(lines, tokenizer, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_nothing_is_left_of_an_unfinished_run_of_another_format(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    assert kill_after(options([lines, lines], tokenizer, tmp_path / "out", per_input=True), NUM_BATCHES + 3)
    assert (tmp_path / "out" / "tokens_1.npy").exists()
    run(lines, tokenizer, tmp_path / "out", format="bin", overwrite=True)
    assert set(digests(tmp_path / "out")) == {"metadata.json", "tokens.bin", "tokens.idx"}


def test_a_disk_that_is_full_is_an_error_and_the_run_goes_on_later(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """K76: the error names the output, and what lies there is good for the next run."""
    run(lines, tokenizer, tmp_path / "whole")
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            run(lines, tokenizer, tmp_path / "out")
        except SourceError as error:
            (tmp_path / "error").write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert "out': expected room for it and leave to write it, got [Errno 27] File too large" in (tmp_path / "error").read_text()
    run(lines, tokenizer, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
