# SPDX-License-Identifier: Apache-2.0
"""A Python without the packages ends with one sentence and exit code 2, not with a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpu import needs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_llama.py", "tools/generate.py")


def run(script: str, missing: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script where a package is not installed: a finder that comes first denies it."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Deny:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {missing!r}:\n"
        f"            raise ModuleNotFoundError(f'No module named {missing}', name=name)\n"
        "sys.meta_path.insert(0, Deny())\n"
    )
    return subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(folder)}, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_package_is_one_sentence(tmp_path: Path, script: str) -> None:
    done = run(script, "torch", tmp_path)
    assert done.returncode == 2, done.stderr
    name = Path(script).name
    assert done.stderr.startswith(f"{name}: {sys.executable} has no package torch")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS[:1])
def test_a_torch_that_is_too_old_is_one_sentence(tmp_path: Path, script: str) -> None:
    """Before anything of it is imported."""
    about = tmp_path / "torch-2.10.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1\n")
    done = run(script, "torch", tmp_path)
    said = f"torch 2.10.1 is older than 2.11, the oldest that Weft supports: {sys.executable}"
    assert done.returncode == 2 and done.stderr.startswith(f"{Path(script).name}: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.prove
def test_a_module_of_ours_that_is_missing_is_a_bug(tmp_path: Path) -> None:
    done = run("tools/plan.py", "forecast", tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_the_sentence_names_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2.11", "no-such-package>=1"]\n'
    )
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    assert needs.lacking() == ["no-such-package"]
    assert "`make setup` installs them in .venv" in needs.sentence("numpy")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("")
    said = needs.sentence("numpy")
    assert "has no package numpy (and no-such-package): activate the environment" in said
    assert f"source {tmp_path}/.venv/bin/activate" in said


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """It comes while a script imports torch."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "tools/plan.py", "--help"], cwd=ROOT, capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "plan.py: stopped by Ctrl-C\n")


def test_ctrl_c_while_a_run_imports_torch_is_one_line_though_an_import_catches_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n    raise ImportError\n"
    )
    done = subprocess.run(
        [sys.executable, "pretrain_llama.py"], cwd=ROOT, capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    said = "pretrain_llama.py: stopped by Ctrl-C\n"
    assert (done.returncode, done.stderr) == (-signal.SIGINT, said)


@pytest.mark.parametrize(
    "words",
    [
        "tools/draw_schedule.py --schedule 1f1b -p 16 -m 128 --table",
        pytest.param("tools/explain.py --tp 1", marks=pytest.mark.prove),
    ],
)
def test_a_reader_that_leaves_ends_a_tool_without_a_word(words: str) -> None:
    """As `head` does."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, stdout=write, stderr=subprocess.PIPE,
        text=True, check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(write)
    said = "".join(line for line in done.stderr.splitlines(True) if "one step on" not in line)
    assert (said, done.returncode in (0, 1)) == ("", True)
