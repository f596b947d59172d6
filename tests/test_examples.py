# SPDX-License-Identifier: Apache-2.0
"""Every example dry-runs unchanged, and the arithmetic in its opening is the dry run's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# a stand-in for srun: in a "container" python3 is another one; only a dry run is run
SRUN = r"""case "$*" in *--container-image*) PATH={inside}:$PATH ;; esac
case "$*" in *--dry-run*)
    while [ "$1" != pretrain_llama.py ]; do python=$1; shift; done
    exec "$python" "$@" ;;
esac
printf "%s\n" srun "$@"
"""
# file, WORLD_SIZE, what the dry run says, and how the first lines put it
EXAMPLES = [
    (
        "cpu_quickstart.sh",
        2,
        {
            "TP 2 x CP 1 x DP 1 x PP 1 = 2 ranks; sequence parallelism on": "2 CPU ranks",
            "3,344,064 in all": "3.3e6 parameters",
            "3.382e+10 FLOPs a step": "3.4e10 FLOPs a step",
            "101.3 MB": "= 101 MB",
        },
    ),
    (
        "cpu_two_nodes.slurm",
        2,
        {
            "TP 1 x CP 1 x DP 2 x PP 1 = 2 ranks; sequence parallelism off": "DP 2 over gloo",
            "3,344,064 in all": "3.3e6 parameters",
            "3.382e+10 FLOPs a step": "3.4e10 FLOPs a step",
            "moments               13.41 MB  AdamW's two, a share of 1/2": "8 / 2 for",
            "activations           52.08 MB": "52 MB activations",
            "total                 113.1 MB": "= 113 MB",
        },
    ),
    (
        "llama3_8b_one_node.sh",
        8,
        {
            "TP 4 x CP 1 x DP 2 x PP 1 = 8 ranks; sequence parallelism on": "TP 4 with",
            "8,030,261,248 in all": "8.03e9 parameters",
            "5.147e+10 FLOPs a token": "5.15e10 FLOPs a token",
            "50,000,297,984 tokens in all": "47,684 steps = 5e10 tokens",
            "9.3 days": "9.3 days",
            "34.04 GB": "34 GB",
        },
    ),
    (
        "llama3_8b_128k.sh",
        8,
        {
            "TP 1 x CP 8 x DP 1 x PP 1 = 8 ranks; sequence parallelism off": "CP 8 on",
            "8,030,261,248 in all": "8.03e9 parameters",
            "1.481e+11 FLOPs a token": "1.48e11 FLOPs a token",
            "4,194,304,000 tokens in all": "1,000 steps = 4.2e9 tokens",
            "2.2 days": "2.2 days",
            "unsharded gradients   4.203 GB": "4.2 GB of unsharded gradients",
            "gathered weights      1.487 GB": "1.5 GB of gathered weights",
            "activations           32.33 GB": "32.3 GB activations",
            "total                 56.77 GB": "= 57 GB",
            "2,688 of  201.3 MB": "sends 294 MB",
        },
    ),
    (
        "llama3_70b_16_nodes.slurm",
        128,
        {
            "TP 8 x CP 1 x DP 4 x PP 4 = 128 ranks; sequence parallelism on": "x PP 4\n# x DP 4",
            "70,553,706,496 in all": "7.06e10 parameters",
            "4.492e+11 FLOPs a token": "4.49e11 FLOPs a token",
            "140,001,673,216 tokens in all": "33,379 steps = 1.4e11 tokens",
            "14.2 days": "14 days",
            "pipeline rank 2: layers 40-60": "20, 20, 21 and 19 layers",
            "128 micro-batches: bubble 2.16 %": "2.2 % of a step",
            "the slowest has 3.5 % more work": "3.5 % more than the mean",
            "2,271,543,296  20.44 GB  540.2 MB     22.33 GB": "= 20.4 GB, + 22.3 GB",
            "43.32 GB": "43 GB",
            "moments               4.543 GB  AdamW's two, a share of 1/4": "12 / 4 for",
        },
    ),
    (
        "llama3_405b_64_nodes.slurm",
        512,
        {
            "TP 8 x CP 1 x DP 4 x PP 16 = 512 ranks; sequence parallelism on": "PP 16\n# x DP 4",
            "405,853,388,800 in all": "4.06e11 parameters",
            "2.524e+12 FLOPs a token": "2.52e12 FLOPs a token",
            "100,000,595,968 tokens in all": "11,921 steps = 1e11 tokens",
            "14.3 days": "14 days",
            "pipeline interleaved: 16 ranks, 4 stages each": "4 stages a rank",
            "rank 15: layers 29-30 | layers 61-62 | layers 93-94 | layer 125 + head": "8 layers a",
            "256 micro-batches: bubble 1.32 %": "1.3 % of a step",
            "the slowest has 1.2 % more work": "1.2 % more than the mean",
            "3,187,933,184  28.69 GB  3.841 GB     2.588 GB": "= 28.7 GB, + 2.6 GB",
            "messages              2.751 GB": "2.8 GB that came from other stages",
            "35.12 GB": "35 GB",
        },
    ),
]

BIG = [example for example in EXAMPLES if example[0].endswith("nodes.slurm") and example[1] > 2]
SIZES = {  # parameters, ranks
    "llama3_70b_16_nodes.slurm": (70_553_706_496, 128),
    "llama3_405b_64_nodes.slurm": (405_853_388_800, 512),
}
STEP_SECONDS = {"llama3_70b_16_nodes.slurm": 37, "llama3_405b_64_nodes.slurm": 103}


def run(name, *flags, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WORLD_", "RANK"))}
    return subprocess.run(
        ["bash", f"examples/{name}", *flags],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,  # what does not fit is recorded again with each flag that saves memory
    )


def test_every_example_is_tested():
    scripts = {p.name for p in (ROOT / "examples").iterdir() if p.suffix in (".sh", ".slurm")}
    # in test_slurm.py, tools/test_evaluate.py and forecast/planner/test_measured.py
    elsewhere = {"slurm_ranks.sh", "eval.slurm", "measure.slurm"}
    assert scripts == {name for name, _, _ in EXAMPLES} | elsewhere


# those whose model or arithmetic another one has too (test_kubernetes.py for 8B)
LONG = {"llama3_8b_128k.sh", "llama3_8b_one_node.sh", "llama3_70b_16_nodes.slurm",
        "llama3_405b_64_nodes.slurm"}  # fmt: skip
MARKED = [pytest.param(*e, marks=[pytest.mark.prove] if e[0] in LONG else []) for e in EXAMPLES]


@pytest.mark.parametrize("name,world,said", MARKED, ids=[e[0] for e in EXAMPLES])
def test_dry_run_and_header_agree(name, world, said, launcher):
    words = run(name, "--dry-run", WORLD_SIZE=str(world), LAUNCH=r"printf %s\n").stdout.splitlines()
    done = launcher.python(*words, env={**os.environ, "WORLD_SIZE": str(world)})
    assert done.returncode == 0, done.stderr
    assert "does NOT fit" not in done.stdout
    header = (ROOT / "examples" / name).read_text().split("set -euo pipefail")[0]
    for in_report, in_header in said.items():
        assert in_report in done.stdout
        assert in_header in header
    assert f"WORLD_SIZE={world} LAUNCH=python3 bash examples/{name} --dry-run" in header


@pytest.mark.parametrize("name, parameters, ranks", [(e[0], *SIZES[e[0]]) for e in BIG])
def test_what_a_checkpoint_takes(name, parameters, ranks):
    """bf16 weights, fp32 masters and two moments; as often as the script says."""
    text = (ROOT / "examples" / name).read_text()
    words = text.split()
    interval, kept = (
        int(words[words.index(flag) + 1]) for flag in ("--save-interval", "--save-retain-interval")
    )
    size, minutes = 14 * parameters, interval * STEP_SECONDS[name] / 60
    per_rank = size / ranks / 1e9
    header = text.replace("\n#  ", "")
    assert f"{size / 1e12:.1f} TB: {per_rank:.1f} GB a rank, {8 * per_rank:.0f} GB of a" in header
    assert (
        f"One each {interval} steps, {minutes:.0f} minutes; 3 and every {kept:,}th stay" in header
    )
    assert "--async-save" in words and words[words.index("--keep-last-k") + 1] == "3"


@pytest.mark.prove
def test_the_quick_start_trains():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run("cpu_quickstart.sh", "--train-iters", "20", PATH=path)
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split("loss ")[1].split()[0])
        for line in done.stdout.splitlines()
        if "| loss" in line
    ]
    assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(e[0], marks=[pytest.mark.prove] if "cpu" not in e[0] else [])
        for e in EXAMPLES
        if e[0].endswith(".slurm")
    ],
)
def test_a_job_script_starts_every_rank_by_srun(name, tmp_path):
    """Run the job script itself with stand-ins for SLURM's commands."""
    (inside := tmp_path / "inside").mkdir()
    for command, body in {
        "scontrol": 'echo node7; echo "$@" >&2',
        "srun": SRUN.format(inside=inside),
        "python3": "echo 'ModuleNotFoundError: torch'; exit 1",  # the host's, without packages
    }.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / command).chmod(0o755)
    (inside / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (inside / "python3").chmod(0o755)
    nodes, each, world = {e[0]: (int(e[0].split("_")[2]), 8, e[1]) for e in BIG}.get(
        name, (2, 1, 2)
    )
    assert nodes * each == world
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[7-99]",
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    if each > 1:
        box = job | {"CONTAINER": "weft.sqsh"}  # the host has no torch: the dry run is inside
        stopped = run(name, "--micro-batch-size", "16", **box)
        assert stopped.returncode == 2 and "does NOT fit a GPU of 80 GB" in stopped.stdout
        forced = run(name, "--micro-batch-size", "16", FITS="yes", **box)  # on larger GPUs
        assert forced.returncode == 0 and "srun" in forced.stdout.splitlines()
        wrong = run(name, "--micro-batch-size", "7", **box)
        assert wrong.returncode == 2 and "--global-batch-size" in wrong.stdout + wrong.stderr
        (ROOT / "dry-run-123456.txt").unlink()

    own = run(name, OUT=str(tmp_path / "own"), FITS="yes", **{"VIRTUAL_ENV": "", **job})
    python = ROOT / ".venv/bin/python"
    assert (str(python) if python.exists() else "python3") in own.stdout.splitlines(), own.stderr
    here = run(name, OUT=str(tmp_path / "own"), FITS="yes", **{"VIRTUAL_ENV": "/v", **job})
    assert "python3" in here.stdout.splitlines()  # the environment that is active

    job |= {"SLURM_RESTART_COUNT": "2", "DATA": "/data/set/corpus", "MOUNTS": "/nfs:/nfs"}
    done = run(name, CONTAINER="weft.sqsh", OUT=f"{tmp_path}/a b", **job)
    assert done.returncode == 0, done.stderr
    mounts = f"{ROOT},/data/set:/data/set,{tmp_path}/a b:{tmp_path}/a b,/nfs:/nfs"
    assert f"--container-mounts={mounts}" in done.stdout.splitlines()
    assert "restart 2, last checkpoint: none; ranks meet at node7:23456" in done.stdout
    assert done.stdout.endswith("job 123456: exit code 0, last checkpoint: none\n")
    words = done.stdout.splitlines()[1:-1]
    assert words[:3] == ["srun", "--kill-on-bad-exit=0", "--wait=60"]
    assert "--container-image=weft.sqsh" in words
    after = {word: words[i + 1] for i, word in enumerate(words[:-1])}
    assert after["python3"] == "pretrain_llama.py"
    assert after["--save"] == after["--load"] == f"{tmp_path}/a b/checkpoints"
    directives = [w for w in (ROOT / "examples" / name).read_text().splitlines() if "#SBATCH" in w]
    wanted = {f"--nodes={nodes}", f"--ntasks-per-node={each}", "--requeue", "--open-mode=append"}
    assert wanted <= {line.removeprefix("#SBATCH ") for line in directives}
    assert not any("--array" in line for line in directives)
    (warning,) = [line.split("USR1@")[1] for line in directives if "--signal" in line]
    # not B:, or only the script would hear it; the step under way, one more and the save fit in
    assert f"#SBATCH --signal=USR1@{warning}" in directives
    assert int(warning) >= 2 * STEP_SECONDS.get(name, 1) + 60
