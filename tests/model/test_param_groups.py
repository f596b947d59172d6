# SPDX-License-Identifier: Apache-2.0
"""--param-group on any layout: the weights of torch.optim.AdamW with a group for each parameter.

The twin is plain torch on full fp64 tensors (tests/model/twin.py), and its names are those of a
checkpoint. What a pattern names is written out beside it, so nothing here asks fnmatch.
"""

import random
import re

import numpy as np
import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from tests.forecast.recorded import recorded, state
from tests.model import test_frozen
from tests.model.moe_twin import ExpertTwin
from tests.model.test_moe_parity import SAMPLE, size_of
from tests.model.twin import (
    Twin,
    batch_of,
    config_of,
    grid_of,
    micro_batches,
    run_cases,
    run_layout,
)
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor
from training.settings.update_rules import optimizer_groups

STEPS = 3
FILE = "model/llama.py"
NAMED = {  # patterns of one flag, and a regular expression of the checkpoint's names that they fit
    "embedding.*": r"embed_tokens",
    "model.embed_tokens.weight": r"embed_tokens",
    "layers.0.*": r"layers\.0\.",
    "model.layers.[02].*": r"layers\.[02]\.",
    "*norm*": r"norm",
    "*attention.qkv.weight": r"[qkv]_proj",
    "*.q_proj.* *.[kv]_proj.*": r"[qkv]_proj",
    "*.mlp.down.weight *.o_proj.weight": r"down_proj|o_proj",
    "*.gate_proj.weight *.up_proj.weight": r"gate_proj|up_proj",
    "*": r"",
    "norm.weight": r"^model\.norm",
}
ENDS = {"head.*": r"lm_head", "lm_head.weight embedding.weight": r"lm_head|embed_tokens"}  # untied
FROZEN = [*NAMED][:6]


def words(rng: random.Random, tied: bool) -> list[tuple[str, str]]:
    """Draw flags: (patterns, properties) of each, of which all have an effect."""
    names = [*NAMED, *([] if tied else ENDS)]
    drawn = [(rng.choice(names), f"lr-mult={rng.choice([0, 0.1, 0.5, 3])}")]
    drawn += [("*", "wd-mult=2.5")] * (rng.random() < 0.5)
    drawn += [(rng.choice(names), f"lr-mult={rng.choice([0.25, 2])} wd-mult=0")]
    drawn += [(rng.choice(FROZEN), "frozen")] * (rng.random() < 0.6)
    if drawn[-1][1] == "frozen" and rng.random() < 0.5:
        drawn += [("layers.0.*", "trained")]
    return drawn


def meant(flags: list[tuple[str, str]], name: str) -> tuple[bool, float, float]:
    """Return whether a parameter trains, and its factors of learning rate and weight decay."""
    trains, lr, wd = True, 1.0, 1.0
    for patterns, properties in flags:
        if not re.search((NAMED | ENDS)[patterns], name):
            continue
        for word in properties.split():
            key, _, value = word.partition("=")
            trains = key == "trained" if key in ("frozen", "trained") else trains
            lr = float(value) if key == "lr-mult" else lr
            wd = float(value) if key == "wd-mult" else wd
    return trains, lr, wd


def train(twin: Twin, case: dict, flags: list[tuple[str, str]], steps: int = STEPS) -> tuple:
    """Train a twin by torch's AdamW; return its losses and norms. clip, lr: the case's."""
    groups = []
    for name, w in twin.w.items():
        trains, lr, wd = meant(flags, name)
        w.requires_grad_(trains)
        decay = 0.1 * wd if w.dim() > 1 else 0.0
        groups += [{"params": [w], "lr": case["lr"] * lr, "weight_decay": decay}] * trains
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    trained = [w for group in groups for w in group["params"]]
    losses, norms = [], []
    for step in range(steps):
        adam.zero_grad()
        loss = twin.loss(batch_of(case, step))
        loss.backward()
        limit = case["clip"] or torch.inf
        norms.append(torch.nn.utils.clip_grad_norm_(trained, limit).item())
        adam.step()
        losses.append(loss.item())
    return losses, norms


def accepted(case: dict) -> bool:
    """Return whether every flag of a case has an effect."""
    try:
        pretrain_llama.assigned(config_of(case))
    except ValueError as error:
        assert "no effect" in str(error) or "nothing would train" in str(error), error
        return False
    return True


def drawn(seed: int, size: int) -> dict:
    """Draw flags and a layout of so many ranks."""
    case = test_frozen.drawn(seed, size) | dict(file=FILE)
    case |= dict(extra=(), states=seed % 5 == 0, offload=seed % 7 == 3)
    rng = random.Random(seed + 1000)
    while True:
        case["flags"] = words(rng, case["tied"])
        case["groups"] = tuple(" ".join(flag) for flag in case["flags"])
        if accepted(case):
            return case


def hold(results: list[dict], case: dict) -> None:
    """Hold what every rank reports of a case against the twin."""
    twin = Twin(case["tied"], case["layers"], case["rows"])
    first = {name: w.detach().clone() for name, w in twin.w.items()}
    losses, norms = train(twin, case, case["flags"])
    covered = set()
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["norms"] == pytest.approx(norms, rel=1e-10)
        for name, dim, start, local in result["held"]:
            w, was = twin.w[name].detach(), first[name].narrow(dim, start, local.shape[dim])
            covered.add(name)
            if not twin.w[name].requires_grad:
                assert np.array_equal(local, was.numpy()), f"{name} is frozen, and it moved"
                continue
            now = w.narrow(dim, start, local.shape[dim]).numpy()
            assert np.abs(local - now).max(initial=0) <= 1e-10 * w.abs().max(), name
            if meant(case["flags"], name)[1] == 0:
                assert np.array_equal(local, was.numpy()), f"{name} has no learning rate"
    assert covered == twin.w.keys()


def compare(world, size: int, seeds: list[int]) -> None:
    cases = [drawn(seed, size) for seed in seeds]
    for i, rank in enumerate(zip(*world(size).run(run_cases, cases, STEPS), strict=True)):
        try:
            hold([*rank], cases[i])
        except AssertionError as error:
            raise AssertionError(f"{cases[i]}: {error}") from error


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(8))
def test_any_groups_on_one_rank(seed):
    case = drawn(seed, 1)
    hold([run_layout(test_frozen._One(), case, STEPS)], case)


@pytest.mark.parametrize("first", sampled(range(200, 224, 3), 8))
def test_any_groups_on_two_ranks(world, first):
    compare(world, 2, [*range(first, first + 3)])


@pytest.mark.prove
@pytest.mark.parametrize("first", range(300, 318, 3))
def test_any_groups_on_four_ranks(world, first):
    compare(world, 4, [*range(first, first + 3)])


MOE = [  # flags, with the regular expressions of the names that they fit
    ("*.experts.* frozen", r"\.experts\.", "frozen"),
    ("*.router.weight lr-mult=0.1 wd-mult=3", r"\.mlp\.gate\.", "lr-mult=0.1 wd-mult=3"),
    ("*experts.down* *norm* lr-mult=4", r"experts\.(\d+\.)?down_proj|norm", "lr-mult=4"),
    ("layers.*.mlp.* lr-mult=0.5 wd-mult=0", r"layers\.\d+\.mlp\.", "lr-mult=0.5 wd-mult=0"),
]


PAIRS = [(i, i % len(MOE)) for i in range(len(SAMPLE))]


@pytest.mark.parametrize("i, which", sampled(PAIRS, len(PAIRS)))
def test_experts_and_routers(world, i, which):
    """Also where ep and tp cut the experts, whose names have their numbers."""
    text, fits, properties = MOE[which]
    case = SAMPLE[i] | dict(groups=(text,), held=True, lr=1e-2, clip=0.5)
    twin = ExpertTwin(
        case["moe"], case["rows"] // (case["dp"] * case["m"]), case["tied"], case["layers"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NAMED, text, fits)
        losses, norms = train(twin, case, [(text, properties)])
    for (result,) in world(size_of(case)).run(run_cases, [case], STEPS):
        assert result["losses"] == pytest.approx(losses, rel=1e-9)
        assert result["norms"] == pytest.approx(norms, rel=1e-9)
        for name, dim, start, local in result["held"]:
            now = twin.w[name].detach().narrow(dim, start, local.shape[dim]).numpy()
            assert np.abs(local - now).max(initial=0) <= 1e-8, name


def stepped(case: dict, lr: float, decoupled: float | None = None) -> dict[str, torch.Tensor]:
    """Return the weights after one step on one rank."""
    config = config_of(case)
    run = pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())
    pretrain_llama.train_step(run, micro_batches(case, 0), lr, decoupled)
    return {n: p.detach().clone() for n, p in run.model.named_parameters()}


ONE = dict(tp=1, dp=1, m=1, sp=False, recompute=None, tied=False, clip=0.0, rows=4)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_factors_of_a_step(optimizer):
    """Of every optimizer, of a decoupled learning rate too: a step is linear in both factors."""
    case = ONE | dict(optimizer=optimizer)
    first, plain = stepped(case, 0.0), stepped(case, 1e-2, 3e-2)
    text = ("* lr-mult=0.5 wd-mult=3", "*norm* wd-mult=0")
    scaled = stepped(case | dict(groups=text), 1e-2, 3e-2)
    for name, w in first.items():
        lr = 3e-2 if name in ("embedding.weight", "head.weight") else 1e-2
        decay = 0.1 if w.dim() > 1 else 0.0
        update = plain[name] - w * (1 - lr * decay)
        wanted = w * (1 - 0.5 * lr * 3 * decay) + 0.5 * update
        assert torch.allclose(scaled[name], wanted, rtol=1e-12, atol=1e-14), name
        assert not torch.equal(wanted, plain[name])


def test_flags_say_more_than_a_fork():
    """Where a model's file freezes all, one flag lets a part train, and another freezes of that."""
    case = ONE | dict(file=test_frozen.FILE, extra=(("frozen", ""),))
    case |= dict(groups=("*norm* head.* trained", "layers.1.* frozen", "head.* lr-mult=0.5"))
    first, last = stepped(case, 0.0), stepped(case, 1e-2)
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    norms = {f"layers.{i}.{kind}_norm.weight" for i in (0, 2) for kind in ("attention", "mlp")}
    assert moved == {"head.weight", "norm.weight"} | norms


def test_mup_divides_and_a_group_multiplies():
    """muP's divisor of a matrix stays, also that of eps."""
    config = config_of(ONE | dict(groups=("* lr-mult=0.5 wd-mult=2", "norm* lr-mult=3")))
    groups = optimizer_groups(config, {"matrix": 4.0})
    found = {
        (name.partition(" ")[0], g.lr_mult, g.weight_decay): g.divisor for name, g in groups.items()
    }
    assert found["matrix", 0.5, 0.2] == found["matrix", 3.0, 0.1] == 4.0
    assert found["embedding", 0.5, 0.2] == found["vector", 3.0, 0.0] == 1.0
    assert len(groups) == 6 * 3 * 2


BITS = ("*norm* lr-mult=0.5", "layers.0.* head.* lr-mult=3 wd-mult=0", "layers.1.* frozen")


@pytest.mark.prove
def test_levels_change_no_bit(world):
    """Though a level cuts groups elsewhere, with either offload of the optimizer's state, too."""
    base = dict(tp=1, sp=False, recompute=None, tied=False, m=3, rows=12, lr=1e-2, clip=0.1, dp=2)
    base |= dict(dtype="bfloat16", groups=BITS)
    ways = [base | way for way in (*test_frozen.WAYS, dict(zero=1, states=True))]
    ways += [base | dict(zero=z, offload=True) for z in (0, 2)]
    for rank in world(2).run(run_cases, ways, 2):
        for way, got in zip(ways, rank, strict=True):
            assert got["losses"] == rank[0]["losses"], way
            assert test_frozen.same_bits(rank[0]["weights"], got["weights"]), way


def test_a_group_of_factor_one_changes_no_bit():
    """Segments of groups are other pieces of a bucket, and each number is updated alike."""
    case = ONE | dict(dtype="float32")
    plain, grouped = (
        stepped(case | dict(groups=groups), 1e-2)
        for groups in ((), ("*norm* lr-mult=1 wd-mult=0", "*.0.* wd-mult=1", "*.2.* lr-mult=1"))
    )
    assert all(torch.equal(plain[name], grouped[name]) for name in plain)


def kept(comm, case: dict) -> tuple[dict, dict]:
    """Return what a rank keeps, and what the dry run states for it."""
    config = config_of(case)
    grid = grid_of(comm, config)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank), 1e-2)
    return run.optimizer.memory(), state(recorded(config, grid))


def test_the_dry_run_knows_which_layers_a_fork_freezes(world):
    """Layers of a model differ where some of them are frozen alone."""
    case = ONE | dict(rows=8, layers=4, groups=(), dtype="bfloat16", m=2, dp=2, zero=1)
    subset = test_frozen.SUBSETS["every second layer trains"]
    case |= dict(file=test_frozen.FILE, extra=(("frozen", subset),))
    for found, said in world(2).run(kept, case):
        assert found == said
