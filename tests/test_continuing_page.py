# SPDX-License-Identifier: Apache-2.0
"""docs/continuing.md: its commands run one after another in a copy of the tree, and print what it
shows.

The losses of the page are those of one processor. Others, which round in another way, have them
within NATS: torch's kernels with and without AVX2 and AVX-512 differ by 0.003 at most. Of one run,
the losses of Weft and of transformers agree to the last digit, up to its rounding.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.test_readme import ROOT
from tests.test_shown_output import flat, pattern

PAGE = (ROOT / "docs/continuing.md").read_text()
END = "-- end of a block --"
NATS = 0.02
LOSS = re.compile(r"loss (\d+\.\d+)|first step, (\d+\.\d+) at")
EXACT = re.compile(r"\d[\d,]* (?:of|tokens|documents|parameters|texts|tensors?)\b|iteration \d+")


def numbers(text: str) -> tuple[list[float], list[str]]:
    """Return the losses in a text, and the numbers that are the same on every machine."""
    losses = [float(a or b) for a, b in LOSS.findall(text)]
    return losses, EXACT.findall(text)


@pytest.mark.prove
def test_the_commands_print_what_the_page_shows(tmp_path):
    found = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    blocks = [text for kind, text in found if kind == "sh"]
    shown = dict[int, list[str]]()  # lines under each block of commands
    begun = -1
    for kind, text in found:
        begun += kind == "sh"
        if kind == "text":
            shown.setdefault(begun, []).extend(text.splitlines())
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    if (ROOT / "build").is_dir():
        (tmp_path / "build").symlink_to(ROOT / "build")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = "set -e\n" + f"echo '{END}'\n".join(blocks)
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, text=True, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    said = run.stdout.split(END)
    assert len(said) == len(blocks) > 7 and sum(map(len, shown.values())) > 15
    for i, lines in shown.items():
        for line in lines:
            losses, exact = numbers(line)
            found_there = [numbers(m[0]) for m in re.finditer(pattern(line), flat(said[i]))]
            same = [there for there, counts in found_there if counts == exact]
            assert pytest.approx(losses, rel=0, abs=NATS) in same, f"not printed: {line}\n{said[i]}"
    ours, theirs = (
        re.search(rf"{words} loss (\d+\.\d+)", run.stdout)
        for words in ("lowest validation", "transformers has the")
    )
    assert ours and theirs
    assert float(theirs[1]) == pytest.approx(float(ours[1]), rel=0, abs=1.01e-4)
