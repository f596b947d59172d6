# SPDX-License-Identifier: Apache-2.0
"""tools/draw_schedule.py: planned schedules, and the pictures in docs/."""

import re
from pathlib import Path

import pytest

from mpu.pipeline.schedules import NAMES, build, table
from tools import draw_schedule
from tools.draw_schedule import main

DOCS = Path(__file__).parents[2] / "docs/schedules"


def boxes_of(svg):
    """Return the boxes of a picture: (name, outline, what it looks like)."""
    return re.findall(r'<g id="(rank\S+)">\s*<path d="([^"]+)" style="([^"]+)"', svg.read_text())


@pytest.mark.prove
def test_the_pictures_in_docs_are_the_schedules(tmp_path, capsys):
    """Drawn again, every picture has the same boxes, and the numbers are those of the page."""
    assert main(["--all", str(tmp_path)]) == 0
    assert capsys.readouterr().out in (DOCS / "README.md").read_text()
    assert sorted(path.stem for path in DOCS.glob("*.svg")) == sorted(NAMES)
    for name in NAMES:
        found = boxes_of(DOCS / f"{name}.svg")
        assert found == boxes_of(tmp_path / f"{name}.svg") and len(found) >= 64
        assert (DOCS / f"{name}.svg").stat().st_size < 150_000


def test_prints_the_numbers_and_draws(tmp_path, capsys):
    picture = tmp_path / "a" / "zb.svg"
    asked = ["--schedule", "zb-h1", "-p", "2", "-m", "3", "--costs", "2,2,2", "--table"]
    assert main([*asked, "--out", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:5] == [
        "ZB-H1: 2 ranks, 3 micro-batches",
        "step 20, 2 of it bubble (10%); at most 2 activations on a rank",
        "rank  busy   idle  held for B  held for W  peak",
        "   0    18  10.0%           2           1     2",
        "   1    18  10.0%           1           2     2",
    ]
    assert said[5] == f"drawn: {picture}"
    assert "\n".join(said[6:]) == table(build("zb-h1", 2, 3))
    assert len(boxes_of(picture)) == 2 * 3 * 3


def test_a_chunk_takes_its_share_of_the_costs_and_messages_take_time(capsys):
    flags = ["--schedule", "interleaved", "-p", "2", "-m", "4", "-v", "4", "--group", "3"]
    assert main([*flags[:-2], "--send", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("step 12.75, 0.75 of it bubble")
    assert main([*flags[:-2], "--send", "0.25"]) == 0
    assert not capsys.readouterr().out.splitlines()[1].startswith("step 12.75,")


def fails(capsys, *flags):
    """Return the one sentence with which the tool refuses."""
    assert main(list(map(str, flags))) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("draw_schedule.py: ")
    return err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--schedule zb-2p", "'zb-2p' is not a schedule: the schedules are gpipe, 1f1b, "),
        ("--schedule interleaved -p 4 -m 2", "interleaved needs "),
        ("--schedule 1f1b -v 2", "1f1b has 1 virtual stages a rank, not 2"),
        ("--schedule 1f1b -m 0", "at least 1"),
        ("--schedule 1f1b --out a.gif", "a.gif: a picture must be a .png or .svg file"),
        ("--all nowhere -p 4 -m 3", "interleaved needs "),
    ],
)
def test_what_cannot_be_done_is_one_sentence(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, *flags.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--schedule"),
        ("--schedule 1f1b --all docs", "not allowed with"),
        ("--schedule 1f1b --costs 1,1", "1,1 is not three numbers"),
        ("--schedule 1f1b --costs a,1,1", "a,1,1 is not three numbers"),
        ("--schedule 1f1b --costs 0,1,1", "0,1,1: every cost must be above 0"),
        ("--schedule 1f1b --send -1", "--send -1.0"),
        ("--all docs --table", "--all cannot be combined with --out, --table or --group"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit) as refused:
        main(flags.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_picture_that_nobody_names_gets_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--schedule", "zb-v", "-p", "2", "-m", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "drawn: runs/schedules/zb-v-p2-m4.svg"
    assert (tmp_path / "runs/schedules/zb-v-p2-m4.svg").read_text().lstrip().startswith("<")


def test_a_disk_that_fills_is_named_by_the_flag(tmp_path, monkeypatch, capsys):
    def full(*given, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draw_schedule, "draw", full)
    assert main(["--all", str(tmp_path)]) == 2
    assert main(["--schedule", "1f1b", "--out", f"{tmp_path}/a.svg"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"draw_schedule.py: --all {tmp_path}: No space left on device",
        f"draw_schedule.py: --out {tmp_path}/a.svg: No space left on device",
    ]
