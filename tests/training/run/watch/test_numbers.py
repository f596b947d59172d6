# SPDX-License-Identifier: Apache-2.0
"""What a run does with numbers that go wrong: in a weight, in a step, in a checkpoint.

Each test runs the program itself: one process, a few steps of a tiny model.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import pretrain_llama
from tests import sample_ledger, saved
from tests.sampling import sampled
from tools import checkpoint as tool
from training.checkpoint import manifest
from training.checkpoint.files import check_file
from training.run.watch import first_nonfinite, guard

FLAGS = """
    --mock-data --vocab-size 100 --num-layers 1 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1
    --device cpu --num-workers 0
""".split()
NAN = float("nan")


@pytest.fixture
def go(tmp_path: Path, capsys: Any) -> Callable[..., str]:
    """Run with more flags, {tmp} standing for the folder; return what it said."""

    def run(more: str, code: int = 0) -> str:
        log = tmp_path / "log.json"
        log.unlink(missing_ok=True)
        words = more.format(tmp=tmp_path).split()
        capsys.readouterr()
        got = pretrain_llama.main([*FLAGS, "--log-json", str(log), *words])
        said = capsys.readouterr()
        assert got == code, said
        return said.out + said.err

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "log.json").read_text().splitlines()]


def steps(tmp_path: Path, name: str = "saved") -> list[int]:
    return sorted(int(p.name[5:]) for p in (tmp_path / name).glob("step_????????"))


def after_step(
    monkeypatch: pytest.MonkeyPatch, at: set[int], spoil: Callable[[Any], None], once: bool = True
) -> None:
    """Call spoil(run) before the update of these iterations; once: the first time only."""
    inner, done = pretrain_llama.Optimizer.step, set()
    iteration: list[int] = []
    begin = pretrain_llama.train_step

    def train_step(run: Any, *args: Any) -> Any:
        iteration[:] = [run.iteration + 1]
        return begin(run, *args)

    def step(self: Any, *args: Any) -> Any:
        now = iteration[0]
        if now in at and not (once and now in done):
            done.add(now)
            spoil(self)
        return inner(self, *args)

    monkeypatch.setattr(pretrain_llama, "train_step", train_step)
    monkeypatch.setattr(pretrain_llama.Optimizer, "step", step)


def spoil_weight(value: float) -> Callable[[Any], None]:
    """Write a value into the last weight of a bucket, and lose this step's gradient of it."""

    def spoil(optimizer: Any) -> None:
        bucket = optimizer.sink.buckets[0]
        name, param, start = bucket.params[0]
        bucket.param_shard[start + 3] = value
        bucket.grad_shard[start + 3] = 0.0

    return spoil


def spoil_gradient(value: float) -> Callable[[Any], None]:
    def spoil(optimizer: Any) -> None:
        optimizer.sink.buckets[0].grad_shard[0] = value

    return spoil


@pytest.mark.parametrize("behind", sampled([" --async-save", ""], 2))
def test_a_nan_in_a_weight_is_not_saved_and_no_sound_checkpoint_is_removed(
    go: Any, tmp_path: Path, monkeypatch: Any, behind: str
) -> None:
    """Under skip every later step was saved, and the last clean checkpoint removed, exit 0."""
    after_step(monkeypatch, {4}, spoil_weight(NAN))
    more = "--train-iters 30 --save-interval 1 --save {tmp}/saved --keep-last-k 2 --on-nan skip"
    said = go(more + behind, code=1)
    assert steps(tmp_path) == [2, 3]
    assert "the checkpoint of step 4 was not saved" in said
    assert (
        "rank 0: model.norm.weight: 1 of its 32 values are not finite (the first, nan, at" in said
    )
    assert "10th in a row" in said and "a weight" in said
    assert "the first non-finite value is in the weight norm.weight" in said
    assert [row["iteration"] for row in rows(tmp_path)][-1] == 14  # with 9 bad ones after it


def test_the_last_save_is_refused_and_the_run_fails(
    go: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    after_step(monkeypatch, {4}, spoil_weight(float("inf")))
    said = go("--train-iters 4 --save-interval 2 --save {tmp}/saved --on-nan skip", code=1)
    assert steps(tmp_path) == [2]
    assert "step 4 was not saved" in said and "model.norm.weight" in said
    assert "(earlier checkpoints are untouched)" in said and "able to write" not in said


def test_steps_that_are_skipped_age_no_checkpoint_out(
    go: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The weight is finite, and yet every step after it is not."""
    after_step(monkeypatch, {4}, spoil_weight(3e38))
    more = "--train-iters 8 --save-interval 1 --save {tmp}/saved --keep-last-k 2 --on-nan skip"
    go(more)
    until = time.monotonic() + 30  # the end of a run that is in a hurry waits for no removal
    while len(steps(tmp_path)) > 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert steps(tmp_path) == [3, 4, 8]  # 8 ends the run: it is saved, and removes nothing


def nonfinite_checkpoint(folder: Path, step: int) -> str:
    """Write a NaN into a saved tensor as a run of an older version did, sums included."""
    directory = folder / manifest.step_name(step)
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    name = sorted(n for n in tensors if n.endswith("q_proj.weight"))[0]
    tensors[name].view(-1)[5] = NAN
    path.unlink()
    save_file(tensors, path)
    found = manifest.parse((directory / "manifest.json").read_bytes(), "manifest.json")
    import hashlib

    import xxhash

    data = path.read_bytes()
    found["files"][path.name] = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "xxh3_128": xxhash.xxh3_128_hexdigest(data),
    }
    del found["digest"]
    found["digest"] = manifest.self_digest(found)
    (directory / "manifest.json").write_text(json.dumps(found))
    check_file(path, found["files"][path.name], sha256=True)
    return name


def test_a_checkpoint_with_a_nan_is_found_by_verify_and_by_no_resume(
    go: Any, tmp_path: Path, capsys: Any
) -> None:
    more = "--save-interval 1 --save {tmp}/saved --load {tmp}/saved --train-iters "
    go(more + "2")
    name = nonfinite_checkpoint(tmp_path / "saved", 2)
    assert tool.main(["verify", str(tmp_path / "saved")]) == 1
    said = capsys.readouterr().out
    assert f"DAMAGED  rank_00000-000.safetensors: {name}: 1 of its" in said
    said = go(more + "3")
    assert "step_00000002 is skipped" in said and f"{name}: 1 of its 1024 values" in said
    assert "at iteration 1, 4 samples" in said and steps(tmp_path) == [1, 2, 3]
    assert tool.main(["verify", str(tmp_path / "saved")]) == 0


def test_a_nan_in_a_hugging_face_directory_is_refused(go: Any, tmp_path: Path) -> None:
    go("--train-iters 1 --save {tmp}/saved")
    assert tool.main(f"convert --to-hf {tmp_path}/hf --load {tmp_path}/saved".split()) == 0
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["model.norm.weight"][3] = NAN
    save_file(tensors, path, {"format": "pt"})
    said = go("--train-iters 2 --load {tmp}/hf", code=2)
    assert "model.norm.weight: 1 of its 32 values are not finite (the first, nan, at [3])" in said


def test_a_fault_that_does_not_come_back_is_called_transient(
    go: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    after_step(monkeypatch, {3}, spoil_gradient(NAN))
    said = go("--train-iters 5", code=1)
    assert "not finite at iteration 3" in said and "the fault was transient" in said
    after_step(monkeypatch, {3}, spoil_gradient(NAN))
    assert "run again" not in go("--train-iters 5 --rerun-mode disabled", code=1)


@pytest.mark.parametrize(
    "where, more",
    [("forward", ""), ("backward", ""), ("backward", "--fused-linear-cross-entropy")],
)
def test_the_first_tensor_that_is_not_finite_is_named(
    go: Any, tmp_path: Path, monkeypatch: Any, where: str, more: str
) -> None:
    """Sample 9, the second row of micro-batch 0 of iteration 3, breaks one layer.

    The search hooks every module; the loss in chunks, which calls no head, takes no hook for one.
    """
    from model.llama import MLP
    from training.data import loader
    from training.data.batch import make_batch

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            grad = grad.clone()
            grad[2, 1, 3] = NAN
            return grad

    inner = MLP.forward

    def forward(self: Any, x: Any, *args: Any) -> Any:
        out = inner(self, x, *args)
        if batch_of[0] == 8:
            if where == "backward":
                return Wrong.apply(out)
            out = out.clone()
            out[2, 1, 3] = NAN
        return out

    batch_of = [0]
    whole = pretrain_llama.Llama.forward

    def note(self: Any, tokens: Any, *args: Any, **kw: Any) -> Any:
        if not tokens.is_meta:
            batch_of[0] = firsts.get(tuple(tokens.view(-1).tolist()), -1)
        return whole(self, tokens, *args, **kw)

    firsts: dict[tuple[int, ...], int] = {}

    def remember(rows: Any, rules: Any, first: int, counted: Any) -> Any:
        batch = make_batch(rows, rules, first, counted)
        firsts[tuple(batch.tokens.view(-1).tolist())] = first
        return batch

    monkeypatch.setattr(loader, "make_batch", remember)
    monkeypatch.setattr(MLP, "forward", forward)
    monkeypatch.setattr(pretrain_llama.Llama, "forward", note)
    said = go(f"--train-iters 5 {more}", code=1)
    what = "the output of" if where == "forward" else "the gradient of"
    assert f"the first non-finite value is in {what}" in said, said
    assert "layers.0.mlp" in said and "(1 of its 1024 values are not finite" in said
    assert "of micro-batch 0: sample 9, from" in said and "on rank 0" in said


def test_digests_are_of_their_own_step_after_a_rerun(
    go: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A step's values are judged one step later, and its rerun writes over the gradients."""
    found = []
    for rerun in ("disabled", "validate_results"):
        with monkeypatch.context() as patch:
            after_step(patch, {2}, spoil_gradient(NAN))
            more = f"--train-iters 4 --log-digests 1 --on-nan skip --rerun-mode {rerun}"
            said = go(f"{more} --save {{tmp}}/{rerun}")
        assert "skipped" in said and ("in a rerun" in said) == (rerun != "disabled"), said
        (path,) = tmp_path.rglob("digests.jsonl")
        found.append([json.loads(line) for line in path.read_text().splitlines()][1:])
        path.unlink()
    assert found[0] == found[1] and [line["iteration"] for line in found[0]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "samples"), [("output", "sample 18, from"), ("own gradient", "samples 16 to 19, the")]
)
def test_a_row_of_a_weights_gradient_is_no_sample(kind: str, samples: str) -> None:
    """It has as many rows here as the micro-batch: 4."""
    batch = SimpleNamespace(tokens=torch.zeros(4, 8), first_sample=16)
    watch: Any = first_nonfinite._Watch.__new__(first_nonfinite._Watch)
    watch.batches, watch.found, watch._looks = [batch], [], 0
    watch.dataset = SimpleNamespace(describe=lambda sample: f"sample {sample} of a set")
    x = torch.zeros(4, 6)
    x[2, 3] = NAN
    where = {"micro_batch": 0, "stage": 0, "kind": kind}
    activation = {"group": "activation", "name": "head", "of": "Head", "phase": "forward"}
    gradient = {"group": "parameter", "module": "router.weight"}
    watch.keep(x, where | (activation if kind == "output" else gradient))
    ((_, text),) = watch.found
    assert f"of micro-batch 0: {samples}" in text


def test_rewind_passes_over_the_samples_that_break_a_step(
    go: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    more = "--train-iters 9 --save-interval 2 --save {tmp}/"
    go(more + "want --iterations-to-skip 5")
    with monkeypatch.context() as patch:
        after_step(patch, {5}, spoil_gradient(NAN), once=False)
        said = go(more + "saved --on-nan rewind")
    assert "going back from iteration 6 to 4" in said
    assert "iteration 5 is skipped: samples 16 to 19" in said
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9]
    for step in (2, 4, 6, 8, 9):
        here = saved.tensors(tmp_path / "saved", step)
        saved.check_equal(here, saved.tensors(tmp_path / "want", step))
    state = json.loads((tmp_path / "saved" / "step_00000009" / "state.json").read_text())
    assert state["passed_over"] == [5] and state["consumed_samples"] == 36
    words = [*FLAGS, "--train-iters", "9", "--load", f"{tmp_path}/saved"]
    capsys.readouterr()
    assert sample_ledger.main(["--first-step", "4", "--steps", "3", "--", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("skipped") for line in lines] == [False, True, False]
    # a resume passes over the same samples
    said = go("--train-iters 7 --save {tmp}/again --load {tmp}/saved --ckpt-step 4")
    state = json.loads((tmp_path / "again" / "step_00000007" / "state.json").read_text())
    assert state["passed_over"] == []  # 4 was saved before iteration 5 broke
    said = go("--train-iters 10 --save {tmp}/saved --load {tmp}/saved")
    state = json.loads((tmp_path / "saved" / "step_00000010" / "state.json").read_text())
    assert state["passed_over"] == [5]


def test_a_run_that_loads_from_elsewhere_can_go_back_to_what_it_loaded(
    go: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    go("--train-iters 2 --save {tmp}/before")
    after_step(monkeypatch, {3}, spoil_gradient(NAN), once=False)
    said = go("--train-iters 5 --load {tmp}/before --save {tmp}/saved --on-nan rewind")
    assert "going back from iteration 4 to 2" in said and "iteration 3 is skipped" in said
    assert steps(tmp_path) == [2, 5]


@pytest.mark.prove
def test_rewinds_that_do_not_help_end_the_run(go: Any, tmp_path: Path, monkeypatch: Any) -> None:
    after_step(monkeypatch, set(range(4, 30)), spoil_gradient(NAN), once=False)
    said = go("--train-iters 30 --save-interval 3 --save {tmp}/saved --on-nan rewind", code=1)
    assert "going back to iteration 3 3 times did not help" in said
    assert steps(tmp_path) == [0, 3]


def spike(optimizer: Any) -> None:
    for bucket in optimizer.sink.buckets:
        bucket.grad_shard.mul_(1e4)


@pytest.mark.parametrize("how", sampled(["rewind", "report", "stop"], 3))
def test_a_spike_of_the_gradient_norm(go: Any, tmp_path: Path, monkeypatch: Any, how: str) -> None:
    monkeypatch.setattr(guard, "LEAST", 8)
    after_step(monkeypatch, {20}, spike, once=False)
    more = "--train-iters 24 --save-interval 16 --clip-grad 1.0 --save {tmp}/saved --on-spike "
    said = go(more + how, code=how == "stop")
    assert "a spike at iteration 20: loss" in said and "gradient norm" in said
    assert ("going back from iteration 21 to 16" in said) == (how == "rewind")
    if how == "rewind":  # and the step whose update may be to blame
        state = json.loads((tmp_path / "saved" / "step_00000024" / "state.json").read_text())
        assert state["passed_over"] == [19, 20]


@pytest.mark.parametrize("steps", [300, pytest.param(1500, marks=pytest.mark.prove)])
def test_a_run_without_a_spike_has_none(steps: int) -> None:
    """Losses that fall with noise, norms that vary by a factor of 3: no alarm."""
    judge, generator = guard.Spikes(10.0, "cpu"), torch.Generator().manual_seed(1)
    alarms = 0.0
    for i in range(steps):
        noise = torch.randn(2, generator=generator, dtype=torch.float64)
        loss = 2.0 + 8.0 * torch.exp(torch.tensor(-i / 240.0)) + 0.05 * noise[0]
        alarms += float(judge.flag(i, loss, torch.exp(0.35 * noise[1])))
    assert alarms == 0.0
    assert judge.flag(steps + 1, torch.tensor(20.0), torch.tensor(1.0)) == 1.0
    assert judge.describe(steps + 1).startswith("loss 20 (z-score ")
    assert judge.flag(steps + 2, torch.tensor(2.0), torch.tensor(1e6)) == 1.0
    assert judge.flag(steps + 3, torch.tensor(NAN), torch.tensor(NAN)) == 0.0


def test_a_spike_is_judged_in_deterministic_mode_on_a_gpu(monkeypatch: Any) -> None:
    """torch.nanmedian raises there, as its shape function does (torch/_meta_registrations.py)."""
    x = torch.randn(40, 2, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[x > 0.8] = NAN
    x[3], x[4, 0], x[5, :, 3:] = NAN, NAN, NAN
    for rows in x:
        want = rows.nanmedian(dim=1, keepdim=True).values
        assert torch.equal(guard.nanmedian(rows).nan_to_num(), want.nan_to_num())
        assert torch.equal(guard.nanmedian(rows).isnan(), want.isnan())
    torch.use_deterministic_algorithms(True)
    try:
        with FakeTensorMode():
            rows = torch.empty(2, 9, device="cuda", dtype=torch.float64)
            with pytest.raises(RuntimeError, match="median CUDA with indices output does not have"):
                rows.nanmedian(dim=1)
    finally:
        torch.use_deterministic_algorithms(False)

    def refuse(*args: Any, **more: Any) -> None:
        raise RuntimeError("median CUDA with indices output")

    monkeypatch.setattr(torch.Tensor, "nanmedian", refuse)
    judge = guard.Spikes(10.0, "cpu")
    assert judge.flag(1, torch.tensor(2.0), torch.tensor(1.0)) == 0.0


@pytest.mark.parametrize("flag", ["--on-nan", "--on-spike", "--on-replica-mismatch"])
def test_rewind_needs_a_place_to_go_back_to(go: Any, flag: str) -> None:
    said = go(f"--train-iters 2 --check-replicas 1 {flag} rewind", code=2)
    assert f"{flag} rewind needs --save" in said
