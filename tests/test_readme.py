"""The README's programs run as they stand and print what stands below them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preprocess.cases import documents, train, write_lines

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


MODEL = """
import torch
class Model(torch.nn.Sequential):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids)
model = Model(torch.nn.Embedding(600, 16), torch.nn.Linear(16, 600))
"""
TRAINED = """
loader.close()
print(result.step, result.checkpoint.name, len(rows) > 60)
"""


def installed(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of the README in a shell, with the scripts of this environment first."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60, cwd=directory, env=environ)


def test_the_readme_table_of_ranks_is_that_of_the_command(tmp_path: Path) -> None:
    found = re.search(r"```console\n\$ (.*?)\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    done = installed(found[1], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == found[2]


@pytest.mark.timeout(120)
def test_a_model_trains_on_what_the_readme_tokenizes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    command, program = re.findall(r"```(?:sh\n(aioloader .*?)|python\n(import torch\n.*?))```", README.read_text(), re.DOTALL)
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        write_lines(tmp_path / "corpus" / f"{name}.jsonl", documents(500))
    train(tmp_path / "tokenizer.json")
    done = installed(command[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "documents: ok 1,000, failed 0" in done.stdout
    shortened = program[1].replace("max_steps=100", "max_steps=10")
    done = installed(f"{sys.executable} -c {shlex.quote(MODEL + shortened + TRAINED)}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10 step_00000010 True\n"


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"DEMO_SETUP|DEMO_TIME|TEST_TIME|TODO|TBD", README.read_text())
