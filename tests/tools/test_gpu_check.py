# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` without a GPU: rows that fail in every way, its files, its limits, its numbers.

The rows here are real processes. The whole check, played at small sizes on the CPU, is in the long
form of the last test.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.gpu import check as gpu_check
from tests.gpu import launched, summary
from tests.gpu.check import PARTS, Options, Row
from tests.gpu.row import ROWS
from tests.gpu.summary import LINES, read

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "gpu-results.md"
EVERY = [row for _, rows in PARTS.values() for row in rows]
SMALL = ["--tiny", "--device", "cpu"]


# ---- rows that fail ----

SAYS = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.gpu.summary import append
path = Path({path!r})
append(path, {{"row": {name!r}, "what": "a number", "value": 1.5}})
"""
ENDS = {  # name: what the row does after its first number, and what its outcome must say
    "raises": ("raise ValueError('a mistake')", "exit code 1"),
    "hangs": ("import time; time.sleep(600)", "out of time"),
    "sigkill": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "half-a-line": ("print('x' * 5_000_000); open(path, 'a').write('{\"row\": '); sys.exit(7)",
                    "exit code 7"),
}  # fmt: skip


def row_of(path, name, code, limit=20.0):
    words = SAYS.format(root=str(ROOT), path=str(path), name=name) + code
    return Row(name, limit, ("-c", words), 0)


@pytest.fixture
def play(monkeypatch, tmp_path, capsys):
    """play(rows, words...) -> (exit code, lines of the file, what was printed) of a part of these
    rows. words: of the command line.
    """

    def run(rows, *words, out=tmp_path / "out"):
        out.mkdir(exist_ok=True)
        monkeypatch.setattr(gpu_check, "PARTS", {"played": ("rows of a test", tuple(rows))})
        monkeypatch.setattr(gpu_check, "found", lambda: (0, "no GPU in this test"))
        code = gpu_check.main([*words, "--out", str(out), "--device", "cpu"])
        return code, read(out / LINES), capsys.readouterr().out

    return run


def test_a_row_that_fails_loses_no_other_row_and_no_number_of_its_own(play, tmp_path):
    path, rows = tmp_path / "out" / LINES, list[Row]()
    for name, (code, _) in ENDS.items():
        short = 1.0 if "out of time" in ENDS[name][1] else 20.0
        rows.append(row_of(path, name, code, short))
        rows.append(row_of(path, f"after-{name}", ""))
    began = time.monotonic()
    code, lines, said = play(rows)
    assert code == 1 and time.monotonic() - began < 60
    outcomes = {line["row"]: line["outcome"] for line in lines if line["what"] == "outcome"}
    assert list(outcomes) == [row.name for row in rows]
    for name, (_, why) in ENDS.items():
        assert outcomes[name].startswith("failed") and why in outcomes[name], outcomes[name]
    numbers = Counter(line["row"] for line in lines if line["what"] == "a number")
    assert numbers.keys() == {row.name for row in rows}
    assert all(outcomes[f"after-{name}"] == "passed" for name in ENDS)
    assert len(said) < gpu_check.MOST_PRINTED and "== summary" in said
    assert len(said[said.index("== summary") :].splitlines()) <= summary.ROWS


def test_what_a_row_left_behind_is_ended(play, tmp_path):
    """A process of a session of its own, as torchrun's workers are."""
    path, note = tmp_path / "out" / LINES, tmp_path / "pid"
    child = "import time; time.sleep(600)"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
Path({str(note)!r}).write_text(str(child.pid))
"""
    rows = [row_of(path, "leaves", code), row_of(path, "hangs", code + "time.sleep(600)", 1.0)]
    for row, ends in zip(rows, (0, 1), strict=True):
        assert play([row])[0] == ends
        pid = int(note.read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.prove
def test_a_call_ends_in_its_time_and_says_which_rows_it_left_out(play, tmp_path):
    path = tmp_path / "out" / LINES
    rows = [row_of(path, f"row-{i}", "import time; time.sleep(60)", 30.0) for i in range(3)]
    began = time.monotonic()
    code, lines, _ = play(rows, "--seconds", "3.5")
    assert code == 0 and time.monotonic() - began < 20
    outcomes = [line["outcome"] for line in lines if line["what"] == "outcome"]
    assert (
        outcomes
        == ["skipped: the call's 4 s were over while it ran"]
        + ["skipped: the call's 4 s were over"] * 2
    )
    assert summary.finished(lines) == set()  # so the next call begins with them


# ---- where things go, and how much is printed ----


def told(*about):
    """Return lines of a file: (row, what, numbers) each."""
    return [{"row": row, "what": what, **numbers} for row, what, numbers in about]


def call(number, **bases):
    bases = {row.replace("_", "-"): base for row, base in bases.items()}
    about = {"machine": f"card {number}", "device": "cuda", "tiny": False, "bases": bases}
    return "call", "call", about


def run_of(row, rate):
    return row, "a run of the program", {"tokens_per_second": rate, "seconds": 32768 / rate}


def test_the_summary_subtracts_and_divides():
    lines = told(call(1, peer_compiled="run-bf16"))
    for layers, seconds, micro in ((2, 0.3, 0.07), (6, 0.7, 0.15)):
        row = f"step-{layers}"
        said = dict(seconds=seconds, tokens_per_second=32768 / seconds, mfu=0.5, micro_batch=micro)
        watts = {"watts": dict(min=600, mean=650.4, max=690), "mhz": dict(min=1, mean=2, max=3)}
        lines += told(
            (row, "a step of 1 micro-batches", dict(seconds=micro + 0.03)),
            (row, "power and clocks", watts), (row, "steps", said | dict(peak_bytes=40e9)),
        )  # fmt: skip
    lines += told(
        run_of("run-bf16", 40000.0),
        ("peer-compiled", "the peer", dict(tokens_per_second=32000.0)),
        ("step-6", "prediction", dict(device="h200", seconds=0.35)),
        ("run-bf16", "prediction", dict(device="/x/device.json", seconds=32768 / 40000)),
        ("calibrate", "host: an aten call", dict(seconds=2e-6)),
        ("calibrate", "host: a Triton launch", dict(skipped="this Python has no triton")),
    )
    text = summary.text(lines, {"step-2": "passed", "x": "skipped: no GPU"})
    assert "step-6 46,811 MFU 50.0% 40.0 GB" in text and "step-6 600 650 690, 1 2 3" in text
    assert "a layer 20.00 ms, embedding and head 30.00 ms of a micro-batch" in text
    assert "the update of 6 layers 30.00 ms" in text
    assert re.search(r"tokens/s of call 1, [-\d]+ [\d:]+: card 1", text)
    assert "(of run-bf16): peer-compiled 32,000 (0.800)" in text
    assert "predicted, h200 (measured / predicted): step-6 350 ms (2.00)" in text
    assert "predicted, device (measured / predicted): run-bf16 819 ms (1.00)" in text
    assert "host us: an aten call 2.0\n" in text
    assert "rows: 1 passed, 0 failed, 1 skipped" in text and "x (no GPU)" in text


# ---- power and clocks ----


# ---- what is covered ----


def test_every_kernel_is_launched_by_a_row_of_a_part():
    """Rows fail where they did not launch what KERNELS says of them (tests/gpu/kernels.py)."""
    found = set()
    for path in (ROOT / "mpu" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found |= (
                    {node.name}
                    if any("jit" in ast.unparse(d) for d in node.decorator_list)
                    else set()
                )
    named = [name for names in launched.KERNELS.values() for name in names]
    assert len(found) > 15 and sorted(named) == sorted(found)
    assert launched.KERNELS.keys() <= {row.name for row in EVERY}


# an operator of torch that attends on a GPU, or a package's
ATTENDS = re.compile(r"(?:F|aten)\.\w*attention\w*$")


def test_every_way_of_attention_is_taken_by_a_row_of_a_part():
    """Rows fail where, on CUDA, an operator that ATTENTION gives them did not run."""
    found = set()
    for path in sorted((ROOT / "mpu").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node).removeprefix("torch.ops.").removesuffix(".default")
                if ATTENDS.fullmatch(name) and "for_cpu" not in name:
                    found.add(name)
    assert len(found) >= 4 and launched.ATTENTION.keys() == found
    assert set(launched.ATTENTION.values()) <= {row.name for row in EVERY}


def test_every_row_is_in_one_part_and_every_file_exists():
    names = [row.name for row in EVERY]
    assert len(names) == len(set(names))
    assert gpu_check.LIMIT <= 540 < 600
    assert all(row.limit <= gpu_check.LIMIT for row in EVERY if row.gpus)
    assert {row.name for row in EVERY if not row.words} == ROWS.keys()
    files = {word for row in EVERY for word in row.words if word.endswith(".py")}
    assert all((ROOT / file).is_file() for file in files)
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert ours <= files
    for name, where in ROWS.items():
        module, _, function = where.partition(":")
        text = (ROOT / "tests" / "gpu" / f"{module}.py").read_text()
        assert f"def {function}(row: Row)" in text, name


def test_the_flags_of_every_run_are_taken():
    from model.load import of_checkpoint
    from tests.gpu import curves, moe, several, small, steps
    from tests.gpu.row import RUNS, STEPS
    from tests.gpu.row import Row as Measured
    from training.flags.parse import parse

    row, plan = Measured("x", Path("unused"), "cpu", False), ["--device", "cuda", "--dry-run"]
    for name in [*(f"step-{name}" for name in STEPS), *(f"run-{name}" for name in RUNS)]:
        config = parse([*steps.words_of(row, name), *plan], 1, None, of_checkpoint)
        layers = int(name[5]) if name.startswith("step-") else 6
        assert config.model.num_layers == layers, name
        experts = {"qwen3": 128, "mixtral": 8}.get(name.removeprefix("step-2-").split("-")[0], 1)
        assert (config.moe.experts or 1) == experts, name
    for name, layout in several.LAYOUTS.items():
        for n in (2, 4, 8):
            if n >= layout.least:
                given = [*several.words_of(row, name, n), *plan]
                assert parse(given, n, None, of_checkpoint).model.num_layers == layout.layers, name
    data = ["--train-data-path", "x", "--valid-data-path", "y", "--seed", "1"]
    small_ones = [[*small.small_flags(False), *small.batch_flags(4, 4)]]
    small_ones += [[*curves.run_flags(False, 1500), *words.split(), *data]
                   for words, _ in curves.CURVES.values()]  # fmt: skip
    for words in small_ones:
        config = parse([*words, *plan], 1, None, of_checkpoint)
        assert config.batch.global_batch_size * config.model.seq_length == 16384
    words = [*moe.overlap_flags(False), moe.OVERLAP, "--distributed-backend", "gloo", *plan]
    assert parse(words, 2, None, of_checkpoint).parallel.expert_model_parallel_size == 2


def test_what_was_frozen_is_what_the_rows_run():
    """The steps and the peer of benchmarks/freeze_predictions.py, in sizes and flags."""
    from benchmarks import freeze_predictions as frozen
    from benchmarks.fused_launches import FLAGS
    from model.load import of_checkpoint
    from tests.gpu import peer, steps
    from tests.gpu.row import LLAMA
    from training.flags.parse import parse

    def taken(words):
        words = [*words, "--train-iters", "12", "--device", "cuda", "--dry-run"]
        return parse(words, 1, None, of_checkpoint)

    i = FLAGS.index("--rehearse-device")
    for step, (layers, _) in frozen.STEPS.items():
        assert step in ROWS
        predicted = [*FLAGS[:i], *FLAGS[i + 2 :], *frozen.flags(step)]
        more = steps.VARIANTS[step.removeprefix(f"step-{layers}").strip("-") or "bf16"]
        assert taken(predicted) == taken([*steps.flags(LLAMA, layers), *more.split()]), step
    given, z = dict(frozen.PEER), LLAMA
    assert frozen.MICRO_BATCHES == steps.MICRO_BATCHES and given.pop("layers") == 6
    assert peer.PEERS["eager"] == (False, "") and not given.pop("compile")
    sizes = dict(dim=z.hidden, heads=z.heads, kv_heads=z.groups, ffn=z.ffn, vocab=z.vocab)
    others = dict(seq=z.seq, gqa="native", rope="complex", tp=1)  # rope, tp: native.py's defaults
    assert given == {**sizes, **others}


def test_a_device_file_is_fitted_and_can_be_read(tmp_path):
    from forecast.device_file import read_device
    from forecast.rehearsal import roofline
    from tests.gpu.calibrate import Calibrated, base_of
    from tests.gpu.row import Row as Measured

    file = Calibrated(Measured("calibrate", tmp_path / LINES, "cpu", True))
    sizes = [(8192, 6144, 4096), (8192, 4096, 14336), (8192, 28672, 4096)]
    true = read_device(file.base).changed(matmul=0.77)
    seconds = [roofline.matmul_seconds(true, *mnk, "bfloat16") for mnk in sizes]
    file.fit("matmul", lambda d: [roofline.matmul_seconds(d, *mnk, "bfloat16") for mnk in sizes],
             seconds, "products of a test")  # fmt: skip
    file.number("memory_share", 3.0, "more than the whole, as a cache may give")
    file.number("nothing reads this", 1.0, "a key that device files do not have")
    file.write()
    made = read_device(str(tmp_path / "device.json"))
    assert made["matmul"] == pytest.approx(0.77, rel=1e-6) and made["memory_share"] == 1.0
    assert base_of("NVIDIA H200") == "h200" and base_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert base_of("another") == "h100"


# ---- the command ----


def names(options, finished=()):
    return [row.name for row in gpu_check.chosen(options, set(finished))]


def test_a_row_brings_its_base_into_the_call(tmp_path):
    one = Options(["run-documents", "peer-eager"], tmp_path, "cuda", False, 1, "")
    assert names(one) == ["run-bf16", "run-documents", "peer-eager"]
    assert names(one, ["run-bf16"])[0] == "run-bf16"  # a result of another call is none of this
    assert names(one._replace(names=["run-muon", "run-bf16"])) == ["run-muon", "run-bf16"]
    assert names(one._replace(names=["variants"]))[0] == "run-bf16"
    assert names(one._replace(gpus=0, names=["run-muon"])) == ["run-muon"]  # it will be skipped
    assert names(one._replace(gpus=2, names=["several-fp8-tp", "peer-fsdp2"])) == [
        "several-tp-none", "several-fp8-tp", "several-zero-3", "peer-fsdp2"]  # fmt: skip
    bases = {row.base for row in EVERY if row.base}
    assert bases <= {row.name for row in EVERY} and all(not gpu_check.every()[b].base or
        b in ("several-zero-3", "several-tp-ring") for b in bases)  # fmt: skip
    ratios = ("run-", "step-6-", "peer-", "several-zero", "several-fp8")
    assert all(row.base for row in EVERY if row.name.startswith(ratios) and row.name != "run-bf16")


@pytest.mark.parametrize(
    "words, why",
    [
        (["step6"], "no part and no row 'step6'; did you mean step-6"),
        (["run-bf61", "facts"], "no part and no row 'run-bf61'; did you mean run-bf16"),
        (["experst"], "did you mean experts"),
        (["zzz"], "no part and no row 'zzz'; parts: steps, experts"),
        (["--seconds", "0"], "--seconds 0.0 is not a number of seconds above 0"),
        (["--seconds", "nan"], "--seconds nan is not a number of seconds above 0"),
    ],
)
def test_what_is_asked_for_wrongly_is_named(words, why):
    with pytest.raises(SystemExit, match=re.escape(why)):
        gpu_check.read(words)


@pytest.mark.parametrize(
    "said, code, outcome",
    [
        ("2 passed, 1 skipped in 3.00s", 0, "passed"),
        ("SKIPPED [3] tests/gpu/conftest.py:19: no GPU\n3 skipped in 3.00s", 0, "skipped: no GPU"),
        ("SKIPPED [1] tests/x.py:11: no triton\n1 skipped in 1.0s", 5, "skipped: no triton"),
        ("4 deselected in 1.0s", 5, "skipped: pytest found no test to run"),
        ("1 failed, 2 passed in 3.00s", 1, "failed: exit code 1"),
    ],
)
def test_a_row_of_tests_that_were_all_skipped_has_not_passed(said, code, outcome):
    assert gpu_check.outcome_of(code, gpu_check.every()["test-nccl"], [], said) == outcome


def test_an_interpreter_without_torch_hands_over_or_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert "has no torch: make gpu-check PYTHON=/path/to/python3" in capsys.readouterr().out
    own, started = tmp_path / ".venv/bin/python", []
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setattr(gpu_check.os, "execv", lambda path, words: started.append(words))
    gpu_check.main(["steps", "--out", str(tmp_path)])
    assert started[0][0] == str(own) and started[0][2] == "steps"


# ---- kernels without a GPU ----


def test_kernels_are_counted_shared_out_and_compiled_without_a_gpu(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="this platform has no triton")
    from tests.gpu import overlap_cases, time_overlap
    from tests.gpu.alone import compiling
    from tests.gpu.hog import clock, hog_kernel

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    some = overlap_cases.every(2)[:6]
    monkeypatch.setattr(overlap_cases, "every", lambda size: some)
    count, mine = overlap_cases.compile_share(0, 1, sizes=(2,), really=False)
    assert count > 6 and mine == 0 and not list(tmp_path.rglob("*.cubin"))
    with compiling(really=False) as seen:
        for shape in time_overlap.SMALL.values():
            time_overlap.operations(*shape, torch.device("cpu"))
    names = {name.split("[")[0].split("(")[0] for name in seen.keys}
    assert names >= {"all_gather_matmul_kernel", "matmul_scatter_kernel", "reduce_kernel"}
    with compiling() as seen:
        out = torch.empty(4, dtype=torch.int64)
        hog_kernel.launch((4,), out, 1000, clock, num_warps=32)
    assert seen.mine == 1
    (ptx,) = tmp_path.rglob("*.ptx")
    assert "globaltimer" in ptx.read_text() and list(tmp_path.rglob("*.cubin"))


# ---- the whole check, small ----

# rows that only a GPU runs, and that say so
GPU_ALONE = {"sync", "several-tp-symmetric", "several-tp-pp-dp", "overlap-time", "memcheck",
             "racecheck", "overlap-kernels", "test-activations", "test-nccl"}  # fmt: skip


# in every Python of the check: packages that are not there, and faults of rows by their names
STOCK = """
import atexit, os, sys, time
from importlib.machinery import PathFinder
hidden = ("xxhash", "safetensors", "pytest", "sentencepiece", "tokenizers", "tiktoken", "rich",
          "tqdm", "tensorboard", "matplotlib", "transformers", "hypothesis", "megatron")
find, words = PathFinder.find_spec, sys.orig_argv
def find_spec(name, *rest):
    if name.partition(".")[0] in hidden:
        return None
    if name == "tests.gpu.products":
        import torch
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
    if name == "tests.gpu.attention":
        raise MemoryError("no memory for it")
    return find(name, *rest)
PathFinder.find_spec = find_spec
if "tests/gpu/row.py" in words:
    row = words[words.index("tests/gpu/row.py") + 1]
    if row in ("kernel-rope", "run-documents"):
        os.kill(os.getpid(), 9 if row == "kernel-rope" else 11)
    if row == "kernel-sum":
        time.sleep(600)
if words[-3:-1] and words[-2] == "collectives" and "torch.distributed.run" not in words:
    atexit.register(time.sleep, 600)  # a rank whose numbers are written does not get this far
"""
FAILS = {
    "float8": "OutOfMemoryError: CUDA out of memory", "context": "MemoryError",
    "attention": "MemoryError", "kernel-rope": "SIGKILL", "kernel-sum": "out of time",
    "run-documents": "SIGSEGV",
}  # fmt: skip


def stock_tree(folder):
    """Copy the checkout as it would travel, without what git ignores; return the environment."""
    names = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(names, cwd=ROOT, capture_output=True, text=True).stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(STOCK)
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "OUT": str(folder / "out")}


TYPED = re.findall(r"^    make gpu-check (.*?)(?:   .*)?$", GUIDE.read_text(), re.M)


def test_the_calls_of_the_guide_are_of_parts_and_rows_that_exist():
    """Each line that one types. Those for one GPU take at most 26 minutes."""
    parts = [re.search(r'PART=("[^"]*"|\w+)', words)[1].strip('"').split() for words in TYPED[:3]]
    assert len(TYPED) >= 6 and sum(parts, []) == [*PARTS][:4]
    for words in TYPED:
        given = dict(re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", words))
        for named in (given.get("PART", ""), given.get("ROWS", "")):
            assert set(named.strip('"').split()) <= {*PARTS, *gpu_check.every()}, words
        arguments = given.get("ARGS", "").strip('"').replace("FOLDER", "x").split()
        gpu_check.read(arguments)


@pytest.mark.prove
@pytest.mark.parametrize("part", PARTS)
def test_the_whole_check_at_small_sizes_in_a_stock_python(tmp_path, part):
    """As it is typed, in a tree without .venv and native library, by a Python without our packages,
    with rows that die. There pytest is one that is missing, and its rows are skipped.
    """
    env = stock_tree(tmp_path)
    words = ["make", "gpu-check", f"PART={part}", f"PYTHON={sys.executable}"]
    words += ["ARGS=" + " ".join([*SMALL, "--seconds", "1500"])]
    done = subprocess.run(words, cwd=tmp_path / "tree", env=env, capture_output=True, text=True)
    lines, said = read(tmp_path / "out" / LINES), done.stdout
    outcomes = {line["row"]: line["outcome"] for line in lines if line["what"] == "outcome"}
    options = Options([part], tmp_path, "cpu", True, 0, "")
    assert list(outcomes) == names(options), done.stderr[-2000:]
    for name, outcome in outcomes.items():
        alone = name in GPU_ALONE or "pytest" in gpu_check.every()[name].needs
        kind = "failed" if name in FAILS else "skipped" if alone else "passed"
        assert outcome.startswith(kind) and FAILS.get(name, "") in outcome, (name, outcome)
    assert bool(done.returncode) == any(name in FAILS for name in outcomes)
    assert len(said) < gpu_check.MOST_PRINTED and "== summary" in said
    out = tmp_path / "out"
    files = [path for path in out.rglob("*")]
    assert len(files) <= 8 and all(path.is_file() and path.parent == out for path in files)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in files)
