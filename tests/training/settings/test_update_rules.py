# SPDX-License-Identifier: Apache-2.0
"""Two optimizers that a user adds: in each rank they are registered in RULES, nothing else.

momentum (tests/training/momentum.py) works on slices; normalised (full_matrices.py) needs whole
matrices and leaves the others to AdamW. Both train, save, load on another layout, are offloaded to
the host and counted by the dry run.
"""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pretrain_llama
from forecast.dry_run import report
from forecast.recording import HOST, record
from mpu.grid import Grid
from mpu.optim.interface import Group, Parts
from mpu.optim.muon import Muon
from mpu.optim.optimizer import Optimizer
from mpu.param import GROUPS, name_groups
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from mpu.zero.replica_check import ReplicaCheck
from tests.forecast.recorded import recorded, state
from tests.model.twin import (
    Twin,
    config_of,
    gathered,
    grid_of,
    micro_batches,
    run_layout,
    same_bits,
)
from tests.sampling import sampled
from tests.training.checkpoint import canonical
from tests.training.full_matrices import Normalised
from tests.training.momentum import Momentum
from tests.training.small_llama import read
from training.checkpoint import MismatchError
from training.faults.monitor import FailureMonitor
from training.settings import update_rules

NEW = {"momentum": lambda config: Momentum(0.9), "normalised": lambda config: Normalised(0.9)}
# muon goes where normalised goes
ALL = sampled(["muon", "momentum", "normalised"], 3)
BASE = dict(tp=1, sp=False, recompute=None, tied=False, m=2, rows=12, lr=1e-2, clip=0.5, dp=2)


@contextmanager
def registered():
    """All that adding them edits of the product: a line of RULES each."""
    before = dict(update_rules.RULES)
    update_rules.RULES.update(NEW)
    try:
        yield
    finally:
        update_rules.RULES.clear()
        update_rules.RULES.update(before)


@pytest.fixture(autouse=True)
def _registered():
    with registered():
        yield


def train(comm, case: dict, steps: int) -> dict:
    with registered():
        return run_layout(comm, case, steps)


WAYS = [
    dict(zero=0, bucket=500),
    dict(zero=1, bucket=500, gather=True),
    dict(zero=2, bucket=3000),
    dict(zero=3, gather=True),
    dict(zero=1, bucket=500, offload=True),
    dict(zero=2, bucket=3000, states=True),
    dict(zero=3, gather=True, states=True),
]


@pytest.mark.parametrize("name", ALL)
def test_levels_and_offload_change_no_bit(world, name):
    case = BASE | dict(optimizer=name, dtype="bfloat16")
    first, *others = [world(2).run(train, case | way, 4) for way in WAYS]
    assert len(set(first[0]["losses"])) == 4, "nothing was trained"
    for way, other in zip(WAYS[1:], others, strict=True):
        for mine, theirs in zip(first, other, strict=True):
            assert mine["losses"] == theirs["losses"], way
            assert same_bits(mine["weights"], theirs["weights"]), way


def test_momentum_equals_the_serial_twin(world):
    """torch.optim.SGD in plain autograd; fp64, clipped, with ZeRO 3, tp and pp."""
    twin = Twin(tied=False, rows=12)
    losses, norms = twin.train(3, lr=1e-2, clip=0.5, make=partial(torch.optim.SGD, momentum=0.9))
    case = BASE | dict(optimizer="momentum", dtype="float64")
    ways = [WAYS[3], dict(tp=2, sp=True, dp=1), dict(pp=2, dp=1, schedule="1f1b")]
    for way in ways:
        for result in world(2).run(train, case | way, 3):
            assert result["losses"] == pytest.approx(losses, rel=1e-11), way
            assert result["norms"] == pytest.approx(norms, rel=1e-11), way


def run_of(comm, case: dict):
    config = config_of(case)
    grid = grid_of(comm, config)
    return pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())


def three_steps(comm, case: dict) -> list[dict]:
    """Return the summed gradients of each step and the weights before it, and the last ones."""
    found = []
    with registered():
        run = run_of(comm, case)
        for step in range(3):
            run.sink.wait_for_weights()
            before = gathered(run.sink.buckets, "param_shard")
            found.append({n: [w.clone().numpy()] for n, w in before.items()})
            pretrain_llama.train_step(run, micro_batches(case, run.grid.dp.rank, step), 1e-2)
            for name, grad in gathered(run.sink.buckets, "grad_shard").items():
                found[-1][name].append(grad.clone().numpy())
        last = gathered(run.sink.buckets, "param_shard")
        rules = [type(u).__name__ for some in run.optimizer.updaters for u in some]
        (plan,) = run.optimizer.plans.values()
        seen = [matrix.name for matrix in plan.matrices]
    return [*found, {n: [w.numpy()] for n, w in last.items()}, seen, sorted(rules)]


def test_whole_matrices_equal_a_serial_update(world):
    """On a rank's own gradients, matrix by matrix; the embedding, the head and norms are AdamW's.

    Every matrix is updated once a step, at each ZeRO stage, though most are cut between two ranks.
    """
    case = BASE | dict(optimizer="normalised", dtype="float64", clip=0.0)
    for zero in range(4):
        for *steps, last, seen, rules in world(2).run(three_steps, case | dict(zero=zero)):
            assert rules == ["NormalisedUpdater", "TorchAdam"]
            matrices = sorted(n for n, (w, _) in steps[0].items() if w.ndim > 1 and "layers" in n)
            assert {n.partition("[")[0] for n in seen} == {*matrices} and len(seen) == 7 * 3
            sections = {"qkv": (48, 24, 24), "gate_up": (20, 20)}
            for name, (weight, _) in steps[0].items():
                w, buffer = torch.from_numpy(weight).clone().requires_grad_(), 0.0
                decay = 0.1 if w.dim() > 1 else 0.0
                adam = torch.optim.AdamW([w], lr=1e-2, weight_decay=decay)
                for step in steps:
                    w.grad = torch.from_numpy(step[name][1])
                    if name not in matrices:
                        adam.step()
                        continue
                    buffer = 0.9 * buffer + w.grad
                    w.data.mul_(1 - 1e-2 * decay)
                    cut = sections.get(name.split(".")[-2], (len(w),))
                    norms = [torch.linalg.matrix_norm(part) for part in buffer.split(cut)]
                    parts = zip(w.data.split(cut), buffer.split(cut), norms, strict=True)
                    for part, moved, norm in parts:
                        part.sub_(1e-2 * moved / norm)
                got = torch.from_numpy(last[name][0])
                assert (got - w).norm() <= 1e-9 * w.norm(), (zero, name)
                assert not torch.equal(got, torch.from_numpy(weight)), name


LAYOUTS = [  # where it is saved, where it goes on
    (dict(tp=1, dp=2, zero=1, states=True), dict(tp=1, dp=2, zero=3, bucket=500)),
    (dict(tp=1, dp=2, zero=3), dict(tp=1, dp=2, zero=0, states=True)),
]
SAVED = dict(model=24, pp=1, sp=False, tied=True, dtype="bfloat16")


def whole_grid(comm, case: dict):
    """Return a grid for any optimizer."""
    return comm.grid(case["tp"], needs_full_matrices=True)


def save_and_go_on(comm, name: str, saved: dict, loaded: dict, root: str, other: str) -> list:
    """Train, save, go on in another layout and save there what was loaded; also go on in place."""
    with registered():
        case = SAVED | dict(optimizer=name)
        first = canonical.build(whole_grid(comm, saved), case | saved)
        canonical.train(first, range(3))
        canonical.saver_of(first, root).save(3, 3 * 24, must=True)
        second = canonical.build(whole_grid(comm, loaded), case | loaded, seed=6)
        assert canonical.saver_of(second, root).resume.load() == (3, 3 * 24)
        assert second.optimizer.steps == 3
        canonical.saver_of(second, other).save(3, 3 * 24, must=True)
        losses = [canonical.train(run, range(3, 6)) for run in (first, second)]
        adam = canonical.build(comm.grid(saved["tp"]), SAVED | saved)
        with pytest.raises(
            MismatchError, match=r"lacks optimizer state \(.*\.exp_avg\): give --fi"
        ):
            canonical.saver_of(adam, root).resume.load()
    return losses


def tensors_of(root: Path) -> dict[str, torch.Tensor]:
    (step,) = root.glob("step_*")
    index, files = json.loads((step / "index.json").read_text()), {}
    for path in step.glob("*.safetensors"):
        files[path.name] = load_file(path)
    found = {}
    for name, entry in index.items():
        whole = torch.zeros(entry["shape"], dtype=torch.float64)
        for file, key, starts, sizes in entry["parts"]:
            at = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            whole[at] = files[file][key].double()
        found[name] = whole
    return found


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("saved, loaded", sampled(LAYOUTS, 2))
def test_saves_resumes_and_reshards(world, tmp_path, name, saved, loaded):
    here, there = tmp_path / "here", tmp_path / "there"
    args = name, saved, loaded, str(here), str(there)
    for stayed, moved in world(2).run(save_and_go_on, *args):
        assert stayed == moved and len(set(stayed)) == 3
    mine, theirs = tensors_of(here), tensors_of(there)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    kinds = {key.rpartition(".")[2] for key in mine} - {"weight"}
    if name == "momentum":
        assert kinds == {"master", "momentum_buffer"}
        assert all(mine[key].any() for key in mine)
        return
    assert kinds == {"master", "momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert "model.norm.weight.exp_avg" in mine
    assert "model.layers.0.self_attn.q_proj.weight.momentum_buffer" in mine
    assert "model.layers.0.self_attn.q_proj.weight.exp_avg" not in mine


def kept(comm, case: dict) -> tuple[dict, dict]:
    """Return what a rank keeps, and what the dry run states for that rank."""
    with registered():
        run = run_of(comm, case)
        pretrain_llama.train_step(run, micro_batches(case, run.grid.dp.rank), 1e-2)
        return run.optimizer.memory(), state(recorded(run.config, run.grid))


@pytest.mark.parametrize("name", ALL)
def test_the_dry_run_counts_its_bytes(world, name):
    case = BASE | dict(optimizer=name, zero=1, dtype="bfloat16")
    for found, said in world(2).run(kept, case):
        assert found == said


def test_the_report_names_it():
    for name, words in (("momentum", "SGD's one"), ("muon", "Muon's one, AdamW's two")):
        config = read("--zero-stage 1 --bf16", 4)
        config = replace(config, optimizer=replace(config.optimizer, optimizer=name))
        (line,) = re.findall(r"^ *moments .*", report(config, pretrain_llama), re.MULTILINE)
        assert f"  {words}, a share of 1/4" in line


def test_the_host_keeps_its_bytes():
    config = read("--zero-stage 1 --bf16 --optimizer-cpu-offload", 4)
    own = 29 * 1024  # elements of 116 blocks, over 4 ranks
    for name, count in (("adam", 2), ("momentum", 1)):
        each = replace(config, optimizer=replace(config.optimizer, optimizer=name))
        # gradient, master, state, and the weights to be copied up
        found = record(each, pretrain_llama)[0].start[HOST]
        assert 0 <= found - own * (2 * 4 + count * 4 + 2) < 64  # and the factor that clips


def flipped(comm, case: dict) -> list[str]:
    with registered():
        run = run_of(comm, case)
        pretrain_llama.train_step(run, micro_batches(case, run.grid.dp.rank), 1e-2)
        check = ReplicaCheck(run.grid, run.optimizer)
        assert check.run() == []
        if run.grid.rank == 1:
            state = {(n, kind): values for n, kind, _, values in run.optimizer.named_state()}
            state[case["where"], "momentum_buffer"][3] += 1.0
        return [difference.what for difference in check.run()]


@pytest.mark.parametrize(
    "name, where, states",
    [("momentum", "norm.weight", True), ("muon", "layers.1.attention.qkv.weight", False)],
)
def test_replicas_of_its_state_are_compared(world, name, where, states):
    """On the device, or in host memory between steps."""
    case = BASE | dict(optimizer=name, zero=0, dtype="float32", where=where, states=states)
    assert world(2).run(flipped, case) == [[f"{where} (momentum_buffer)"]] * 2


def test_a_skipped_step_changes_nothing():
    """The base class skips for the rule, and counts no step."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), torch.nan)
    groups = [{"name": "matrix", "params": [weight], "weight_decay": 0.1, "decoupled": False}]
    updater = Momentum().updater(Parts(groups))
    updater.groups[0]["lr"] = 0.5
    updater.step(torch.tensor(1.0), torch.tensor(1.0))
    assert weight.tolist() == [1.0] * 3 and updater.steps == 0
    assert not updater.state(weight)["momentum_buffer"].any()
    weight.grad = torch.full((3,), 2.0)
    updater.step(torch.tensor(0.5), torch.tensor(0.0))
    assert weight.tolist() == pytest.approx([1.0 - 0.5 * 1.1] * 3) and updater.steps == 1


def test_a_group_is_named():
    """Or said by two booleans, as older model files do; anything else is one sentence."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 2)})
    params = dict(module.named_parameters())
    for decay, decoupled, names in (
        (True, False, ["matrix", "vector_decay"]),
        (False, False, ["matrix_no_decay", "vector"]),
        (True, True, ["embedding", "embedding"]),
        (False, True, ["embedding_no_decay", "embedding_no_decay"]),
    ):
        name_groups(module, lambda n, p, pair=(decay, decoupled): pair)
        assert [params["a.weight"].group, params["a.bias"].group] == names
        config = read("--weight-decay 0.25")
        for name in names:
            group = update_rules.optimizer_groups(config)[name]
            assert (group.weight_decay, group.decoupled) == (0.25 * decay, decoupled)
    name_groups(module, lambda n, p: "vector_decay")
    assert {p.group for p in params.values()} == {"vector_decay"}
    for wrong in ("decay", None, (True,), (1, 0)):
        with pytest.raises(ValueError) as mistake:
            name_groups(module, lambda n, p, wrong=wrong: wrong)
        assert f"returns {wrong!r} for a.weight: it must name one of matrix, " in str(mistake.value)
    assert set(GROUPS) == set(update_rules.optimizer_groups(config))


def test_a_vector_among_whole_matrices_is_refused():
    sink = ParamAndGradBuffer(Grid())
    module = torch.nn.Linear(2, 3)
    name_groups(module, lambda n, p: "matrix")
    sink.attach(module)
    for rule in (Normalised(), Muon()):
        with pytest.raises(
            ValueError, match=r"'matrix' for bias, of shape \[3\], which is not a m"
        ):
            Optimizer(module, sink, Grid(), {"matrix": Group(rule)})
