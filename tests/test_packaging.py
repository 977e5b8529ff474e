"""The wheel holds the two packages and nothing else, with what makes them typed and licensed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_two_packages_and_nothing_else(names: set[str]) -> None:
    top = {name.partition("/")[0] for name in names}
    (metadata,) = {name for name in top if name.endswith(".dist-info")}
    assert top == {"aioloader", "aioloader_adapters", metadata}
    assert f"{metadata}/licenses/LICENSE" in names


def test_the_wheel_has_every_module_and_the_typing_mark(names: set[str]) -> None:
    homes = {"aioloader": ROOT, "aioloader_adapters": ROOT / "adapters"}
    modules = {path.relative_to(home).as_posix() for package, home in homes.items() for path in (home / package).rglob("*.py")}
    marks = {f"{package}/py.typed" for package in homes}
    assert modules | marks <= names
