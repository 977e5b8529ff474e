"""The README's program runs as it stands and prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.timeout(60)
def test_the_readme_program_prints_what_the_readme_says() -> None:
    text = README.read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    output = re.search(r"```text\n(\[\[.*?)```", text, re.DOTALL)
    assert program
    assert output
    done = subprocess.run([sys.executable, "-c", program[1]], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output[1]


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"DEMO_SETUP|DEMO_TIME|TEST_TIME|TODO|TBD", README.read_text())
