# SPDX-License-Identifier: Apache-2.0
"""Scores: a Scorer's are transformers', on every layout; lm_eval's own tasks agree with its own
model of transformers, where lm_eval is installed (pip install 'weft-llm[eval]' accelerate).
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import hf_config, hf_names
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.sampling import sampled
from tools import evaluate as module
from tools import generate as generating
from tools.evaluate import parse, plain, to_do
from tools.evaluator.harness import NEW_TOKENS, find_tasks, first_token, new_tokens
from tools.evaluator.score import Scorer
from tools.generate import load_model
from training.checkpoint import parameter_pieces, save, together
from training.data.tokenizer import NullTokenizer

ROOT = Path(__file__).resolve().parents[2]
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="the optional package lm_eval is not installed here",
)
LENGTH = 48
ROWS = [
    ([5, 17, 3], [99, 0, 42]),
    ([7], [8]),
    (list(range(20, 40)), [1, 2, 3, 4, 5, 6, 7]),
    ([3, 3], []),
    ([250] * 60, [11, 12]),  # longer than a forward: its first tokens are left out
    ([200, 201, 202], [17]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama of transformers with a tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = LlamaConfig(
        vocab_size=263, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("evaluate") / "hf"
    LlamaForCausalLM(sizes).save_pretrained(path)
    for file in (ROOT / "tests/data/tokenizer").iterdir():
        shutil.copy(file, path)
    return path


def theirs(folder: Path, rows: Any) -> list[tuple[float, bool]]:
    """Score rows one by one with transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for context, new in rows:
        ids = [*context, *new][-LENGTH - 1 : -1]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0][len(ids) - len(new) :]
        value = logits.log_softmax(-1)[range(len(new)), new].sum().item()
        found.append((value, logits.argmax(-1).tolist() == new))
    return found


def score(comm: Any, folder: str, tp: int, rows: Any) -> list[tuple[float, bool]]:
    grid = comm.grid(tp)
    model, _ = load_model(folder, grid, torch.device("cpu"), torch.float64)
    return Scorer(model, grid, 2, LENGTH).log_likelihoods(rows)


def likeliest(folder: Path) -> tuple[list[int], list[int]]:
    """Return a row whose continuation is the model's own."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = [4, 9]
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[:2], ids[2:]


@pytest.mark.parametrize(("size", "tp"), sampled([(4, 2), (2, 2), (1, 1), (2, 1)], 2))
def test_scores_are_those_of_transformers_on_every_layout(
    world: Any, folder: Path, size: int, tp: int
) -> None:
    rows = [*ROWS, likeliest(folder)]
    wanted = theirs(folder, rows)
    assert wanted[-1][1] and not wanted[0][1] and wanted[3] == (0.0, True)
    (alone,) = world(1).run(score, str(folder), 1, rows)
    for found in world(size).run(score, str(folder), tp, rows):
        assert [best for _, best in found] == [best for _, best in wanted]
        for (value, _), (by_one, _), (by_them, _) in zip(found, alone, wanted, strict=True):
            assert math.isclose(value, by_one, rel_tol=1e-12)
            assert math.isclose(value, by_them, rel_tol=1e-6)  # their RoPE is in fp32


def one_rank_fails(comm: Any, folder: str, what: str) -> str:
    """Prepare an evaluation while a rank cannot do `what`; then all ranks meet again."""
    grid, cpu = comm.grid(1), torch.device("cpu")

    def fails(*args: Any) -> Any:
        raise ValueError("no such file here")

    where = module if what == "tokenizer_of" else generating
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(where, what, fails)
        try:
            module.prepare(parse(["--load", folder, "--tasks", "a"]), folder, grid, cpu)
        except ValueError as error:
            return f"{error}, {len(together(lambda: 0, grid.world))}"
    return ""


@pytest.mark.parametrize("what", ["tokenizer_of", "saved_config", "weight_pieces"])
def test_what_one_rank_cannot_prepare_fails_on_all(world: Any, folder: Path, what: str) -> None:
    """With --watch they all go on to the next checkpoint."""
    said = world(2).run(one_rank_fails, str(folder), what)
    assert said == ["rank 1: no such file here, 2", "no such file here, 2"]


def refused(comm: Any, folder: str, kind: str) -> str:
    rows = {
        "other": [([5, 17], [3 + comm.rank])],
        "long": [([5], list(range(LENGTH + 1)))],
        "empty": [([], [5])],
    }
    try:
        score(comm, folder, 1, rows[kind])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("other", "the ranks built different requests"),
        ("long", "a continuation of 49 tokens is longer than the model's 48"),
        ("empty", "at least one token before"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused_on_every_rank(
    world: Any, folder: Path, kind: str, sentence: str
) -> None:
    for said in world(2).run(refused, str(folder), kind):
        assert sentence in said


def test_new_tokens_are_read_under_every_name() -> None:
    assert new_tokens({"max_gen_toks": 3, "max_tokens": 9}) == 3
    assert new_tokens({"max_new_tokens": None, "max_tokens": 9}) == 9
    assert new_tokens({}) == NEW_TOKENS


def test_a_text_begins_with_bos_else_with_the_end_of_a_document() -> None:
    tokenizer = NullTokenizer(101)
    assert first_token(tokenizer) == 100
    tokenizer.bos = 7
    assert first_token(tokenizer) == 7
    tokenizer.bos = tokenizer.eod = None
    with pytest.raises(ValueError, match="no token that begins"):
        first_token(tokenizer)


def test_plain_numbers_of_results() -> None:
    arc = {
        "alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 0.25,
        "em_stderr,strict": 0.1, "sample_len": 9,
    }  # fmt: skip
    plainly = {"acc": 0.5, "em/strict": 0.25, "em/strict_stderr": 0.1}
    assert plain({"results": {"arc": arc}}) == {"arc": plainly}
    assert plain(None) == {}


def test_steps_that_have_no_scores_yet_come_oldest_first(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "eval"
    output.mkdir()
    for step in (2, 10, 4, 6):
        (run / f"step_{step:08}").mkdir(parents=True)
    (output / "step_00000004.json").write_text("{}")
    found = [Path(name).name for name in to_do(str(run), output, {"step_00000006"})]
    assert found == ["step_00000002", "step_00000010"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "a", "--watch", "3"], "--watch needs --output"),
        (["--tasks", "a", "--last-step", "3"], "--last-step needs --watch"),
    ],
)
def test_flags_that_do_not_fit_together(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--load", "x", *flags])
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_the_job_script_gives_flags_that_are_taken() -> None:
    said = subprocess.run(
        ["bash", "examples/eval.slurm", "--limit", "5"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LAUNCH": "echo", "OUT": "runs/x", "LAST_STEP": "30"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    args = parse(said[1:])
    assert said[0] == "tools/evaluate.py" and args.load == "runs/x/checkpoints"
    assert (args.output, args.last_step, args.limit) == ("runs/x/eval", 30, 5)


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed here"
)
def test_without_lm_eval_a_sentence_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        module.main(["--load", str(folder), "--tasks", "arc_easy", "--device", "cpu"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "pip install 'weft-llm[eval]'" in said and len(said) < 300


# ---- with lm_eval

WORDS = "one two five zebra x quick brown fox jumps end".split()
QUESTIONS = [
    {"question": f"After {word} comes", "choices": ["a b", " c", "dd e f"], "answer": i % 3}
    for i, word in enumerate(WORDS)
]
CHOICE = """
task: weft_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
task: weft_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{choices[2]}}}} and on, and on, well beyond a forward's length"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
GENERATE = """
task: weft_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "e"
generation_kwargs: {{until: ["q"], max_gen_toks: 9, do_sample: false}}
metric_list:
  - metric: exact_match
"""
TASKS = "weft_choice,weft_rolling,weft_generate"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three tasks with their data."""
    path = tmp_path_factory.mktemp("tasks")
    data = path / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("generate", GENERATE)):
        (path / f"{name}.yaml").write_text(text.format(data=data))
    return path


def command(ranks: int, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launch[: 99 * (ranks > 1)], "tools/evaluate.py", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        timeout=300,
    )  # fmt: skip


def save_steps(folder: Path, run: Path, steps: Sequence[int]) -> None:
    """Save the model of a Hugging Face folder as checkpoints of a run."""
    model, _ = load_model(str(folder), Grid(), torch.device("cpu"), None)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    for step in steps:
        state = {"hf_config": hf_config(model.config), **kind}
        save(run, step=step, pieces=pieces, state=state, grid=Grid())


@needs_lm_eval
@pytest.mark.prove
def test_tasks_agree_with_lm_evals_model_of_transformers(
    folder: Path, tasks: Path, tmp_path: Path
) -> None:
    """A checkpoint at tp 1, tp 2 and dp 2: ten questions, their continuations and rolling texts."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # its own default for a tokenizer that begins with bos where transformers' does
    model = HFLM(str(folder), batch_size=2, max_length=LENGTH, dtype="float32", device="cpu")
    manager = find_tasks(TASKS.split(","), str(tasks))
    given = simple_evaluate(model, tasks=TASKS.split(","), task_manager=manager, log_samples=False)
    wanted = plain(given)
    save_steps(folder, tmp_path / "run", [3])
    for ranks, tp in ((1, 1), (2, 2), (2, 1)):
        out = tmp_path / f"{ranks}-{tp}"
        done = command(
            ranks, "--load", f"{tmp_path}/run", "--tasks", TASKS, "--include-path", str(tasks),
            "--output", str(out), "--tensor-model-parallel-size", str(tp), "--batch-size", "3",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        [file] = out.iterdir()
        found = json.loads(file.read_text())["scores"]
        assert set(found) == set(wanted) == set(TASKS.split(","))
        for task, metrics in wanted.items():
            for metric, value in metrics.items():
                near = math.isclose(found[task][metric], value, rel_tol=1e-4)
                assert near or "_stderr" in metric, (task, metric, found[task], value)


@needs_lm_eval
@pytest.mark.prove
def test_a_run_is_watched_and_each_step_has_its_scores(
    folder: Path, tasks: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "eval"
    save_steps(folder, run, (0, 5, 10))
    (run / "step_00000005" / "state.json").write_text("{}")  # damaged: passed over
    flags = [
        "--load", str(run), "--tasks", "weft_choice", "--include-path", str(tasks), "--output",
        str(out), "--watch", "1", "--last-step", "10",
    ]  # fmt: skip
    done = command(1, *flags)
    assert done.returncode == 0, done.stderr
    assert "step_00000005 is skipped" in done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["step_00000000.json", "step_00000010.json"]
    again = command(1, *flags)
    assert again.returncode == 0 and "weft_choice" not in again.stdout, "evaluated twice"


@needs_lm_eval
@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_task_of_anybody", "lm_eval has no such task or group"),
        ("arc_easy", "its data cannot be read or downloaded"),
    ],
)
def test_tasks_that_cannot_be_had_are_refused_at_start(
    folder: Path, tmp_path: Path, name: str, sentence: str
) -> None:
    done = command(1, "--load", str(folder), "--tasks", name, HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
