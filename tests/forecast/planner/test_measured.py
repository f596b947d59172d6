# SPDX-License-Identifier: Apache-2.0
"""plan.py --measure runs layouts on the ranks that there are, ranks them, and keeps the results."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast.planner.cluster import read_cluster
from forecast.planner.measured import Measured, Results, measure, ranked
from forecast.planner.model import read_model
from tests.test_slurm import Queue
from tools import plan
from training.run.waiting import Progress

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--vocab-size 128 --untie-embeddings-and-output-weights"
)
ASKED = [TINY, "2xcpu", "--seq-length", "64", "--global-batch-size", "8", "--top", "3"]
Ask = Callable[..., tuple[int, str, str]]
StandIn = Callable[[list[list[float] | str]], list[str]]
# stands for the ranks: the nth call logs the nth rates, or fails with a line
RANKS = """\
import json, sys
from pathlib import Path
calls, words = Path({calls!r}), sys.argv[2:]
before = calls.read_text().splitlines() if calls.exists() else []
calls.write_text("".join(line + chr(10) for line in [*before, " ".join(words)]))
rates = {rates!r}[len(before)]
if isinstance(rates, str):
    print("iteration 1")
    sys.exit(rates + chr(10) + "srun: error: node7: task 1: Exited with exit code 1")
with open(words[words.index("--log-json") + 1], "a") as log:
    log.write(json.dumps(dict(iteration=0, validation_loss=9.0)) + chr(10))
    for n, rate in enumerate(rates, 1):
        log.write(json.dumps(dict(iteration=n, tokens_per_second=rate)) + chr(10))
"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A measurement takes two signals as Ctrl-C; this process does not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """stand_in([rates, or a line, of each call]) -> the words that start it for all ranks."""

    def write(ranks: list[list[float] | str]) -> list[str]:
        calls, script = tmp_path / "calls", tmp_path / "ranks.py"
        calls.unlink(missing_ok=True)
        text = RANKS.replace("{calls!r}", repr(str(calls))).replace("{rates!r}", repr(ranks))
        script.write_text(text)
        return [sys.executable, str(script)]

    return write


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """ask(*words) -> exit code, output, standard error."""

    def ask(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = plan.main([*ASKED, "--measured", str(tmp_path / "kept.json"), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results by the flags of their layouts, in the order of the file."""
    runs = json.loads((folder / "kept.json").read_text())["runs"]
    return {run["layout"]: run for run in runs}


def column(out: str, title: str) -> list[str]:
    """Return a column of the table of layouts."""
    lines = out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.split()[:2] == ["step", "s"]
                or line.split()[:1] == ["measured"])  # fmt: skip
    end = lines[head].index(title) + len(title)
    found = [line[:end] for line in lines[head + 1 :] if line[:1].strip().isdigit()]
    return [line.split("  ")[-1].strip() for line in found]


def test_a_rate_is_the_median_of_the_later_steps(stand_in: StandIn, tmp_path: Path) -> None:
    """Of eight steps the first two do not count; a run that fails or ends early has its reason."""
    model, cluster = read_model(TINY, 64), read_cluster("2xcpu")
    rates = [9.0, 1, 50, 1000, 30, 70, 80, 20]
    lines = "node7: loading", "rank 1: CUDA out of memory"
    start, found = stand_in([rates, "\n".join(lines), rates[:7]]), list[Measured]()
    for layout in "abc":
        found.append(measure(model, cluster, layout, [*start, "program", "--flag"], steps=8,
                             folder=tmp_path, progress=Progress()))  # fmt: skip
    assert [run.tokens_per_second for run in found] == [60.0, 0.0, 0.0]
    assert [run.error for run in found] == ["", lines[1], "ended after 7 of 8 steps"]
    call = (tmp_path / "calls").read_text().splitlines()[0]
    assert call.startswith("--flag --train-iters 8 --log-interval 1 --log-json /")
    assert not list(tmp_path.glob(".measure-*"))
    results = {run.layout: run for run in [*found, replace(found[0], layout="d")]}
    results["d"] = replace(results["d"], tokens_per_second=61.0)
    assert ranked(["x", "c", "b", "a", "y", "d"], results) == ["d", "a", "x", "y", "c", "b"]


@pytest.mark.prove
def test_a_plan_ranks_by_what_was_measured(ask: Ask, stand_in: StandIn, tmp_path: Path) -> None:
    slow, fast = [30.0] * 4, [400.0] * 4
    flags = ("--measure", "3", "--measure-steps", "4", "--launch")
    launch = shlex.join(stand_in([slow, "rank 1: CUDA out of memory", fast]))
    code, out, err = ask(*flags, launch)
    assert code == 0
    order = [list(kept(tmp_path))[n] for n in (2, 0)]
    measured = column(out, "measured")
    assert measured[0].startswith("200 (") and measured[1].startswith("15 (")
    assert measured[2] == "failed" and "3 failed: rank 1: CUDA out of memory" in out
    command = out.split("by your own flags:")[1].replace("\\\n", " ")
    assert order[0] in " ".join(command.split())
    assert "layout 2 of 3: failed: rank 1: CUDA out of memory" in err
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all("--mock-data" in call and "--device cpu" in call for call in calls)
    assert len(calls) == 3 and not any("--save" in call for call in calls)
    # a later plan has the same table, and one that goes on runs what failed alone
    assert ask()[:2] == (0, out)
    code, again, err = ask(*flags, shlex.join(stand_in([[1.0] * 4])))
    assert code == 0 and "2 of 3 layouts were measured before" in err
    assert column(again, "measured")[2].startswith("0 (") and "failed" not in again
    assert " measured  step s" not in ask("--seq-length", "32")[1]  # another model
    code = ask("--seq-length", "32", "--measure", "1", "--launch", shlex.join(stand_in(["no"])))[0]
    assert code == 1


def test_two_jobs_keep_their_results_in_one_file(tmp_path: Path) -> None:
    one, other = (Results(tmp_path / "kept.json") for _ in range(2))
    runs = [Measured("a", "c", "x", 1.0, 3, "", "d"), Measured("b", "c", "x", 2.0, 3, "", "d")]
    one.add(runs[0])
    other.add(runs[1])
    assert Results(tmp_path / "kept.json").runs == runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--measure", "0"], "--measure: 0 must be a whole number from 1 to"),
        (["--measure", "2", "--launch", "no-such-program x"], "--launch 'no-such-program x': "),
        (["--measure", "2", "--why", "--zero-stage 1"], "cannot be combined with --why"),
    ],
)
def test_a_mistake_is_one_sentence(
    ask: Ask, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, err = ask(*words)[::2]
    except SystemExit as end:
        code, err = end.code, capsys.readouterr().err
    assert code == 2 and said in err and not Path("kept.json").exists()


def test_more_ranks_than_this_machine_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("999xcpu", "999xcpu has 999 ranks, but this machine has "),
        ("999xh100", "999xh100 has 999 ranks, but this machine has 0 GPUs"),
        ("2x8xh100", "2x8xh100 has 2 nodes, but torchrun starts the ranks of one"),
    ):
        assert plan.main([TINY, name, "--measure", "1"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "its format is not weft-measured"),
        ('{"format": "weft-measured", "runs": [{"layout": "x"}]}', "a run must be an object with "),
        ('{"format": "weft-measured"}', "'runs'"),
        ('{"format": "weft-measured", "runs": [7]}', "a run must be an object with "),
    ],
)
def test_a_damaged_file_of_results_is_one_sentence(
    ask: Ask, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "kept.json").write_text(content)
    code, out, err = ask()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"plan.py: --measured {tmp_path / 'kept.json'}: ") and said in err
    assert (tmp_path / "kept.json").read_text() == content


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start plan.py as a user does."""
    command = [sys.executable, str(ROOT / "tools/plan.py"), *ASKED]
    return subprocess.Popen(
        [*command, "--measured", str(folder / "kept.json"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.prove
def test_ctrl_c_ends_the_ranks_and_keeps_what_was_measured(
    stand_in: StandIn, tmp_path: Path
) -> None:
    words = stand_in([[5.0] * 4, [7.0] * 4])
    script = Path(words[-1])
    waits = (
        f"if before: Path({str(tmp_path / 'pid')!r}).write_text(str(__import__('os').getpid()))\n"
        "if before: __import__('time').sleep(600)\n"
    )
    script.write_text(script.read_text() + waits)
    flags = ("--measure", "2", "--measure-steps", "4", "--launch", shlex.join(words))
    asked = start(tmp_path, *flags)
    for _ in range(1200):
        if (tmp_path / "pid").exists() or asked.poll() is not None:
            break
        time.sleep(0.1)
    child = int((tmp_path / "pid").read_text())
    asked.send_signal(signal.SIGINT)
    _, err = asked.communicate(timeout=60)
    assert asked.returncode == -signal.SIGINT or asked.returncode == 130, err
    assert "stopped by Ctrl-C" in err and not Path(f"/proc/{child}").exists()
    (run,) = kept(tmp_path).values()
    assert run["tokens_per_second"] == 5.0 and not list(tmp_path.glob(".measure-*"))


@pytest.mark.prove
def test_two_real_ranks_are_measured(tmp_path: Path) -> None:
    """torchrun's two ranks run two layouts; one of them dies in a third."""
    asked = start(tmp_path, "--measure", "2", "--measure-steps", "4")
    out, err = asked.communicate(timeout=300)
    assert asked.returncode == 0, err
    runs = list(kept(tmp_path).values())
    assert [run["error"] for run in runs] == ["", ""] and all(run["steps"] == 3 for run in runs)
    rates = sorted((run["tokens_per_second"] / 2 for run in runs), reverse=True)
    shown = [float(cell.split()[0].replace(",", "")) for cell in column(out, "measured")[:2]]
    assert shown == [round(rate) for rate in rates]
    assert read_cluster("2xcpu").cpu and Results(tmp_path / "kept.json").runs[0].date


@pytest.mark.prove
def test_a_job_measures_on_the_ranks_of_srun(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """examples/measure.slurm with stand-ins for SLURM's commands, on two nodes of a rank."""
    (tmp_path / "slurm").mkdir()
    words = ASKED[2:] + ["--measured", str(tmp_path / "kept.json"), "--measure-steps", "4"]
    more = {"MODEL": TINY, "CLUSTER": "2x1xcpu", "LAYOUTS": "1", "SLURM_NNODES": "2"}
    more |= {"PYTHON": sys.executable, "MASTER_PORT": str(free_port())}
    job = Queue(tmp_path / "slurm").start("RUNNING", "examples/measure.slurm", *words, **more)
    said = job.communicate(timeout=300)[0]
    (run,) = kept(tmp_path).values()
    assert (job.returncode, run["error"], run["steps"]) == (0, "", 3), said
    assert column(said, "measured")[0].startswith(f"{run['tokens_per_second'] / 2:,.0f} (")
