# SPDX-License-Identifier: Apache-2.0
"""What `make gpu-check` does without a GPU, and all of it that a CPU can show."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.gpu.prediction import compare, launches_by_op, load

from mpu.layers.attention import core as attention
from tests.gpu import measure_step
from tools import gpu_check

ROOT = Path(__file__).resolve().parents[2]
TINY = """--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --global-batch-size 2 --train-iters 9 --lr 1e-4 --device cpu""".split()


# ---- the parts ----


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """calls(gpu, codes) -> (exit code, what was executed); nothing runs. codes: of the commands."""

    def get(words, gpu, codes=None, packages=("torch", "triton", "pytest"), sanitizer=None):
        ran, codes = [], dict(codes or {})

        def execute(command, limit):
            assert 0 < limit <= gpu_check.LIMIT
            ran.append([str(word) for word in command])
            return next((code for name, code in codes.items() if name in " ".join(ran[-1])), 0)

        def find_spec(name):
            return SimpleNamespace() if name in packages else None

        monkeypatch.setattr(gpu_check, "execute", execute)
        monkeypatch.setattr(gpu_check.importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(gpu_check, "device", lambda: (gpu, "one GPU" if gpu else "no GPU"))
        monkeypatch.setattr(gpu_check, "write_prediction", lambda path, device: "")
        monkeypatch.setattr(gpu_check.shutil, "which", lambda path: sanitizer)
        monkeypatch.setattr(gpu_check, "OUT", tmp_path)
        return gpu_check.main(words), ran

    return get


def test_without_a_gpu_it_runs_what_needs_none_and_says_what_waits(calls, capsys):
    code, ran = calls([], gpu=False)
    said, text = capsys.readouterr().out, " ".join(" ".join(command) for command in ran)
    assert code == 0
    assert "test_ahead_of_time.py" in text and "test_overlap_kernels.py" in text
    assert "tests/gpu/test" not in text
    waits = said[said.index("== these wait for a GPU:") :]
    assert [n for n in gpu_check.PARTS if f"\n   {n} " in waits] == [
        "first", "overlap", "kernels", "sanitizer", "trainer"
    ]  # fmt: skip
    assert "predict passed; compile passed; interpret passed" in said


def test_a_part_that_fails_without_a_gpu_is_a_failure(calls, capsys):
    assert calls([], gpu=False, codes={"test_ahead_of_time": 1})[0] == 1
    assert "compile failed: exit code 1" in capsys.readouterr().out


def test_on_a_gpu_the_five_calls_run_in_order_each_prepared_before_its_time(calls):
    code, ran = calls([], gpu=True, sanitizer="/usr/bin/compute-sanitizer")
    scripts = [" ".join(Path(word).name for word in command[1:]) for command in ran]
    where = [
        next(n for n, text in enumerate(scripts) if needle in text)
        for needle in ("measure_step.py", "time_overlap.py", "overlap_cases.py",
                       "test_overlap_kernels.py", "memcheck", "racecheck", "test_nccl.py")
    ]  # fmt: skip
    assert code == 0 and where == sorted(where)
    assert ran[where[4]][:3] == ["/usr/bin/compute-sanitizer", "--tool", "memcheck"]


def test_what_cannot_run_is_named_with_the_reason(calls, capsys):
    code, ran = calls(["trainer", "sanitizer", "overlap"], gpu=True, packages=("torch", "triton"))
    said = capsys.readouterr().out
    assert code == 0 and len(ran) == 1
    assert f"trainer skipped: {sys.executable} has no pytest" in said
    assert "sanitizer skipped: no compute-sanitizer" in said and "overlap passed" in said
    assert calls(["first"], gpu=False)[1] == []
    assert "first skipped: no GPU" in capsys.readouterr().out


def test_the_kernels_cases_run_without_pytest_too(calls, capsys):
    code, ran = calls(["kernels"], gpu=True, packages=("torch", "triton"))
    assert code == 0 and [command[1:] for command in ran] == [
        ["tests/gpu/overlap_cases.py"], ["tests/gpu/overlap_cases.py", "--run"]
    ]  # fmt: skip
    assert "without pytest: " in capsys.readouterr().out
    assert calls(["kernels"], gpu=True, packages=("torch",))[1] == []


def test_every_gpu_test_is_in_a_part_and_every_file_of_a_part_exists():
    words = [w for p in gpu_check.PARTS.values() for c in (*p.commands, *p.prepare) for w in c]
    files = {word for word in words if word.endswith(".py")}
    assert all((ROOT / file).is_file() for file in files)
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert ours <= files
    assert gpu_check.LIMIT < 8 * 60


def test_the_makefile_installs_nothing_for_it():
    text = (ROOT / "Makefile").read_text()
    (rule,) = [line for line in text.splitlines() if line.startswith("gpu-check:")]
    assert rule.split("##")[0].strip() == "gpu-check:"
    command = text[text.index(rule) :].splitlines()[1]
    assert command.startswith("\t@$(PYTHON) tools/gpu_check.py") and "pip" not in command


def test_a_command_ends_at_its_limit():
    assert gpu_check.execute([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == 124
    assert gpu_check.execute([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


def test_an_interpreter_without_torch_hands_over_or_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    assert gpu_check.main([]) == 1
    assert "has no torch: make gpu-check PYTHON=/path/to/python3" in capsys.readouterr().out
    own, started = tmp_path / ".venv/bin/python", []
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setattr(gpu_check.os, "execv", lambda path, words: started.append(words))
    gpu_check.main(["first"])
    assert started[0][0] == str(own) and started[0][-1] == "first"


# ---- the prediction ----

PREDICTED = {
    "launches": [
        {"op": "aten::mm", "part": "linear", "count": 10, "bytes": 1, "flops": 1.0},
        {"op": "aten::mm", "part": "wgrad", "count": 2, "bytes": 1, "flops": 1.0},
        {"op": "aten::clone", "part": "glue", "count": 3, "bytes": 1, "flops": 0.0},
    ],
    "memory": {"peak_bytes": 1000, "allocator_rounding_bytes": 24},
    "time": {"step_seconds": 0.5},
}


def test_measured_over_predicted():
    launches = {"aten::mm": 12, "aten::copy_": 6, "aten::add": 1}
    seen = {"peak_bytes": 1100, "reserved_bytes": 1155, "step_seconds": 0.6, "launches": launches}
    text = [" ".join(line.split()) for line in compare(PREDICTED, seen)]
    assert "peak memory, bytes 1,100 1,000 1.100" in text
    assert "with the allocator's rounding 1,100 1,024 1.074" in text
    assert "step, seconds 0.6000 0.5000 1.200" in text
    assert "launches 19 15 1.267" in text
    rows = text[-3:]  # what differs comes first
    assert rows == ["aten::copy_ 6 3 2.000", "aten::add 1 0 -", "aten::mm 12 12 1.000"]
    assert launches_by_op(PREDICTED) == Counter({"aten::mm": 12, "aten::copy_": 3})
    assert len(compare(PREDICTED, {})) == 1


def test_a_file_that_is_no_prediction_is_refused(tmp_path):
    path = tmp_path / "made.json"
    with pytest.raises(ValueError, match="made.json is no prediction"):
        load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no prediction .KeyError"):
        load(path)
    path.write_text(json.dumps(PREDICTED))
    assert load(path) == PREDICTED


def test_launches_are_counted_where_a_kernel_was_launched():
    def event(name, kernels=0, children=()):
        return SimpleNamespace(name=name, kernels=[0] * kernels, cpu_children=list(children))

    copy = event("aten::copy_", 1)
    events = [event("aten::to", 0, [copy]), copy, event("aten::mm", 2), event("cudaLaunchKernel")]
    assert measure_step.launches(events, cuda=True) == Counter({"aten::copy_": 1, "aten::mm": 2})
    assert measure_step.launches(events, cuda=False) == Counter({"aten::copy_": 1, "aten::mm": 1})


def test_the_first_part_measures_a_step_of_the_program(tmp_path, capsys, monkeypatch):
    # a GPU's attention is torch's
    monkeypatch.setattr(attention, "takes_native", lambda *args: False)
    made = tmp_path / "prediction.json"
    made.write_text(json.dumps(PREDICTED))
    out = tmp_path / "first.json"
    assert measure_step.main([str(out), str(made), "--", *TINY]) == 0
    seen, said = json.loads(out.read_text()), capsys.readouterr().out
    assert seen["launches"]["aten::copy_"] > 1 and seen["step_seconds"] > 0
    assert seen["attention"] == ["flash attention of the CPU"]
    assert "measured / predicted" in said and "aten::mm" in said


def test_a_step_that_waits_for_the_device_fails_the_check(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        measure_step, "build", lambda flags: (SimpleNamespace(device=torch.device("cpu")), [])
    )
    seen = {"waits": "called a synchronizing CUDA operation", "attention": [], "launches": {}}
    monkeypatch.setattr(measure_step, "measure", lambda run, batches: {**seen, "table": ""})
    assert measure_step.main([str(tmp_path / "out.json")]) == 1
    assert "waits in a step: called a synchronizing" in capsys.readouterr().out


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
        hog_kernel[(4,)](out, 1000, clock, num_warps=32)
    assert seen.mine == 1
    (ptx,) = tmp_path.rglob("*.ptx")
    assert "globaltimer" in ptx.read_text() and list(tmp_path.rglob("*.cubin"))


def test_two_workers_compile_each_kernel_once(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="this platform has no triton")
    from tests.gpu.alone import compiling
    from tests.gpu.hog import clock, hog_kernel

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    shares = []
    for worker in (0, 1):
        hog_kernel.device_caches.clear()
        with compiling(worker, 2) as seen:
            for dtype in (torch.int64, torch.int32, torch.float32):
                hog_kernel[(1,)](torch.empty(4, dtype=dtype), 1000, clock)
        shares.append((len(seen.keys), seen.mine, len(list(tmp_path.rglob("*.cubin")))))
    assert shares == [(3, 2, 2), (3, 1, 3)]
