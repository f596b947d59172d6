# SPDX-License-Identifier: Apache-2.0
"""A flag is added by one entry of the table: --help, Config, the rules and the page have it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from training.flags.flag_table import live_flags

ROOT = Path(__file__).parents[3]
BEFORE = "    log_params_norm: bool = setting("
ENTRY = '    log_lines: int = setting(7, "made up", "lines", integer(2, 9), needs="--save")\n'
PROGRAM = """
from training.settings.config import UsageError
from training.flags.parse import parse
from tests.training.flags.flags_page import page
base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 3"
base = f"{base} --lr 1e-3 --mock-data --vocab-size 500 --device cpu".split()
config = parse(base, 1)
print(config.log.log_lines, config.flat()["log.log_lines"])
config = parse([*base, "--log_lines", "5"], 1)
print(config.log.log_lines, "log.log_lines" in config.canonical_json(), config.notes)
for words in (["--log-lines", "10"], ["--log-lnes", "5"]):
    try:
        parse([*base, *words], 1)
    except UsageError as error:
        print(error)
print([line for line in page().splitlines() if "log-lines" in line])
parse(["--help", "log"], 1)
"""


@pytest.mark.prove
def test_a_flag_is_added_by_one_line(tmp_path: Path) -> None:
    assert "--log-lines" not in {flag.name for flag in live_flags().values()}
    for room in ("mpu", "model", "training", "tests"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "training" / "settings" / "arguments.py"
    text = table.read_text()
    assert text.count(BEFORE) == 1
    table.write_text(text.replace(BEFORE, ENTRY + BEFORE))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    unset, set_, number, typo, row, *shown = done.stdout.splitlines()
    assert unset == "7 7"
    assert set_ == (
        "5 True ('--log_lines is taken as --log-lines', '--log-lines has no effect without --save')"
    )
    assert number == "--log-lines 10: must be a whole number >= 2, at most 9"
    assert typo.endswith("did you mean --log-lines?")
    what = "made up [lines; default: 7; with --save]"
    assert row == str([f"| `--log-lines N` | {what} | a whole number >= 2, at most 9 |"])
    assert f"--log-lines N {what}" in " ".join(" ".join(shown).split())
