# SPDX-License-Identifier: Apache-2.0
"""A user's mistake gives one readable sentence and a non-zero exit, soon; nothing is written.

Each is made in this process, through main(). The long form also starts the program as a user does,
where the time to import torch counts too: every eighth.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_llama
from training.data.indexed import IndexedWriter
from training.data.made_with import record_of
from training.data.tokenizer import NullTokenizer

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 10.0  # seconds, the promise
FLAGS = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--train-iters": "1",
    "--lr": "1e-3",
    "--data-path": "data/good",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "500",
    "--num-workers": "0",
}


def flags(changes: dict[str, str | None]) -> list[str]:
    """Write a command line: FLAGS with changes; None leaves a flag out, "" gives it no value."""
    merged = {**FLAGS, **changes}
    return [w for k, v in merged.items() if v is not None for w in [k, *v.split()]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory of good and of lying files, and a checkpoint."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "data").mkdir()
    good = place / "data" / "good"
    rng = np.random.default_rng(0)
    with IndexedWriter(str(good), np.dtype(np.uint16)) as out:
        for _ in range(40):
            out.add(rng.integers(0, 499, 60))
    record = record_of(NullTokenizer(501), None)
    with IndexedWriter(str(place / "data" / "other"), np.dtype(np.uint16), record) as out:
        out.add(rng.integers(0, 499, 60))
    index, tokens = good.with_suffix(".idx").read_bytes(), good.with_suffix(".bin").read_bytes()

    def lie(name: str, index: bytes, tokens: bytes) -> None:
        (place / "data" / f"{name}.idx").write_bytes(index)
        (place / "data" / f"{name}.bin").write_bytes(tokens)

    lie("nonsense", b"this is no index, but it is long enough to have a header", tokens)
    lie("torn", index[:100], tokens)
    lie("short", index, tokens[: len(tokens) // 2])
    lie("empty", b"", b"")
    lie("negative", index[:34] + (-5).to_bytes(4, "little", signed=True) + index[38:], tokens)
    (place / "data" / "lonely.bin").write_bytes(tokens)
    (place / "a-file").write_text("not a directory")
    (place / "nonsense.model").write_text("not a tokenizer")
    (place / "megatron" / "iter_0000100").mkdir(parents=True)
    (place / "megatron" / "latest_checkpointed_iteration.txt").write_text("100")
    (place / "hf").mkdir()
    (place / "hf" / "config.json").write_text("{}")
    here = Path.cwd()
    os.chdir(place)
    try:
        assert pretrain_llama.main(flags({"--save": "saved"})) == 0
    finally:
        os.chdir(here)
    shutil.copytree(place / "saved", place / "broken")
    (place / "broken" / "step_00000001" / "manifest.json").write_text("{")
    return place


Mistake = namedtuple("Mistake", "name changes says world")


def mistake(name: str, changes: dict[str, str | None], says: str, world: int = 1) -> Mistake:
    """Describe a mistake: the flags that make it, a pattern of the answer, the world's size."""
    return Mistake(name, changes, says, world)


TP2 = {"--tensor-model-parallel-size": "2"}
PP2 = {"--pipeline-model-parallel-size": "2"}
MISTAKES = [
    mistake(
        "heads do not divide by tp",
        {**TP2, "--num-attention-heads": "3", "--kv-channels": "16"},
        "--num-attention-heads 3 is not a multiple of --tensor-model-parallel-size 2",
        2,
    ),
    mistake(
        "sequence does not divide by tp",
        {**TP2, "--sequence-parallel": "", "--seq-length": "31"},
        "--seq-length 31 is not a multiple of --tensor-model-parallel-size 2",
        2,
    ),
    mistake(
        "ffn does not divide by tp",
        {**TP2, "--ffn-hidden-size": "99"},
        "--ffn-hidden-size 99 is not a multiple",
        2,
    ),
    mistake("world does not factor", TP2, "WORLD_SIZE 3 is not a multiple of --tensor-mod", 3),
    mistake(
        "world does not factor into pipelines",
        PP2,
        "WORLD_SIZE 3 is not a multiple of .* x --pipeline-model-parallel-size 2",
        3,
    ),
    mistake(
        "more stages than things to place",
        {"--pipeline-model-parallel-size": "8", "--global-batch-size": "8"},
        "--pipeline-model-parallel-size 8: pipeline rank 1 would have no layers",
        8,
    ),
    mistake(
        "layers that nobody would hold",
        {**PP2, "--pipeline-model-parallel-layout": "Et|L"},
        "--pipeline-model-parallel-layout Et.L: the number of t's .* the layers, 2, not 1",
        2,
    ),
    mistake(
        "a V of another shape",
        {**PP2, "--pipeline-schedule": "zb-v", "--num-virtual-stages-per-pipeline-rank": "3"},
        "zb-v needs 2 virtual stages on each rank: --num-virtual-stages-per-pipeline-rank 3",
        2,
    ),
    mistake(
        "fewer micro-batches than the schedule needs",
        {**PP2, "--num-virtual-stages-per-pipeline-rank": "2", "--global-batch-size": "1"},
        "--pipeline-schedule interleaved at --global-batch-size 1 = 1 micro-batches",
        2,
    ),
    mistake("too few ranks", TP2, "WORLD_SIZE 1 is not a multiple"),
    mistake("ranks without a launcher", {}, "WORLD_SIZE is 2 but .* is not set: start with tor", 2),
    mistake(
        "hidden size does not divide by heads",
        {"--num-attention-heads": "3"},
        "--hidden-size 64 is not a multiple of --num-attention-heads 3",
    ),
    mistake(
        "batch does not divide", {"--global-batch-size": "3", "--micro-batch-size": "2"}, "3 is n"
    ),
    mistake("negative lr", {"--lr": "-1e-3"}, "--lr -1e-3: must be"),
    mistake("lr is no number", {"--lr": "fast"}, "--lr fast: must be a number"),
    mistake("half a layer", {"--num-layers": "2.5"}, "--num-layers 2.5: must be a whole number"),
    mistake("flag left out", {"--num-layers": None}, "--num-layers is missing"),
    mistake("value left out", {"--num-layers": ""}, "--num-layers: expected"),
    mistake("misspelt flag", {"--num-layer": "2"}, "--num-layer is not a flag.*--num-layers"),
    mistake("refused flag", {"--fp16": ""}, "--fp16 is refused: "),
    mistake("stray word", {"--bf16": "maybe"}, "--bf16: a switch takes no value, not 'maybe'"),
    mistake("two lengths", {"--train-samples": "9"}, "--train-iters and --train-samples exclude"),
    mistake("warm-up too long", {"--lr-warmup-iters": "5"}, "--lr-warmup-iters 5 must be less"),
    mistake(
        "nccl on a CPU", {"--device": "cpu", "--distributed-backend": "nccl"}, "nccl needs --dev"
    ),
    mistake(
        "no level and a level",
        {"--zero-stage": "0", "--use-distributed-optimizer": ""},
        "--zero-stage 0 and --use-distributed-optimizer exclude each other",
    ),
    mistake(
        "instances that do not divide",
        {"--zero-stage": "1", "--num-distributed-optimizer-instances": "2"},
        "--num-distributed-optimizer-instances 2 does not divide the 3 data-parallel ranks",
        3,
    ),
    mistake(
        "gradients of each micro-batch in a pipeline",
        {**PP2, "--zero-stage": "2", "--zero-reduce-each-microbatch": ""},
        "--zero-reduce-each-microbatch needs --pipeline-model-parallel-size 1, not 2",
        2,
    ),
    mistake(
        "narrow gradients without bf16",
        {"--zero-stage": "2", "--main-grads-dtype": "bf16"},
        "--main-grads-dtype bf16 needs --bf16",
    ),
    mistake(
        "apex on a CPU",
        {"--device": "cpu", "--optimizer-backend": "apex"},
        "--optimizer-backend apex needs --device cuda; on a CPU use torch",
    ),
    mistake("FSDP", {"--outer-dp-sharding-strategy": "optim"}, "optim: only no_shard is accepted"),
    mistake(
        "too long for its positions", {"--max-position-embeddings": "16"}, "--seq-length 32 is"
    ),
    mistake("no data", {"--data-path": None}, "no data: give --data-path"),
    mistake("data that is not there", {"--data-path": "data/gone"}, "there is no file data/gone.b"),
    mistake("data without index", {"--data-path": "data/lonely"}, "no file data/lonely.idx"),
    mistake(
        "data with its ending", {"--data-path": "data/good.bin"}, "give the prefix, without .b"
    ),
    mistake("index that is none", {"--data-path": "data/nonsense"}, "data/nonsense.idx: magic"),
    mistake("torn index", {"--data-path": "data/torn"}, "data/torn.idx: "),
    mistake("tokens cut short", {"--data-path": "data/short"}, "data/short.bin: size: "),
    mistake("empty data", {"--data-path": "data/empty"}, "data/empty.idx: header"),
    mistake(
        "tokens of another tokenizer",
        {"--data-path": "data/other"},
        r"data/other.json: tokenizer_digest: .*NullTokenizer of 501 tokens .* of 500 tokens",
    ),
    mistake("negative length", {"--data-path": "data/negative"}, "negative.idx: lengths.* -5"),
    mistake("blend that is none", {"--data-path": "x data/good"}, "--data-path.* x"),
    mistake(
        "tokens of another vocabulary", {"--vocab-size": "100"}, "data/good.bin: tokens: ids fr"
    ),
    mistake("empty split", {"--split": "0,1,0"}, "the train split has no documents"),
    mistake("no tokenizer", {"--tokenizer-type": None}, "--tokenizer-type is missing"),
    mistake(
        "tokenizer that is not there",
        {"--tokenizer-type": "SentencePieceTokenizer", "--tokenizer-model": "gone.model"},
        "--tokenizer-model gone.model: no such file",
    ),
    mistake(
        "tokenizer that is none",
        {"--tokenizer-type": "SentencePieceTokenizer", "--tokenizer-model": "nonsense.model"},
        "nonsense.model",
    ),
    mistake("save to a file", {"--save": "a-file"}, "--save a-file: .*a-file is not a directory"),
    mistake("save where nobody writes", {"--save": "/proc/weft"}, "--save /proc/weft: "),
    mistake("log that is a directory", {"--log-json": "data"}, "--log-json data is a directory"),
    mistake(
        "checkpoint of another model", {"--load": "saved", "--hidden-size": "32"}, "hidden_size"
    ),
    mistake(
        "checkpoint of another depth", {"--load": "saved", "--num-layers": "3"}, "num_hidden_l"
    ),
    mistake(
        "checkpoint in another precision", {"--load": "saved", "--fp64": ""}, "was saved in F32"
    ),
    mistake(
        "Megatron's checkpoint", {"--load": "megatron"}, "a Megatron-LM checkpoint .*Hugging Face"
    ),
    mistake("empty Hugging Face directory", {"--load": "hf"}, "hf: there is neither model.safet"),
    mistake("broken checkpoint", {"--load": "broken"}, "--load broken: none of its 1 checkpoints"),
    mistake(
        "checkpoint that must be there",
        {"--load": "gone", "--exit-on-missing-checkpoint": ""},
        "--load gone: no checkpoint there",
    ),
    mistake("step that is not there", {"--load": "saved", "--ckpt-step": "7"}, "--ckpt-step 7: "),
]
every = pytest.mark.parametrize("case", MISTAKES, ids=[m.name for m in MISTAKES])


def standing(place: Path) -> set[tuple[str, int, int]]:
    """Return what stands in a place, with size and time."""
    return {
        (str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in place.rglob("*")
    }


def check_answer(said: str, code: int, says: str, seconds: float) -> None:
    """Hold an answer to the promise."""
    assert code == 2, said
    (line,) = said.splitlines()
    assert line.startswith("pretrain_llama.py: ") and re.search(says, line), line
    assert len(line.partition("; start them with: ")[0]) < 400  # and then the flags, as typed
    assert seconds < LIMIT


@every
def test_a_mistake_is_answered_in_one_sentence(
    case: Mistake, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    if case.world > 1:
        monkeypatch.setenv("WORLD_SIZE", str(case.world))
    changes = {"--save": "new/deep", **case.changes}
    before, began = standing(place), time.monotonic()
    code = pretrain_llama.main(flags(changes))
    check_answer(capsys.readouterr().err, code, case.says, time.monotonic() - began)
    assert standing(place) == before


def test_a_full_disk_is_found_before_the_first_step(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.chdir(place)
    before, began = standing(place), time.monotonic()
    code = pretrain_llama.main(flags({"--save": "new/deep"}))
    says = r"--save new/deep: a checkpoint needs 1.. MB and 0.0 MB are free"
    check_answer(capsys.readouterr().err, code, says, time.monotonic() - began)
    assert {entry for entry in standing(place) if "new" in entry[0]} == set()
    assert {entry[0] for entry in before} == {entry[0] for entry in standing(place)}


def test_a_loss_that_is_not_finite_ends_the_run_in_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    code = pretrain_llama.main(flags({"--lr": "1e30", "--train-iters": "9"}))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1 and "the gradient norm was not finite at iteration" in line


def test_a_bug_keeps_its_traceback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what we say ourselves is a sentence: a ValueError out of a step is not."""
    monkeypatch.chdir(place)

    def broken(*args: Any) -> Any:
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr(pretrain_llama, "train_step", broken)
    with pytest.raises(ValueError, match="not enough values"):
        pretrain_llama.main(flags({}))


def started(
    place: Path, argv: list[str], world: int = 1, wrap: tuple[str, ...] = ()
) -> tuple[str, int, float]:
    """Start the program as a user does; return what it said on stderr, its exit code, its time."""
    keep = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    keep |= {"OMP_NUM_THREADS": "1"} | ({"WORLD_SIZE": str(world)} if world > 1 else {})
    began = time.monotonic()
    command = [*wrap, sys.executable, str(ROOT / "pretrain_llama.py"), *argv]
    done = subprocess.run(command, cwd=place, env=keep, capture_output=True, text=True, timeout=120)
    return done.stderr, done.returncode, time.monotonic() - began


def in_time(seconds: float) -> float:
    """Return the seconds of an answer; too many, without those by which this machine is late.

    They are what a bare `import torch` takes beyond two seconds.
    """
    if seconds < LIMIT:
        return seconds
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return seconds - max(0.0, time.monotonic() - began - 2.0)


@pytest.mark.prove
@pytest.mark.parametrize("case", MISTAKES[::8], ids=[m.name for m in MISTAKES[::8]])
def test_a_mistake_in_a_program_of_its_own(case: Mistake, place: Path) -> None:
    before = standing(place)
    argv = flags({"--save": "new/deep", **case.changes})
    said, code, seconds = started(place, argv, case.world)
    check_answer(said, code, case.says, in_time(seconds))
    assert standing(place) == before


@pytest.mark.prove
def test_a_disk_that_takes_nothing(place: Path) -> None:
    """No file may grow: the probe in --save fails as on a full disk, and leaves nothing."""
    before = {entry[0] for entry in standing(place)}
    limit = ("bash", "-c", 'ulimit -f 0; exec "$@"', "limit")
    said, code, seconds = started(place, flags({"--save": "new/deep"}), wrap=limit)
    check_answer(said, code, "--save new/deep: rank 0: File too large", in_time(seconds))
    assert {entry[0] for entry in standing(place)} == before


@pytest.mark.parametrize(
    "more, begins",
    [
        ("", "torchrun --standalone --nproc-per-node 4 pretrain_llama.py "),
        ("--dry-run", "WORLD_SIZE=4 python pretrain_llama.py "),
    ],
)
def test_one_process_prints_the_line_that_starts_the_ranks(more, begins, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    argv = [*flags({**TP2, **PP2}), "--save", "my out", *more.split()]
    assert pretrain_llama.main(argv) == 2
    (said,) = capsys.readouterr().err.splitlines()
    why, line = said.split("; start them with: ")
    assert "WORLD_SIZE 1 is not a multiple of" in why
    assert line.startswith(begins) and shlex.split(line.removeprefix(begins)) == argv


WANDB = """
class Error(Exception):
    pass

class setup:
    class settings:
        mode = "MODE"

def login(prompt, verify):
    assert not prompt and not verify
    return False

def init(**given):
    raise Error("No API key configured.")
"""


@pytest.mark.parametrize(
    "mode, says",
    [
        ("online", "--wandb-project llamas: no W&B login on this machine: run `wandb login`"),
        ("offline", "--wandb-project llamas: No API key configured."),  # passes; init() then fails
    ],
)
def test_wandb_without_a_login_is_one_sentence(mode, says, place, tmp_path, capsys, monkeypatch):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/__init__.py").write_text(WANDB.replace("MODE", mode))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.chdir(place)
    try:
        assert pretrain_llama.main(flags({"--wandb-project": "llamas", "--device": "cpu"})) == 2
    finally:
        sys.modules.pop("wandb", None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pretrain_llama.py: {says}")
