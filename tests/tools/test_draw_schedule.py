# SPDX-License-Identifier: Apache-2.0
"""tools/draw_schedule.py: planned schedules, the pictures in docs/, and what a run measured."""

import json
import re
from pathlib import Path

import pytest

from mpu.pipeline.schedules import NAMES, build, table
from mpu.pipeline.simulate import Costs, simulate
from tools import draw_schedule
from tools.draw_schedule import main
from tools.pictures.timeline import rows

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


def costs_of(schedule):
    n = schedule.stages
    return Costs([0.010] * n, [0.012] * n, [0.008] * n, 0.001)


def write(folder, schedule, steps=(7,), slower=1.0, **other):
    """Write what a run with --profile leaves: each step `slower` times as long as the one before.

    The clock is the wall's, far from 0.
    """
    folder.mkdir(exist_ok=True)
    ran = rows(simulate(schedule, costs_of(schedule)).timeline, schedule)
    for rank, boxes in enumerate(ran):
        record = {
            "schedule": schedule.name,
            "chunks": schedule.chunks,
            "v_shape": schedule.v_shape,
            "split": schedule.split,
            "pp_rank": rank,
            "pp_size": len(schedule.ranks),
            "steps": [
                {
                    "iteration": step,
                    "spans": [[*a, 1e5 + slower**k * t, 1e5 + slower**k * u] for a, t, u in boxes],
                }
                for k, step in enumerate(steps)
            ],
        }
        (folder / f"pipeline_rank{rank}.json").write_text(json.dumps({**record, **other}))
    return folder


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_draws_what_a_run_measured(name, tmp_path, capsys):
    schedule = build(name, 2, 4, 2 if name == "zb-v" else 1)
    run = write(tmp_path / "profile", schedule)
    assert main(["--profile", str(run), "--out", str(tmp_path / "a.svg")]) == 0
    said = capsys.readouterr().out.splitlines()
    ran = simulate(schedule, costs_of(schedule))
    assert said[0].endswith(" a rank, measured in step 7" if name == "zb-v" else " in step 7")
    assert said[1].startswith(f"step {1e3 * ran.step:.4g} ms, {1e3 * ran.bubble:.4g} ms of it")
    found = boxes_of(tmp_path / "a.svg")
    assert len(found) == 2 * 4 * (6 if schedule.split else 2)
    assert "time (ms)" in (tmp_path / "a.svg").read_text()


def test_of_many_steps_draws_the_middle_one(tmp_path, capsys):
    """The third is the longest, the second of median length; another may be asked for."""
    run = write(tmp_path / "profile", build("1f1b", 2, 4), steps=(5, 6, 7), slower=1.5)
    lengths = {}
    for flags in ([], ["--iteration", "5"], ["--iteration", "7"]):
        assert main(["--profile", str(run), *flags]) == 0
        title, numbers, *_ = capsys.readouterr().out.splitlines()
        lengths[title[-1]] = float(numbers.split()[1])
    assert list(lengths) == ["6", "5", "7"]
    assert lengths["6"] == pytest.approx(1.5 * lengths["5"], rel=1e-3)


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
        ("--schedule 1f1b --out a.gif", "a.gif: a picture is a .png or an .svg"),
        ("--all nowhere -p 4 -m 3", "interleaved needs "),
        ("--profile nowhere", "pipeline_rank0.json: there is no such file"),
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
        ("--schedule 1f1b --iteration 3", "--iteration chooses a step of --profile"),
        ("--all docs --table", "--all takes no --out, --table or --group"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit) as refused:
        main(flags.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_not_whole_is_one_sentence(tmp_path, capsys):
    schedule = build("1f1b", 2, 4)
    run = write(tmp_path / "profile", schedule)
    assert "holds the steps 7, not 3" in fails(capsys, "--profile", run, "--iteration", 3)
    second = run / "pipeline_rank1.json"
    good = json.loads(second.read_text())

    def said(**other):
        second.write_text(json.dumps({**good, **other}))
        return fails(capsys, "--profile", run)

    assert "different runs: chunks is 1 on rank 0 and 2 on rank 1" in said(chunks=2)
    assert "pipeline_rank1.json: was written by rank 0" in said(pp_rank=0)
    assert "rank1.json: schedule 'dualpipe' is none of gpipe, " in said(schedule="dualpipe")
    steps = [{**good["steps"][0], "iteration": 8}]
    assert "different runs: rank 0 has the steps 7 and rank 1 8" in said(steps=steps)
    steps = [{"iteration": 7, "spans": good["steps"][0]["spans"][:-1]}]
    assert "step 7 is incomplete: " in said(steps=steps)
    for other in ({"steps": []}, {"steps": 3}, {"chunks": "2"}):
        assert "not what a training run with --profile writes" in said(**other)
    second.write_text("{")
    assert "not what a training run with --profile writes" in fails(capsys, "--profile", run)
    second.unlink()
    assert "pipeline_rank1.json: there is no such file" in fails(capsys, "--profile", run)


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
