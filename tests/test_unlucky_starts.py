# SPDX-License-Identifier: Apache-2.0
"""Starts that a signal, an exit() or a changed file meets: the exit code says what has happened.

A signal before the first step ends a run with 128 + its number, and in a step with 75, whatever the
code that it interrupts makes of it: 2, a mistake, would not be started again by a job script. A run
without a step is no success. What was saved before stays as it is.
"""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.sampling import sampled
from tests.tools import test_checkpoint_mcore as mcore
from tests.unlucky import Case, check, drawn
from training.data.indexed import IndexedWriter

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16".split()
FLAGS = """--tokenizer-type NullTokenizer --vocab-size 200 --micro-batch-size 1 --lr 1e-3
    --device cpu --lr-decay-iters 9 --log-interval 1""".split()
MOCK = [*SIZES, *FLAGS, "--mock-data"]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
BASE: dict[str, Path] = {}  # a folder of checkpoints of two steps, and of a corpus


def write_corpus(prefix: Path, seed: int = 0) -> None:
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as out:
        for _ in range(40):
            out.add(np.random.default_rng(seed).integers(0, 199, 50))


@pytest.fixture(scope="module", autouse=True)
def base(launcher, tmp_path_factory):
    """Save two steps of a run with mock data, and two with a corpus."""
    folder = tmp_path_factory.mktemp("base")
    write_corpus(folder / "corpus")
    data = {"mock": ["--mock-data"], "text": ["--data-path", folder / "corpus", "--split", "1,0,0"]}
    for name, more in data.items():
        argv = [*SIZES, *FLAGS, *more, "--train-iters", 2, "--save", folder / name]
        done = launcher.python("pretrain_llama.py", *argv)
        assert done.returncode == 0, done.stderr
    BASE["folder"] = folder


def copied(folder: Path, name: str) -> tuple[Path, Path]:
    """Return a copy of a folder of checkpoints of BASE, and the one checkpoint in it."""
    shutil.copytree(BASE["folder"] / name, folder / "saved")
    return folder / "saved", folder / "saved" / "step_00000002"


def resumed(folder: Path, argv: list, **owes) -> Case:
    """Return the case of a run that goes on from two steps to five, and leaves these alone."""
    saved, step = copied(folder, "mock")
    run = [*argv, *MOCK, "--train-iters", 5, "--save", saved, "--load", saved]
    return Case(run, **{"kept": [step], **owes})


def write_fork(folder: Path, first: str, last: str = "") -> Path:
    text = "import os\nimport signal\nimport sys\nimport time\n\n"
    text += f"{first}\nfrom model import llama\nfrom model.llama import *\n"
    text += f"from model.llama import Model, ModelConfig\n\n{last}\n"
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def sent(rng: random.Random) -> tuple[str, list[int]]:
    """Return code that sends a signal to its own process and waits, and the right exit codes."""
    number = int(rng.choice(SIGNALS))
    how = rng.choice(("os.kill(os.getpid(), {})", "signal.raise_signal({})"))
    return f"({how.format(number)}, time.sleep(9))", [128 + number]


def signal_in_fork(rng: random.Random, folder: Path, first: str, last: str = "") -> Case:
    code, codes = sent(rng)
    at = write_fork(folder, first.replace("SEND", code), last.replace("SEND", code))
    return resumed(folder, ["pretrain_llama.py", "--model-file", at], codes=codes)


def in_import(rng: random.Random, folder: Path) -> Case:
    return signal_in_fork(rng, folder, rng.choice(("SEND", "x = [SEND for _ in range(1)]")))


def in_nested_import(rng: random.Random, folder: Path) -> Case:
    code, codes = sent(rng)
    (folder / "helper_of_mine.py").write_text(f"import os\nimport signal\nimport time\n\n{code}\n")
    first = f"sys.path.insert(0, {str(folder)!r})\nimport helper_of_mine\n"
    if rng.random() < 0.5:
        first = first.replace("import h", "try:\n    import h") + "except ImportError:\n    pass\n"
    at = write_fork(folder, first)
    return resumed(folder, ["pretrain_llama.py", "--model-file", at], codes=codes)


def swallowed(rng: random.Random, folder: Path) -> Case:
    """The file takes the signal for an error of what it tries."""
    kind = rng.choice(("", " BaseException", " (SystemExit, KeyboardInterrupt)"))
    then = rng.choice(
        ("pass", "raise ImportError('no kernels')", "raise SystemExit(2)", "sys.exit()")
    )
    first = f"try:\n    SEND\nexcept{kind}:\n    {then}\n"
    return signal_in_fork(rng, folder, first)


def in_own_functions(rng: random.Random, folder: Path) -> Case:
    last = rng.choice(
        (
            "def extra_args_provider(parser):\n    SEND\n",
            "def hf_config(config, dtype=''):\n    SEND\n",
            "def from_hf_config(hf):\n    SEND\n",
            "def hf_names(model):\n    SEND\n",
            "def parameter_group(name, param):\n    SEND\n",
            "class Model(llama.Llama):\n    def __init__(self, *a, **k):\n        SEND\n",
        )
    )
    return signal_in_fork(rng, folder, "", last)


def swallowed_in_functions(rng: random.Random, folder: Path) -> Case:
    last = rng.choice(
        (
            "def extra_args_provider(parser):\n    try:\n        SEND\n    except:\n        pass\n",
            "def hf_config(config, dtype=''):\n    try:\n        SEND\n    except BaseException:\n"
            "        raise KeyError('x')\n",
            "def hf_names(model):\n    try:\n        SEND\n    finally:\n        return {}\n",
        )
    )
    return signal_in_fork(rng, folder, "", last)


AT = """
import os, signal, sys, time
import pretrain_llama
module, name = {place!r}.rsplit(".", 1)
owner = sys.modules.get(module) or getattr(sys.modules[module.rpartition(".")[0]],
                                           module.rpartition(".")[2])
right = getattr(owner, name)
def there(*args, **named):
    setattr(owner, name, right)
    if {before}:
        {code}
    found = right(*args, **named)
    {code}
    return found
setattr(owner, name, there)
pretrain_llama.as_process(lambda: pretrain_llama.main(sys.argv[1:]), None)
"""
PHASES = """training.flags.parse.read pretrain_llama.parse pretrain_llama.make_grid
    training.run.start.choose_device pretrain_llama.prepare training.run.start.tokenizer_for
    training.run.start.build_loaders training.data.build.Loaders pretrain_llama.connect
    pretrain_llama.build pretrain_llama.Optimizer training.run.saver.Saver.begin
    training.run.resume.Resume.load training.checkpoint.find_latest training.checkpoint.load
    pretrain_llama.measure_and_warm_up training.run.start.warm_up pretrain_llama.log_of""".split()


def in_a_phase(rng: random.Random, folder: Path) -> Case:
    code, codes = sent(rng)
    words = {"place": rng.choice(PHASES), "before": rng.random() < 0.5, "code": code}
    return resumed(folder, ["-c", AT.format(**words)], codes=codes)


def in_a_step(rng: random.Random, folder: Path) -> Case:
    number = int(rng.choice(SIGNALS))
    code = f"os.kill(os.getpid(), {number})"
    words = {"place": "pretrain_llama.train_step", "before": rng.random() < 0.5, "code": code}
    says = "stopped by SIG.* after iteration [34] of 5; saved: the same command resumes"
    return resumed(folder, ["-c", AT.format(**words)], codes=[75], says=says)


LATER = """
import os, sys, threading
import pretrain_llama
threading.Timer({seconds}, os.kill, (os.getpid(), {number})).start()
pretrain_llama.as_process(lambda: pretrain_llama.main(sys.argv[1:]), None)
"""


def waiting_for_others(rng: random.Random, folder: Path) -> Case:
    number, rank = int(rng.choice(SIGNALS)), rng.randrange(2)
    port = rng.randrange(20_000, 30_000)
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    code = LATER.format(seconds=rng.uniform(0.8, 1.2), number=number)
    return resumed(folder, ["-c", code], codes=[128 + number], env=env)


def exits(rng: random.Random, folder: Path) -> Case:
    """A model's file that ends the process well has not trained."""
    code = rng.choice(
        ("os._exit(0)", "os._exit(256)", "sys.exit(0)", "sys.exit()", "sys.exit(512)", "exit(0)",
         "sys.exit(False)", "raise SystemExit", "sys.exit('nothing to do')")
    )  # fmt: skip
    first, last = rng.choice(
        (
            (code, ""),
            (f"try:\n    {code}\nfinally:\n    pass", ""),
            ("", f"def extra_args_provider(parser):\n    {code}\n"),
            ("", f"def hf_config(config, dtype=''):\n    {code}\n"),
            ("", f"class Model(llama.Llama):\n    def __init__(self, *a, **k):\n        {code}\n"),
            ("", f"class Model(llama.Llama):\n    def forward(self, *a, **k):\n        {code}\n"),
            ("", f"class Model(llama.Llama):\n    def loss(self, h, labels):\n        {code}\n"),
        )
    )
    at = write_fork(folder, first, last)
    says = r"mine.py|SystemExit|nothing to do|was called at"
    return resumed(folder, ["pretrain_llama.py", "--model-file", at], codes=[1, 2], says=says)


def exits_in_a_thread(rng: random.Random, folder: Path) -> Case:
    first = "import threading\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(5)"
    if rng.random() < 0.5:
        first = (
            f"import threading\nthreading.Timer({rng.random():.2f}, lambda: os._exit(0)).start()"
        )
        first += "\ntime.sleep(5)"
    at = write_fork(folder, first)
    says = r"os._exit\(0\) was called at .*mine.py:\d+ before the run was done"
    return resumed(folder, ["pretrain_llama.py", "--model-file", at], codes=[1], says=says)


PUT_BACK = """
import os, shutil, sys
import pretrain_llama
step, prefix = pretrain_llama.train_step, {prefix!r}
def changed(run, *args):
    if run.iteration == 3:
        {change}
    return step(run, *args)
def over(at, size):
    was = os.stat(prefix + ".bin")
    with open(prefix + ".bin", "r+b") as file:
        file.seek(at)
        file.write(bytes(size))
    os.utime(prefix + ".bin", ns=(was.st_atime_ns, was.st_mtime_ns))
pretrain_llama.train_step = changed
pretrain_llama.as_process(lambda: pretrain_llama.main(sys.argv[1:]), None)
"""


def with_corpus(folder: Path, argv: list, steps: int, **owes) -> Case:
    saved, step = copied(folder, "text")
    for end in (".bin", ".idx"):
        if not (folder / f"corpus{end}").exists():
            shutil.copy2(BASE["folder"] / f"corpus{end}", folder)
    run = [*argv, *SIZES, *FLAGS, "--data-path", folder / "corpus", "--split", "1,0,0"]
    run += ["--train-iters", steps, "--save", saved, "--load", saved]
    return Case(run, **{"kept": [step], **owes})


def written_over_in_a_run(rng: random.Random, folder: Path) -> Case:
    at = rng.randrange(3000)
    change = f"over({at}, {rng.choice((100, 500, 4000 - at))})"
    if rng.random() < 0.3:
        change += "; os.rename(prefix + '.bin', prefix + '.gone')"
    code = PUT_BACK.format(prefix=str(folder / "corpus"), change=change)
    says = r"corpus.bin was changed while it was read"
    return with_corpus(folder, ["-c", code], 400, codes=[1], says=says)


def written_over_before_a_resume(rng: random.Random, folder: Path) -> Case:
    case = with_corpus(folder, ["pretrain_llama.py"], 4, codes=[2], says="was made with other data")
    at = folder / "corpus.bin"
    was, data = os.stat(at), bytearray(at.read_bytes())
    place = rng.randrange(len(data) // 2) * 2
    data[place] ^= 1 + rng.randrange(7)
    with open(at, "r+b") as file:  # in place
        file.write(data)
    os.utime(at, ns=(was.st_atime_ns, was.st_mtime_ns))
    return case


def damaged_common(rng: random.Random, folder: Path) -> Case:
    """A Megatron checkpoint whose common.pt is not there, cut off, or something else."""
    from model import llama

    model = mcore.model_of(False)
    source = mcore.write_parts(
        folder / "iter_0000007", mcore.interleave(mcore.weights_of(model.initialize(4)), True)
    )
    mcore.write_progress(source)
    common = source / "common.pt"
    whole = common.read_bytes()
    common.unlink()
    how = rng.choice(("missing", "cut", "empty", "folder", "text", "link"))
    if how == "cut":
        common.write_bytes(whole[: rng.randrange(1, len(whole) - 1)])
    elif how == "folder":
        common.mkdir()
    elif how == "link":
        common.symlink_to(folder / "nowhere")
    elif how != "missing":
        common.write_bytes({"empty": b"", "text": b"not a checkpoint\n" * 9}[how])
    sizes = folder / "sizes"
    sizes.mkdir()
    (sizes / "config.json").write_text(json.dumps(llama.hf_config(model.config, "float32")))
    argv = ["tools/checkpoint.py", "convert", "--from-mcore", source, "--hf-config", sizes]
    says = r"common\.pt.*take the weights alone with --no-load-optim"
    saved = folder / "weft"
    return Case([*argv, "--save", saved], says=says, kept=[source], absent=[saved])


KINDS = {
    kind.__name__: kind
    for kind in (
        in_import, in_nested_import, swallowed, in_own_functions, swallowed_in_functions,
        in_a_phase, in_a_step, waiting_for_others, exits, exits_in_a_thread, written_over_in_a_run,
        written_over_before_a_resume, damaged_common,
    )
}  # fmt: skip


@pytest.mark.parametrize("name, seed", sampled(drawn(KINDS, 39), 6))
def test_the_exit_code_says_what_a_start_met(launcher, tmp_path, name, seed):
    check(launcher, KINDS[name], seed, tmp_path)


@pytest.mark.parametrize("phase", sampled(PHASES, 9))
def test_a_signal_in_each_phase(launcher, tmp_path, phase):
    def kind(rng: random.Random, folder: Path) -> Case:
        code, codes = sent(rng)
        words = {"place": phase, "before": True, "code": code}
        return resumed(folder, ["-c", AT.format(**words)], codes=codes)

    check(launcher, kind, 0, tmp_path)


NO_CHANGE = {
    "renamed": "os.rename(prefix + '.bin', prefix + '.away')",
    "removed": "os.unlink(prefix + '.bin')",
    "other permissions": "os.chmod(prefix + '.bin', 0o640)",
    "linked": "os.link(prefix + '.bin', prefix + '.more')",
    "written with what it holds": "over(0, 0)",
}


@pytest.mark.parametrize("name", sampled(sorted(NO_CHANGE), 6))
def test_a_corpus_that_holds_what_it_did_is_read_on(launcher, tmp_path, name):
    def kind(rng: random.Random, folder: Path) -> Case:
        code = PUT_BACK.format(prefix=str(folder / "corpus"), change=NO_CHANGE[name])
        return with_corpus(folder, ["-c", code], 40, codes=[0], says="finished: 40 iterations")

    check(launcher, kind, 0, tmp_path)


def copied_elsewhere(rng: random.Random, folder: Path) -> Case:
    """Another inode, other times: the same corpus."""
    (folder / "corpus.bin").write_bytes((BASE["folder"] / "corpus.bin").read_bytes())
    return with_corpus(folder, ["pretrain_llama.py"], 4, codes=[0], says="finished: 4 iterations")


def ends_its_children(rng: random.Random, folder: Path) -> Case:
    """A child process may end as it likes."""
    first = "pid = os.fork()\nif not pid:\n    os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0\n"
    at = write_fork(folder, first)
    says = "finished: 5 iterations"
    return resumed(folder, ["pretrain_llama.py", "--model-file", at], codes=[0], says=says)


def under_nohup(rng: random.Random, folder: Path) -> Case:
    code = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    kill = "os.kill(os.getpid(), signal.SIGHUP)"
    code += AT.format(place=rng.choice(PHASES), before=True, code=kill)
    return resumed(folder, ["-c", code], codes=[0], says="finished: 5 iterations")


def weights_alone(rng: random.Random, folder: Path) -> Case:
    case = damaged_common(rng, folder)
    says = "only the weights are taken, and the checkpoint begins at sample 0"
    return Case([*case.argv, "--no-load-optim"], codes=[0], says=says, kept=case.kept)


@pytest.mark.parametrize(
    "kind", sampled([copied_elsewhere, ends_its_children, under_nohup, weights_alone], 2)
)
def test_what_is_no_mistake(launcher, tmp_path, kind):
    check(launcher, kind, 1, tmp_path)
