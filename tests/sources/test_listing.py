from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.sources.listing import list_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/d.md", ".git/e.txt", "deep/.f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(paths: Any, pattern: str = "*", **options: Any) -> tuple[str, ...]:
    return list_files("here", paths, patterns=(pattern,), **options).names


def test_a_directory_is_searched_to_its_depths_in_sorted_order(tree: Path) -> None:
    assert names(tree) == ("a.txt", "b.txt", "deep/c.txt", "deep/d.md")
    assert names(str(tree), "*.txt") == ("a.txt", "b.txt", "deep/c.txt")


def test_entries_keep_their_order_and_files_are_taken_once(tree: Path) -> None:
    assert names([tree / "b.txt", tree / "a.txt", tree]) == ("b.txt", "a.txt", "deep/c.txt", "deep/d.md")


def test_patterns_match_in_sorted_order(tree: Path) -> None:
    assert names(f"{tree}/*.txt") == ("a.txt", "b.txt")
    assert names(f"{tree}/**/*.txt") == ("a.txt", "b.txt", "deep/c.txt")


def test_a_name_that_looks_like_a_pattern_is_a_name_where_it_exists(tree: Path) -> None:
    (tree / "x[1].txt").write_text("")
    assert names(tree / "x[1].txt") == ("x[1].txt",)


def test_names_are_relative_to_the_root(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(tree / "deep/c.txt") == ("c.txt",)
    assert names(tree / "deep/c.txt", root=tree) == ("deep/c.txt",)
    monkeypatch.chdir(tree)
    assert names("deep/c.txt", root=".") == ("deep/c.txt",)
    with pytest.raises(ConfigError, match=r"here\(root=\): expected a directory that holds all files"):
        names(tree / "a.txt", root=tree / "deep")


def test_hidden_files_are_found_by_their_own_path(tree: Path) -> None:
    assert names(tree / "deep" / ".f.txt") == (".f.txt",)


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        ("missing.txt", "expected an existing file or directory, got 'missing.txt'"),
        ("*.nothing", r"expected files that match '\*.nothing', got none"),
        ([], "expected at least one path, got none"),
        (3, "expected paths, got 3"),
        (["a.txt", 3], "expected paths, got 3"),
        (b"a.txt", "expected paths, got 97"),
        ([""], "expected paths, got ''"),
        ("s3://bucket/key.jsonl", "expected a local path, got 's3://bucket/key.jsonl'; .* not read in this version"),
        (["a.txt", "gs://bucket/key"], "expected a local path, got 'gs://bucket/key'"),
        (os.devnull, "expected regular files"),
    ],
)
def test_what_names_no_files_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch, paths: Any, match: str) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(ConfigError, match=f"here: {match}"):
        names(paths)


def test_a_directory_without_a_match_is_refused(tree: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected files named \*.nothing in directory"):
        names(tree, "*.nothing")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_compressed_files_are_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_text("")
    with pytest.raises(ConfigError, match=r"expected plain files, got .*; decompress it first"):
        names(tmp_path)


def test_the_fingerprint_follows_names_and_sizes(tree: Path) -> None:
    def fingerprint() -> dict[str, Any]:
        return list_files("here", tree, patterns=("*",)).fingerprint("kind")

    first = fingerprint()
    assert first["files"] == [["a.txt", 5], ["b.txt", 5], ["deep/c.txt", 10], ["deep/d.md", 9]]
    assert (first["num_files"], first["num_bytes"]) == (4, 29)
    assert fingerprint() == first
    (tree / "a.txt").write_text("longer")
    assert fingerprint()["digest"] != first["digest"]


def test_the_fingerprint_of_many_files_stays_small(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.txt").touch()
    fingerprint = list_files("here", tmp_path, patterns=("*",)).fingerprint("kind")
    assert fingerprint["files"] is None
    assert len(str(fingerprint)) < 300
