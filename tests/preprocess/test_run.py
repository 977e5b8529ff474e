"""What preprocessing writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader.errors import ConfigError, PreprocessError
from aioloader.tokens.metadata import read_metadata, verify
from tests.preprocess.cases import EOS, digests, documents, encode, run, stream, tokens_of, train, write_lines

TEXTS = documents(200)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", TEXTS)


def test_the_stream_is_every_document_and_its_end(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """C006, D006: as many ends as documents, nothing of the text reads as one, and the metadata say what was added."""
    result = run(lines, tokenizer, tmp_path / "out", packing="none")
    tokens = tokens_of(tmp_path / "out")
    assert tokens.tolist() == stream(tokenizer, TEXTS)
    assert (tokens == EOS).sum() == len(TEXTS) == result.num_documents
    ends = np.cumsum([len(encode(tokenizer, text)) for text in TEXTS]).tolist()
    assert tokens_of(tmp_path / "out", "tokens.documents.npy").tolist() == [0, *ends]
    metadata = read_metadata(tmp_path / "out")
    assert metadata.tokenizer is not None
    assert (metadata.tokenizer["bos"], metadata.tokenizer["eos"], metadata.eos_id) == ([], [EOS], EOS)


def test_rows_are_the_stream_cut_and_the_tail_is_counted(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """C007."""
    result = run(lines, tokenizer, tmp_path / "out", seq_len=64)
    expected = stream(tokenizer, TEXTS)
    rows = tokens_of(tmp_path / "out")
    assert rows.shape == (len(expected) // 64, 64)
    assert rows.reshape(-1).tolist() == expected[: rows.size]
    assert result.metadata is not None
    assert result.metadata.dropped_tail == len(expected) % 64 > 0


def test_torch_maps_what_was_saved_once(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """C008: and the facts beside it."""
    run(lines, tokenizer, tmp_path / "out", format="pt", dtype="int64", seq_len=128)
    rows = torch.load(tmp_path / "out" / "tokens.pt", mmap=True, weights_only=True)
    expected = stream(tokenizer, TEXTS)
    assert rows.dtype == torch.int64
    assert rows.shape == (len(expected) // 128, 128)
    assert rows.flatten().tolist() == expected[: rows.numel()]
    facts = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert (facts["seq_len"], facts["eos_id"], len(facts["tokenizer"]["sha256"])) == (128, EOS, 64)
    verify(tmp_path / "out")


def test_lines_rows_and_files_of_text_give_the_same_tokens(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """C004."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "in.parquet", row_group_size=70)
    (tmp_path / "texts").mkdir()
    for at, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{at:04}.txt").write_text(text, newline="")
    for name, source in (("lines", lines), ("rows", tmp_path / "in.parquet"), ("files", tmp_path / "texts")):
        run(source, tokenizer, tmp_path / name)
    found = [tokens_of(tmp_path / name) for name in ("lines", "rows", "files")]
    assert found[0].size
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_data_set_of_the_hub_gives_the_same_tokens(lines: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread outlives every progress bar
    (tmp_path / "hub").mkdir()
    write_lines(tmp_path / "hub" / "train.jsonl", TEXTS)
    run(lines, tokenizer, tmp_path / "lines")
    run(f"hf:{tmp_path / 'hub'}", tokenizer, tmp_path / "stream")
    assert np.array_equal(tokens_of(tmp_path / "stream"), tokens_of(tmp_path / "lines"))
    with pytest.raises(ConfigError, match=r"expected a column 'body' in .*, got text, n"):
        run(f"hf:{tmp_path / 'hub'}", tokenizer, tmp_path / "none", text_field="body")


def test_each_input_has_a_file_of_its_own(tokenizer: Path, tmp_path: Path) -> None:
    """D005: one int32 array for each input; no token is lost."""
    sources = [write_lines(tmp_path / f"{name}.jsonl", TEXTS[at::2]) for at, name in enumerate("ba")]
    result = run(sources, tokenizer, tmp_path / "out", packing="none", per_input=True, dtype="int32")
    for at in range(2):
        tokens = tokens_of(tmp_path / "out", f"tokens_{at}.npy")
        assert tokens.dtype == np.int32
        assert tokens.tolist() == stream(tokenizer, TEXTS[at::2])
    assert result.metadata is not None
    assert result.metadata.num_tokens == len(stream(tokenizer, TEXTS))
    assert result.num_documents == len(TEXTS)


def test_best_fit_keeps_documents_whole_and_counts_what_it_fills_up(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    result = run(lines, tokenizer, tmp_path / "out", packing="best_fit", seq_len=128)
    rows, ends = tokens_of(tmp_path / "out"), tokens_of(tmp_path / "out", "tokens.documents.npy")
    segments = [tuple(segment) for segment in np.split(rows.reshape(-1), ends[1:-1])]
    whole = sorted(tuple(encode(tokenizer, text)) for text in TEXTS)
    padding = [segment for segment in segments if set(segment) == {EOS}]
    assert sorted(segment for segment in segments if set(segment) != {EOS}) == [one for one in whole if set(one) != {EOS}]
    assert result.metadata is not None
    num_empty = sum(len(one) == 1 for one in whole)
    assert result.metadata.details["padding_tokens"] == sum(map(len, padding)) - num_empty
    assert rows.size == len(stream(tokenizer, TEXTS)) + int(str(result.metadata.details["padding_tokens"]))
    assert result.num_documents == len(TEXTS)


@pytest.mark.parametrize(("workers", "chosen"), [((1, 4), {}), ((0, 2), {"packing": "best_fit"})])
def test_the_number_of_workers_does_not_matter(
    lines: Path, tokenizer: Path, tmp_path: Path, workers: tuple[int, int], chosen: dict[str, Any]
) -> None:
    """C005: byte by byte, the metadata included."""
    for number in workers:
        run(lines, tokenizer, tmp_path / str(number), workers=number, **chosen)
    found = [digests(tmp_path / str(number)) for number in workers]
    assert set(found[0]) == {"metadata.json", "tokens.npy", "tokens.documents.npy"}
    assert found[0] == found[1]


@pytest.mark.parametrize(("format", "name"), [("npy", "tokens.npy"), ("pt", "tokens.pt"), ("bin", "tokens.bin"), ("mds", ".")])
def test_each_format_says_what_it_holds(lines: Path, tokenizer: Path, tmp_path: Path, format: Any, name: str) -> None:
    run(lines, tokenizer, tmp_path / "out", format=format)
    metadata = verify(tmp_path / "out")
    expected = len(stream(tokenizer, TEXTS))
    assert [part.name for part in metadata.parts] == [name]
    assert (metadata.num_tokens, metadata.dropped_tail) == (expected - expected % 64, expected % 64)
    assert metadata.format == format


def test_reading_needs_no_tokenizer(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    """C009: in a fresh process, none of the libraries that make tokens is imported."""
    run(lines, tokenizer, tmp_path / "out")
    script = (
        "import sys; from aioloader.tokens.reading import TokenRows\n"
        f"assert len(TokenRows({str(tmp_path / 'out' / 'tokens.npy')!r})) > 0\n"
        "print(sorted({'transformers', 'tokenizers', 'datasets', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=15)
    assert found.stdout.strip() == "[]"


def test_documents_begin_as_asked_and_special_tokens_are_read_where_asked(tokenizer: Path, tmp_path: Path) -> None:
    text = "a<|endoftext|>b"
    source = write_lines(tmp_path / "in.jsonl", [text])
    run(source, tokenizer, tmp_path / "text", packing="none", bos="id:5", eos=None)
    run(source, tokenizer, tmp_path / "special", packing="none", special_tokens_in_text=True)
    assert tokens_of(tmp_path / "text").tolist() == [5, *encode(tokenizer, text)[:-1]]
    assert tokens_of(tmp_path / "special").tolist().count(EOS) == 2


def test_documents_without_a_token_are_no_documents_in_the_files(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["", "a", "", "b", ""])
    result = run(source, tokenizer, tmp_path / "out", packing="none", eos=None)
    assert tokens_of(tmp_path / "out", "tokens.documents.npy").tolist() == [0, 1, 2]
    assert result.num_documents == 5


@pytest.mark.parametrize("number", [1, 130, 1000])
def test_a_limit_takes_the_first_documents(lines: Path, tokenizer: Path, tmp_path: Path, number: int) -> None:
    result = run(lines, tokenizer, tmp_path / "out", packing="none", limit=number)
    assert tokens_of(tmp_path / "out").tolist() == stream(tokenizer, TEXTS[:number])
    assert result.num_documents == min(number, len(TEXTS))


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        ({"seq_len": 0}, "seq_len: expected an int of at least 1"),
        ({"seq_len": None}, "seq_len: expected an int of at least 1, got None; give the tokens of a row, or use packing 'none'"),
        ({"packing": "none", "seq_len": 4}, "seq_len: expected none with packing 'none'"),
        ({"packing": "none", "format": "mds"}, "packing: expected rows for format 'mds'"),
        ({"eos": "</never>"}, "eos: expected a token of the vocabulary, or its id as id:NUMBER, got '</never>'; name it with --eos TOKEN"),
        ({"bos": "auto"}, "bos: expected a tokenizer that says which token that is, got none; name it with --bos TOKEN"),
        ({"text_field": ""}, "text_field: expected a name"),
        ({"workers": -1}, "workers: expected an int of at least 0"),
        ({"limit": 0}, "limit: expected an int of at least 1"),
        ({"save_every_s": -1}, "save_every_s: expected a positive number of seconds"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused(lines: Path, tokenizer: Path, tmp_path: Path, chosen: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(lines, tokenizer, tmp_path / "out", **chosen)
    assert not (tmp_path / "out").exists()


def test_a_type_that_is_too_narrow_is_refused(lines: Path, tmp_path: Path) -> None:
    many = train(tmp_path / "many.json")
    described = json.loads(many.read_text())
    described["model"]["vocab"]["far away"] = 70_000
    many.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="dtype: expected a type that holds the 70,001 tokens of the vocabulary, got uint16"):
        run(lines, many, tmp_path / "out", dtype="uint16")
    run(lines, many, tmp_path / "out")
    assert tokens_of(tmp_path / "out").dtype == np.uint32


def test_a_document_that_is_no_text_is_named(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS[:5])
    for line, match in (
        ('{"text": 5}', r"in.jsonl:6: ValueError: expected text in the field 'text', got a int"),
        ('{"body": ""}', r"in.jsonl:6: ValueError: expected text in the field 'text', got fields 'body'"),
        ("[1]", r"in.jsonl:6: ValueError: expected a JSON object, got a list"),
        ('{"text": "\\ud800"}', r"in.jsonl:6: UnicodeEncodeError: .*surrogates not allowed"),
    ):
        source.write_text("".join(source.read_text().splitlines(keepends=True)[:5]) + line + "\n")
        with pytest.raises(PreprocessError, match=match):
            run(source, tokenizer, tmp_path / "out", overwrite=True)


def test_a_file_that_is_not_utf8_is_one_document_that_fails(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    (tmp_path / "in" / "b.txt").write_bytes(b"not \xff fine")
    (tmp_path / "in" / "c.txt").write_text("fine too")
    result = run(tmp_path / "in", tokenizer, tmp_path / "out", packing="none", on_error="skip")
    assert tokens_of(tmp_path / "out").tolist() == stream(tokenizer, ["fine", "fine too"])
    assert [failure.place for failure in result.failures] == [str(tmp_path / "in" / "b.txt")]


def test_inputs_of_several_kinds_are_refused(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"all of one kind, got .jsonl, .txt"):
        run([lines, tmp_path / "a.txt"], tokenizer, tmp_path / "out")


def test_the_output_may_lie_among_the_documents(tokenizer: Path, tmp_path: Path) -> None:
    """A second run does not read what the first one wrote."""
    for at, text in enumerate(TEXTS[:5]):
        (tmp_path / f"{at}.txt").write_text(text)
    for output in (tmp_path, tmp_path / "packed"):
        assert run(tmp_path, tokenizer, output, seq_len=4).status == "written"
        assert run(tmp_path, tokenizer, output, seq_len=4, verify=True).status == "reused"
        for path in (output / "metadata.json", *output.glob("tokens.*")):
            path.unlink()
    assert run(tmp_path, tokenizer, tmp_path / "other", seq_len=4).num_documents == 5
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    with pytest.raises(ConfigError, match="expected files to read, got nothing but the files of the output"):
        run(tmp_path / "other", tokenizer, tmp_path / "other", seq_len=4)


def test_torch_is_never_imported(tokenizer: Path, tmp_path: Path) -> None:
    """Its import takes as long as some megabytes of text."""
    write_lines(tmp_path / "in.jsonl", documents(50))
    script = (
        "import sys; from aioloader.cli.main import main; status = main(sys.argv[1:]); assert not status, status;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    options = ["--tokenizer", str(tokenizer), "--seq-len", "16", "--packing", "best_fit", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", script, "preprocess", str(tmp_path / "in.jsonl"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
