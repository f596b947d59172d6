# SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles, which nobody has built: their instructions, and the commands that they give."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples" / "docker").glob("Dockerfile*"))
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_sets_up_a_checkout(path):
    text = path.read_text()
    assert "UNTESTED" in text and f"docker build -f examples/docker/{path.name} " in text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kinds = [line.split()[0] for line in lines]
    assert set(kinds) <= KNOWN and kinds.count("FROM") == 1
    assert kinds.index("FROM") == kinds.index("ARG") + 1 if "ARG" in kinds else kinds[0] == "FROM"
    assert "RUN make setup PYTHON=python3" in lines
    assert lines.index("COPY . .") < lines.index("RUN make setup PYTHON=python3")
    assert 'ENV PATH="/weft/.venv/bin:$PATH"' in lines and "WORKDIR /weft" in lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_dockerfile_says_to_run_is_a_target(path):
    """`make TARGET` in the opening is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    lines = [line for line in text.splitlines() if "apt-get" not in line]
    named = {word for line in lines for word in re.findall(r"make ([a-z-]+)", line)}
    assert named and named <= targets
    runs = [line for line in text.splitlines() if "docker run" in line]
    assert runs and all("runs:/weft/runs" in shlex.join(shlex.split(line[1:])) for line in runs)


def test_what_a_build_leaves_out_is_what_git_ignores():
    left_out = set((ROOT / ".dockerignore").read_text().split())
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert left_out - {".git", "**/__pycache__"} <= ignored
    assert {".venv", "build", "runs"} <= left_out  # a .venv of the host would be taken for ours
