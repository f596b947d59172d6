# SPDX-License-Identifier: Apache-2.0
"""`make train`: files are reused or made again, runs resume, and all of it runs."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tools import quickstart
from training.data.indexed import IndexedWriter
from training.flags.parse import parse

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def make(out, data, *words, code=0):
    """Make files below `out` from `data`, as `make train` does after set-up; return what it says.

    words: files, and variables for make's command line.
    """
    files = [str(out / word) if "=" not in word else word for word in words]
    command = ["make", *files, f"OUT={out}", *([f"DATA={data}"] if data else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


TOKENS = [f"tokens/{part}/{quickstart.TOKENS}.idx" for part in ("train", "heldout")]


@pytest.mark.prove
@needs_make
def test_a_file_is_made_again_where_its_source_or_its_program_changed(tmp_path):
    data, out = tmp_path / "my own text.txt", tmp_path / "out"
    data.write_text("".join(f"line {n} of it's text\n" for n in range(3_000)))
    said = make(out, data, *TOKENS)
    tools = ["build_corpus", "train_tokenizer", "preprocess_data", "preprocess_data"]
    assert [at for at in re.findall(r"tools/(\w+).py", said) if at in tools] == tools
    assert "corpus: the given files" in said and (out / TOKENS[0]).exists()
    again = make(out, data, *TOKENS)
    assert "tools/" not in again and again.count("is up to date") + again.count("Nothing") >= 1
    data.write_text("another text, which is a little longer\n" * 9)
    assert "corpus: the given files" in make(out, data, "corpus/corpus.json")
    assert "--json-keys text other" in make(out, data, "corpus/corpus.json", "JSON_KEYS=text other")
    data.write_text("")
    assert "make: ***" in make(out, data, "corpus/corpus.json", code=2)
    data.write_text("some text\n" * 99)
    (out / "source.json").write_text("torn")
    assert "corpus: the given files" in make(out, data, "corpus/corpus.json")
    program = ["-W", "tools/build_corpus.py", "--dry-run"]  # as if it were new
    command = ["make", *program, str(out / "corpus/corpus.json"), f"OUT={out}", f"DATA={data}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT).stdout
    assert "--output-dir" in said


@pytest.mark.prove
@needs_make
def test_another_text_replaces_nothing_where_a_run_has_learnt_one(tmp_path):
    """`make train OUT=the/folder/of/my/text` put other tokens there, and then refused the run."""
    data, out = tmp_path / "a.txt", tmp_path / "out"
    data.write_text("".join(f"line {n}\n" for n in range(3_000)))
    make(out, data, "corpus/corpus.json")
    (out / "tp2").mkdir()
    (out / "tp2" / "run.json").write_text("{}")
    before = {path: path.read_bytes() for path in (out / "corpus").iterdir()}
    os.utime(data)
    assert "corpus: the given files" in make(out, data, "corpus/corpus.json"), "the same text"
    data.write_text("another text\n" * 900)
    said = make(out, data, "corpus/corpus.json", code=2)
    assert f"{out} holds a run of another text: rm -r {out} to start anew" in said
    assert {path: path.read_bytes() for path in (out / "corpus").iterdir()} == before
    assert not (out / "corpus.new").exists()


@pytest.mark.prove
@needs_make
def test_a_file_whose_program_fails_is_not_taken_for_done(tmp_path):
    data, model = tmp_path / "a.txt", tmp_path / "tokenizer/weft.model"
    data.write_text("text\n" * 99)
    make(tmp_path, data, "source.json")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/corpus.json").write_text("{}")  # newer, and without the texts
    assert "--input " in make(tmp_path, data, "tokenizer/weft.model", code=2)
    assert not model.exists()


def test_unigram_entropy_is_that_of_the_tokens(tmp_path):
    with IndexedWriter(str(tmp_path / "t"), np.dtype("<u2")) as writer:
        writer.add([5, 5, 5, 5])
        writer.add([9, 9, 3, 7])
    expected = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    assert quickstart.unigram_entropy(tmp_path / "t") == pytest.approx(expected, rel=1e-15)


def test_parameters_are_those_of_the_model():
    from model.llama import Llama, LlamaConfig
    from mpu.context import LayerContext
    from mpu.grid import Grid

    m = quickstart.MODEL
    config = LlamaConfig(
        vocab_size=quickstart.VOCABULARY,
        hidden_size=m["hidden-size"],
        ffn_hidden_size=m["ffn-hidden-size"],
        num_layers=m["num-layers"],
        num_attention_heads=m["num-attention-heads"],
        num_query_groups=m["num-query-groups"],
        tied=True,
    )
    model = Llama(config, LayerContext(Grid(1, 1, 1, 1)))
    assert sum(p.numel() for p in model.parameters()) == quickstart.parameters()


def test_the_printed_command_is_the_one_that_runs(capsys):
    command = ["a", "--long-flag", "with space", *(f"--flag-{n}={n}" for n in range(20))]
    quickstart.show(command, threads=2)
    printed = capsys.readouterr().out.strip().removeprefix("$ ")
    assert shlex.split(printed.replace("\\\n", " ")) == ["OMP_NUM_THREADS=2", *command]


@pytest.mark.parametrize("path, prompt", [("ast.py", "def "), ("0a1b", "Call me Ishmael.")])
def test_the_sample_is_not_given_a_thread_a_core(monkeypatch, tmp_path, path, prompt):
    """Nor Python's word where a person's text is something else.

    Two threads decoded the small model at 5 tokens/s, where one does hundreds.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    say = [sys.executable, "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"]
    asked = [quickstart.run(say, *threads, stdout=subprocess.PIPE) for threads in ((None,), (3,))]
    assert asked == ["None\n", "3\n"]
    ran = []
    monkeypatch.setattr(quickstart, "run", lambda command, **how: ran.append((command, how)))
    record = {"text": "Call me Ishmael. Some years ago", "path": path}
    (tmp_path / "heldout.jsonl").write_text(json.dumps(record) + "\n")
    quickstart.sample(Path("runs/mine"), tmp_path / "heldout.jsonl")
    ((command, how),) = ran
    assert "tools/generate.py" in command and how == {"threads": None}
    assert command[command.index("--prompt") + 1] == prompt


@pytest.mark.parametrize("tp, pp, ranks, micro", [(2, 1, 2, 4), (1, 2, 2, 1), (2, 2, 4, 1)])
def test_the_layout_reaches_the_trainer(monkeypatch, tp, pp, ranks, micro):
    """Flags that the trainer takes, on so many ranks; the same samples a step in every layout."""
    ran = []
    monkeypatch.setattr(quickstart, "run", lambda command, *how, **more: ran.append(command))
    quickstart.launch({**quickstart.MODEL, "train-iters": 60}, tp, pp)
    (command,) = ran
    at = command.index("pretrain_llama.py")
    assert command[at - 2 : at] == ["--nproc-per-node", str(ranks)]
    config = parse([*command[at + 1 :], "--mock-data", "--vocab-size", "2048"], ranks)
    p, batch = config.parallel, config.batch
    assert (p.tensor_model_parallel_size, p.pipeline_model_parallel_size) == (tp, pp)
    assert p.sequence_parallel == (tp > 1) and batch.micro_batch_size == micro
    assert batch.global_batch_size == quickstart.MODEL["global-batch-size"]


def test_records_leave_out_a_torn_line(tmp_path):
    (tmp_path / "log").write_text('{"iteration": 1}\n{"itera')
    assert quickstart.records(tmp_path / "log") == [{"iteration": 1}]
    assert quickstart.records(tmp_path / "none") == []


@needs_make
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("PP=0", "PP=0: it must be a whole number, 1 or more"),
        ("ITERS=none", "ITERS=none: it must be a whole number, 1 or more"),
        ("TP=3", "TP=3: TP is 1 or 2 here, as this small model has 2 heads of keys and values; "),
        ("PP=7", "PP=7: PP is 1 to 6 here, as this small model has 4 layers, an embedding and a "),
    ],
)
def test_a_mistake_is_one_sentence(given, said):
    """It names what was given to make, and no flag, before anything is set up."""
    command = ["make", "check-data", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and first.startswith(f"make train: {said}") and "--" not in first
    assert len(rest) == 1 and rest[0].startswith("make: ***")


@pytest.mark.parametrize("tp", range(1, 9))
def test_make_takes_the_layouts_that_the_trainer_takes(monkeypatch, tp):
    from pretrain_llama import model_provider
    from training.run.pipeline_stages import rank_stages

    ran = []
    monkeypatch.setattr(quickstart, "run", lambda command, *how, **more: ran.append(command))
    for pp in range(1, 9):
        quickstart.launch({**quickstart.MODEL, "train-iters": 60}, tp, pp)
        words = ran[-1][ran[-1].index("pretrain_llama.py") + 1 :]
        try:
            config = parse([*words, "--mock-data", "--vocab-size", "2048"], tp * pp)
            rank_stages(config, model_provider, 0)
            taken = True
        except ValueError:
            taken = False
        assert taken == (tp in quickstart.TP and pp in quickstart.PP), (tp, pp)
        given = [f"TP={tp}", f"PP={pp}"]
        if shutil.which("make") and (pp > 5 or tp == pp == 1):
            done = subprocess.run(["make", "check-data", *given], cwd=ROOT, capture_output=True)
            assert (done.returncode == 0) == taken, given


def text_file(folder):
    lines = (f"def f_{n}(x):\n    return x + {n * 7919 % 1000}\n\n\n" for n in range(12_000))
    (folder / "code.txt").write_text("".join(lines))
    return folder / "code.txt"


def start(*arguments):
    command = [sys.executable, "-u", "tools/quickstart.py", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )


@pytest.mark.prove
def test_trains_samples_and_goes_on_where_it_was_stopped(tmp_path):
    make(tmp_path / "out", text_file(tmp_path), *TOKENS)
    given = "--out", tmp_path / "out", "--iters", 60
    with start(*given) as first:
        for line in first.stdout:
            if line.startswith("iteration") and " 10/60" in line:
                first.send_signal(signal.SIGINT)
                break
        rest = first.stdout.read()
    assert first.returncode == 130, rest
    assert "stopped; the same command continues from here" in rest and "Traceback" not in rest
    assert "stopped by SIGINT after iteration" in rest
    saved = sorted(tmp_path.glob("out/tp2/checkpoints/step_*/manifest.json"))
    assert saved and not list(tmp_path.glob("out/tp2/checkpoints/*.tmp-*"))

    begin = time.monotonic()
    with start(*given) as second:
        for line in second.stdout:
            if line.startswith("iteration"):
                break
        started = time.monotonic() - begin
        said = second.stdout.read()
    assert second.returncode == 0, said
    assert started < 60, "seconds to the first line of a resumed run"
    log = [json.loads(line) for line in (tmp_path / "out/tp2/log.jsonl").read_text().splitlines()]
    steps = [r["iteration"] for r in log if "loss" in r]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    loss = [r["validation_loss"] for r in log if "validation_loss" in r][-1]
    entropy = quickstart.unigram_entropy(tmp_path / "out/tokens/heldout" / quickstart.TOKENS)
    assert loss < entropy and f"{loss:.3f}" in said and f"{entropy:.3f}" in said
    assert "tokens/s, TP 2 with sequence parallelism on 2 rank(s)" in said
    bits = [r["validation_bits_per_byte"] for r in log if "validation_bits_per_byte" in r][-1]
    assert f"bits a byte      {bits:.3f} bits a byte of held-out text" in said
    assert (tmp_path / "out/tp2/loss.png").stat().st_size > 10_000
    assert list((tmp_path / "out/tp2/tensorboard").glob("events.*"))


@pytest.mark.prove
def test_a_pipeline_trains_and_samples(tmp_path):
    make(tmp_path / "out", text_file(tmp_path), *TOKENS)
    given = "--out", tmp_path / "out", "--iters", 20, "--pp", 2
    with start(*given) as child:
        said = child.stdout.read()
    assert child.returncode == 0, said
    folder = tmp_path / "out/tp1pp2"
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in log if "loss" in r][-1] == 20
    loss = [r["validation_loss"] for r in log if "validation_loss" in r]
    assert loss[-1] < loss[0] and f"{loss[-1]:.3f}" in said
    assert "pipeline rank 1: " in said and "tokens/s, TP 1 x PP 2 on 2 rank(s)" in said
    assert (folder / "loss.png").stat().st_size > 10_000
    assert "step_00000020: 200 tokens" in said, "the sample from the pipeline's checkpoint"


def test_the_number_that_compares_and_a_text_learnt_by_heart():
    evaluation = {"iteration": 8, "validation_loss": 2.0, "validation_bits_per_byte": 2.0}
    assert "2.000 bits a byte of held-out text (1.386 nats)" in quickstart.bits_line(evaluation)
    assert quickstart.bits_line({"validation_loss": 2.0}) == ""
    falls = [{"iteration": i, "validation_loss": 9.0 - i} for i in range(1, 5)]
    assert quickstart.lowest(falls) == "" == quickstart.lowest([*falls, falls[-1]])
    said = quickstart.lowest([*falls, {"iteration": 5, "validation_loss": 6.0}])
    assert "5.000 nats a token, after iteration 4" in said and "ITERS=4 with another OUT" in said


def test_a_second_call_says_what_it_goes_on_with_and_at_which_lr(tmp_path):
    from training.settings.learning_rate import learning_rate

    (tmp_path / "log.jsonl").write_text('{"iteration": 1000, "lr": 0.0002}\n')
    said = quickstart.continues(tmp_path, 1000, 2000)
    flags = {**quickstart.MODEL, "train-iters": 2000, "lr-warmup-iters": 40}
    words = quickstart.command_line(flags, quickstart.SWITCHES)
    config = parse([*words, "--mock-data", "--vocab-size", "2048"], 1)
    rate = learning_rate(config, 1000 * quickstart.MODEL["global-batch-size"])
    assert f"continuing with {tmp_path}/checkpoints after iteration 1000" in said
    assert f"at a learning rate of {rate:.2g}, after 0.0002: the cosine now ends at 2000" in said
