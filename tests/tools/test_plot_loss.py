# SPDX-License-Identifier: Apache-2.0
"""tools/plot_loss.py reads a log across resumes, and draws it."""

import json
import struct
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from tools import plot_loss
from tools.pictures.style import page
from tools.plot_loss import main, read_log, smooth

ROOT = Path(__file__).parents[2]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    first = [{"iteration": i, "loss": float(i)} for i in (1, 2, 3)]
    first.append({"iteration": 3, "validation_loss": 9.0})
    again = [{"iteration": 2, "loss": 20.0}, {"iteration": 2, "validation_loss": 5.0}]
    run = read_log(write(tmp_path / "log", [*first, *again]))
    assert run.curve("loss") == [(1, 1.0), (2, 20.0)]
    assert run.curve("validation_loss") == [(2, 5.0)]


def test_an_evaluation_between_two_lines_of_the_log_stays(tmp_path):
    """A line's steps begin before an evaluation that the line before it did not wait for."""
    records = [
        {"iteration": 4, "validation_loss": 7.0},
        {"iteration": 6, "loss": 6.0, "step_losses": [[i, 12.0 - i] for i in range(1, 7)]},
        {"iteration": 8, "validation_loss": 5.0},
        {"iteration": 12, "loss": 4.0, "step_losses": [[i, 4.0] for i in range(7, 13)]},
        {"iteration": 12, "validation_loss": 3.0},
    ]
    run = read_log(write(tmp_path / "log", records))
    assert run.curve("validation_loss") == [(4, 7.0), (8, 5.0), (12, 3.0)]
    assert [i for i, _ in run.curve("loss")] == list(range(1, 13))
    again = {"iteration": 9, "loss": 2.0, "step_losses": [[8, 2.0], [9, 2.0]]}
    run = read_log(write(tmp_path / "log", [*records, again]))  # a resume from iteration 7
    assert run.curve("validation_loss") == [(4, 7.0)]
    assert run.curve("loss")[-3:] == [(7, 4.0), (8, 2.0), (9, 2.0)]


def test_a_resumed_runs_evaluations_stay_where_its_first_line_of_losses_comes_late(tmp_path):
    """The line of steps 151 to 200 comes after four evaluations of the same resumed run."""
    steps = [[i, 3.0] for i in range(101, 201)]
    records = [{"iteration": i, "validation_loss": 9.0} for i in range(110, 201, 10)]
    records += [{"iteration": 200, "loss": 3.0, "step_losses": steps}]
    again = [{"iteration": i, "validation_loss": 5.0} for i in range(160, 200, 10)]
    again += [{"iteration": 200, "loss": 2.0, "step_losses": [[i, 2.0] for i in range(151, 201)]}]
    run = read_log(write(tmp_path / "log", records + again))
    kept = [(i, 9.0) for i in range(110, 151, 10)] + [(i, 5.0) for i in range(160, 200, 10)]
    assert run.curve("validation_loss") == kept
    assert run.curve("loss")[49:51] == [(150, 3.0), (151, 2.0)] and len(run.curve("loss")) == 100


@pytest.mark.parametrize("log_interval, eval_interval", [(10, 125), (1, 7), (7, 3), (100, 10)])
def test_a_log_keeps_all_its_evaluations(tmp_path, log_interval, eval_interval):
    """As Log writes it: 10 and 125 are those of make train. With a resume, and without one."""

    def leg(start, end):
        lines, begin = [], start + 1
        for i in range(start + 1, end + 1):
            if i % log_interval == 0 or i == 1000:
                steps = [[j, float(j)] for j in range(begin, i + 1)]
                lines.append({"iteration": i, "loss": float(i), "step_losses": steps})
                begin = i + 1
            if i % eval_interval == 0:
                lines.append({"iteration": i, "validation_loss": float(i)})
        return lines

    due = [float(i) for i in range(eval_interval, 1001, eval_interval)]
    for name, lines in (("a", leg(0, 1000)), ("b", [*leg(0, 655), *leg(555, 1000)])):
        run = read_log(write(tmp_path / name, lines))
        assert run.curve("validation_loss") == [(i, i) for i in due]
        assert run.curve("loss")[-1][1] == 1000.0


def test_a_last_line_that_is_torn_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, [{"iteration": i, "loss": 5.0 - i} for i in (1, 2)])
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert read_log(path).curves["loss"] == {1: 4.0}
    path.write_text(whole[:-1])  # whole, but for its end
    assert read_log(path).curves["loss"] == {1: 4.0, 2: 3.0}
    path.write_text("{torn\n" + whole)  # a torn line elsewhere is a mistake
    with pytest.raises(ValueError, match="line 1: not a line of a --log-json file"):
        read_log(path)


def test_a_loss_that_was_not_finite_leaves_a_gap(tmp_path):
    log = write(tmp_path / "log", [{"iteration": 1, "loss": None}, {"iteration": 2, "loss": 1.0}])
    assert read_log(log).curve("loss") == [(2, 1.0)]


def test_every_step_is_a_point_and_an_axis_may_be_tokens_or_time(tmp_path):
    """Half of a line's steps lie in its middle; what is done again takes the place of what was."""
    speed = {"step_seconds": 1800.0, "tokens_per_second": 0.001}
    records = [
        {"iteration": 2, "loss": 8.0, "step_losses": [[1, 9.0], [2, 8.0]], **speed},
        {"iteration": 4, "loss": 6.0, "step_losses": [[3, 7.0], [4, 6.0]], **speed},
        {"iteration": 4, "validation_loss": 6.5},
    ]
    run = read_log(write(tmp_path / "log", records))
    assert run.curve("loss") == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]
    hours, tokens = (run.curve("loss", axis) for axis in ("time", "tokens"))
    assert [x for x, _ in hours] == [0.5, 1.0, 1.5, 2.0]
    assert [x for x, _ in tokens] == pytest.approx([1.8, 3.6, 5.4, 7.2])
    assert run.curve("validation_loss", "time") == [(2.0, 6.5)]
    known = [{**record, "consumed_tokens": 100 * record["iteration"]} for record in records[:2]]
    again = {"iteration": 4, "loss": 1.0, "step_losses": [[3, 2.0], [4, 1.0]], **speed}
    run = read_log(write(tmp_path / "log", [*known, again | {"consumed_tokens": 800}]))
    assert run.curve("loss", "tokens") == [(100, 9.0), (200, 8.0), (500, 2.0), (800, 1.0)]


def test_smoothing_keeps_a_straight_line_and_evens_out_a_saw():
    line = [(i, float(i)) for i in range(50)]
    assert smooth(line)[:45] == [(i, pytest.approx(i)) for i in range(45)]
    saw = [(i, float(i % 2)) for i in range(100)]
    assert all(0.3 < value < 0.7 for _, value in smooth(saw, share=0.1)[5:])
    assert smooth([(i, 4.0) for i in range(99)] + [(99, 99.0)])[-1][1] < 25.0
    few = [(i, 4.0 + i % 2) for i in range(20)]
    assert smooth(few)[-1] == (19, 4.5), "six points, not one"


def run(*arguments):
    command = [sys.executable, "tools/plot_loss.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_draws_a_picture(tmp_path):
    records = [{"iteration": i, "loss": 6.0 / i} for i in range(1, 50)]
    records += [{"iteration": i, "validation_loss": 7.0 / i} for i in (20, 40)]
    log = write(tmp_path / "log", records)
    png = tmp_path / "a" / "loss.png"
    done = run(log, "--output", png, "--reference", "5.9", "unigram entropy", "--title", "Loss")
    assert done.returncode == 0, done.stderr
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1200, 675)


def test_several_runs_have_their_names_in_a_legend(tmp_path, monkeypatch, capsys):
    for name, end in (("base", 3.0), ("wide", 3.01)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "log", [{"iteration": i, "loss": end + 1 / i} for i in (1, 2)])
    logs, svg = [tmp_path / "base" / "log", tmp_path / "wide" / "log"], tmp_path / "a.svg"

    def drawn(*more):
        monkeypatch.setattr(sys, "argv", ["plot_loss.py", *map(str, logs), *more])
        main()
        root = ElementTree.parse(svg).getroot()
        assert capsys.readouterr().out == f"drawn: {svg}\n"
        words = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
        return words, [e.get("id", "") for e in root.iter()]

    words, ids = drawn("--output", str(svg), "--axis", "tokens")
    assert {"base, train 3.50", "wide, train 3.51", "tokens", "loss, nats a token"} <= set(words)
    assert any(name.startswith("legend") for name in ids)
    long = [{"iteration": i, "loss": 3.0 + (i == 50)} for i in range(1, 51)]
    write(tmp_path / "base" / "log", long)  # its last step is one of six
    assert "base, train 3.17 (mean of 6)" in drawn("--output", str(svg))[0]
    assert "b, train 3.51" in drawn("--output", str(svg), "--names", "a", "b")[0]
    with pytest.raises(SystemExit, match="--names: 2 different names are needed, one per run"):
        drawn("--output", str(svg), "--names", "a")
    with pytest.raises(SystemExit, match="a.pdf: a picture must be a .png or .svg file"):
        drawn("--output", "a.pdf")


def test_without_output_the_picture_lies_beside_the_log(tmp_path, monkeypatch, capsys):
    log = write(tmp_path / "log.jsonl", [{"iteration": i, "loss": 1.0} for i in (1, 2)])
    drawn = []
    monkeypatch.setattr(plot_loss, "draw", lambda runs, output, **more: drawn.append(output))
    monkeypatch.setattr(sys, "argv", ["plot_loss.py", str(log)])
    main()
    assert drawn == [tmp_path / "log.png"]
    assert capsys.readouterr().out == f"drawn: {tmp_path / 'log.png'}\n"


@pytest.mark.parametrize(
    ("content", "said"), [("not json\n", "line 1: not a line"), ("", "has no loss yet")]
)
def test_a_file_that_is_no_log_is_one_sentence(tmp_path, content, said):
    (tmp_path / "log").write_text(content)
    done = run(tmp_path / "log", "--output", tmp_path / "loss.png")
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "loss.png").exists()


@pytest.fixture
def extents(monkeypatch):
    """Return a function that draws as plot_loss.draw does, and returns {words: box in pixels}."""
    seen = {}

    @contextmanager
    def watched(*arguments, **more):
        with page(*arguments, **more) as figure:
            yield figure
            figure.draw_without_rendering()
            texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
            seen.update((t.get_text(), t.get_window_extent()) for t in texts)

    def drawn(*arguments, **more):
        seen.clear()
        plot_loss.draw(*arguments, **more)
        return seen

    monkeypatch.setattr(plot_loss, "page", watched)
    return drawn


def test_a_single_point_and_the_evaluation_before_the_first_step_are_drawn(tmp_path, extents):
    before = {"iteration": 0, "validation_loss": 10.5}
    first = {"iteration": 1, "loss": 10.25, "consumed_tokens": 512, "step_seconds": 1.0}
    cases = {"iterations": [before], "tokens": [first], "time": [before, first]}
    for axis, records in cases.items():
        run = read_log(write(tmp_path / "log", records))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            words = extents({"": run}, tmp_path / "a.png", "Loss", [], axis).keys()
        assert ("validation 10.50" in words) == (before in records)
        assert ("train 10.25" in words) == (first in records)
    assert run.curve("validation_loss", "tokens") == [(0.0, 10.5)]


def test_tokens_have_a_unit_and_panels_lie_below_the_loss(tmp_path, extents):
    records = [{"iteration": i, "loss": 9.0 / i, "consumed_tokens": 10**8 * i, "lr": 3e-4,
                "grad_norm": 1.5, "tokens_per_second": 41_000.0, "step_seconds": 1.0}
               for i in range(1, 13)]  # fmt: skip
    run = read_log(write(tmp_path / "log", records))
    panels = ["tokens-per-second", "lr", "grad-norm"]
    found = extents({"": run}, tmp_path / "a.png", "Loss", [], "tokens", panels)
    at = {words: box.y0 for words, box in found.items()}
    assert {"1.2 G", "600 M", "tokens"} <= at.keys()
    order = ["loss, nats a token", "tokens/s", "learning rate", "gradient norm", "tokens"]
    assert sorted(order, key=lambda words: -at[words]) == order


def test_panels_want_what_they_show(tmp_path):
    log = write(tmp_path / "log", [{"iteration": 1, "loss": 0.0}, {"iteration": 2, "loss": 1.0}])
    for flags, said in (
        (["--panels", "lr"], "--panels lr: there is no learning rate in "),
        (["--reference", "nan", "x"], "--reference nan: must be a finite number"),
    ):
        done = run(log, "--output", tmp_path / "loss.png", *flags)
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / "loss.png").exists()
