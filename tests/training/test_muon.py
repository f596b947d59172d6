# SPDX-License-Identifier: Apache-2.0
"""Muon is the same update on every layout: held to a serial twin, and to torch.optim.Muon.

Gradients are drawn by tensor name, so every layout is given the same ones. A rank reports its
rectangles of weights and momentum under the names that a checkpoint has; they are put together and
held against a twin that knows nothing of Weft.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import pretrain_llama
from model.load import load_model_file
from mpu.comm.collectives import all_gather
from mpu.grid import Grid
from mpu.optim import owners
from mpu.optim.muon import MuonUpdater
from mpu.optim.newton_schulz import SETS, coefficients_of, orthogonalise
from mpu.param import Piece, draw_normal, placement_of, unique_parameters
from tests.model.twin import config_of, grid_of
from training.faults.monitor import FailureMonitor

LR, DECAY, STEPS = 1e-2, 0.1, 3
BASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=False, m=1, rows=12, lr=LR, layers=2)
BASE |= dict(optimizer="muon", dtype="float64", bucket=900)
EMBEDDING = ("model.embed_tokens.weight", "lm_head.weight")


def build(comm, case: dict) -> pretrain_llama.LlamaRun:
    config = config_of(case)
    grid = Grid() if comm is None else grid_of(comm, config)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    if case.get("offload"):  # on a CPU pretrain_llama.py leaves it out, as there is nothing to gain
        groups = pretrain_llama.optimizer_groups(config)
        run.optimizer = pretrain_llama.Optimizer(
            run.model, run.sink, grid, groups, clip=0.0, cpu_offload=True
        )
    return run


def pieces(run: pretrain_llama.LlamaRun) -> Iterator[tuple[str, torch.nn.Parameter, Piece]]:
    """Yield (parameter, its tensor, rectangle) of what a rank has, under names of a checkpoint."""
    names = load_model_file(run.config.model.model_file).hf_names(run.model)
    for name, param in unique_parameters(run.model):
        for piece in placement_of(param).pieces(names[name]):
            yield name, param, piece


def give_gradients(run: pretrain_llama.LlamaRun, seed: int) -> None:
    """Put into every bucket the gradients that `gradient` draws by name."""
    names = load_model_file(run.config.model.model_file).hf_names(run.model)
    for bucket in run.sink.buckets:
        flat = torch.zeros(bucket.length, dtype=run.sink.dtype)
        for name, param, start in bucket.params:
            drawn = torch.nn.Parameter(torch.empty(param.shape, dtype=run.sink.dtype))
            drawn.placement = placement_of(param)
            draw_normal(drawn, names[name], 1.0, seed)
            flat[start : start + param.numel()] = drawn.detach().view(-1)
        bucket.grad_shard.copy_(flat[bucket.low : bucket.high])


def gradient(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    draw_normal(drawn, [name], 1.0, seed)
    return drawn.detach()


def weights_of(run: pretrain_llama.LlamaRun) -> dict[str, list]:
    """Return the rectangles of this rank's masters, gathered over the ranks that share them."""
    whole = {}
    for bucket, master in zip(run.sink.buckets, run.optimizer.masters, strict=True):
        flat = master if bucket.shard is None else all_gather(master, bucket.shard)[0]
        for name, param, start in bucket.params:
            whole[name] = flat[start : start + param.numel()].view(param.shape)
    found: dict[str, list] = {}
    for name, _, piece in pieces(run):
        local = whole[name].narrow(piece.dim, piece.local, piece.size).detach().clone()
        found.setdefault(piece.name, []).append(
            (piece.shape, piece.dim, piece.start, local.numpy())
        )
    return found


@contextmanager
def shifted(by: int) -> Iterator[None]:
    """Let matrices have other owners than the plan's rule says."""
    rule = owners._owners

    def other(plan: owners.Plan) -> list[int]:
        pairs = zip(rule(plan), plan.cuts, strict=True)
        return [(owner + by) % len(plan.members[cut]) for owner, cut in pairs]

    owners._owners = other
    try:
        yield
    finally:
        owners._owners = rule


def updated(comm, case: dict, steps: int = STEPS) -> tuple[dict, dict, list[str]]:
    """Make steps on drawn gradients; return weights before, after, and what this rank owned."""
    with shifted(case.get("shift", 0)):
        run = build(comm, case)
    before = weights_of(run)
    for step in range(steps):
        give_gradients(run, step)
        run.optimizer.step(LR)
    owned = [
        run.optimizer.plans[updater.rule].matrices[number].name
        for some in run.optimizer.updaters
        for updater in some
        if isinstance(updater, MuonUpdater)
        for turn in updater.turns
        for number in turn.owned
    ]
    return before, weights_of(run), owned


def together(parts: list[dict[str, list]]) -> dict[str, torch.Tensor]:
    """Put the ranks' rectangles together. Those of two ranks must agree where they overlap."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, rectangles in part.items():
            for shape, dim, start, values in rectangles:
                local = torch.from_numpy(values)
                if name not in found:
                    found[name] = torch.full(shape, math.nan, dtype=local.dtype)
                into = found[name].narrow(dim, start, local.shape[dim])
                assert into.isnan().all() or torch.equal(into, local), f"replicas of {name} differ"
                into.copy_(local)
    assert all(not values.isnan().any() for values in found.values())
    return found


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name not in EMBEDDING


def newton_schulz(g: torch.Tensor, triples: list) -> torch.Tensor:
    """The definition, in the dtype of g, written down once more."""
    x = g / g.norm()
    x = x.t() if g.shape[0] > g.shape[1] else x
    for a, b, c in triples:
        y = x @ x.t()
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.t() if g.shape[0] > g.shape[1] else x


def twin(
    weights: dict[str, torch.Tensor], steps: int, nesterov: bool = False, momentum: float = 0.9,
    joined: tuple[tuple[str, ...], ...] = (),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update whole tensors serially. joined: endings of the names that are one matrix together."""
    w = {name: values.clone().requires_grad_() for name, values in weights.items()}
    rest = [n for n in w if not is_matrix(n, w[n].shape)]
    decays = [{"params": [w[n]], "weight_decay": DECAY * (w[n].dim() > 1)} for n in rest]
    adam = torch.optim.AdamW(decays, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    buffers = {n: torch.zeros_like(v) for n, v in w.items()}
    for step in range(steps):
        for name, values in w.items():
            values.grad = gradient(name, tuple(values.shape), step, values.dtype)
        adam.step()
        done = set(rest)
        for name in w:
            if name in done:
                continue
            own = [name]
            for endings in joined:
                if name.endswith(endings):
                    base = next(name[: -len(e)] for e in endings if name.endswith(e))
                    own = [base + e for e in endings]
            done.update(own)
            for each in own:
                buffers[each].mul_(momentum).add_(w[each].grad, alpha=1 - momentum)
            moved = torch.cat([
                (1 - momentum) * w[n].grad + momentum * buffers[n] if nesterov else buffers[n]
                for n in own
            ])  # fmt: skip
            update = newton_schulz(moved, SETS["quintic"]) * math.sqrt(max(moved.shape))
            for each, part in zip(own, update.split([len(w[n]) for n in own]), strict=True):
                w[each].data.mul_(1 - LR * DECAY).sub_(LR * part)
    return {name: values.detach() for name, values in w.items()}


JOINED = {
    "muon_no_split_qkv": tuple(f"self_attn.{n}_proj.weight" for n in "qkv"),
    "muon_no_split_gate_up": tuple(f"mlp.{n}_proj.weight" for n in ("gate", "up")),
}
MOE = dict(file="model/moe.py", ep=2, moe=dict(num_experts=4), dispatch="alltoall")
SHORT = [  # in `make test`: tp and ZeRO, cp, pp with tied ends, experts
    (4, dict(tp=2, dp=2, zero=1, tied=True)),
    (4, dict(cp=2, pp=2, zero=0, tied=True)),
    (4, dict(tp=1, dp=4, zero=3, instances=2)),
    (4, dict(tp=2, sp=True, dp=2, zero=2, **MOE)),
    (4, dict(tp=4, zero=0, sizes=dict(num_query_groups=2), muon=dict(muon_no_split_qkv=True))),
]


def every_layout() -> Iterator[tuple[int, dict]]:
    for zero in range(4):
        for way in (
            dict(tp=2, dp=2), dict(tp=2, cp=2), dict(tp=2, pp=2), dict(dp=2, pp=2), dict(dp=4),
            dict(cp=2, dp=2), dict(tp=4), dict(pp=2, cp=2), dict(tp=2, dp=2, tied=True),
            dict(dp=2, pp=2, tied=True), dict(dp=4, instances=2, some=zero > 0),
            dict(tp=2, sp=True, dp=2, instances=2, some=zero > 0),
            dict(dp=2, tp=2, order="dp-tp-cp-pp"), dict(dp=4, order="dp-cp-tp-pp"),
            dict(tp=2, dp=2, offload=True), dict(dp=4, offload=True),
            dict(tp=4, sizes=dict(num_query_groups=2)), dict(tp=4, sizes=dict(num_query_groups=1)),
            dict(dp=4, **MOE), dict(tp=2, sp=True, dp=2, **MOE), dict(cp=2, dp=2, **MOE),
            dict(dp=4, **MOE | dict(ep=4)), dict(dp=2, pp=2, **MOE | dict(ep=1)),
            dict(dp=4, instances=2, some=zero > 0, **MOE),
            dict(tp=2, sp=True, dp=2, order="dp-tp-cp-pp", **MOE),
        ):  # fmt: skip
            if not way.get("some", True):
                continue
            for options in (
                {}, dict(muon_no_split_qkv=True), dict(muon_no_split_gate_up=True),
                dict(muon_use_nesterov=True, muon_momentum=0.95),
            ):  # fmt: skip
                yield 4, dict(zero=zero, muon=options, **way)


def check(world, size: int, some: dict) -> dict[str, torch.Tensor]:
    case = BASE | some
    results = world(size).run(updated, case)
    before, after = (together([r[i] for r in results]) for i in (0, 1))
    options = case.get("muon", {})
    joined = tuple(JOINED[flag] for flag, on in options.items() if flag in JOINED and on)
    if "file" in some and options.get("muon_no_split_gate_up"):
        joined += (("w1.weight", "w3.weight"),)
    nesterov, momentum = options.get("muon_use_nesterov", False), options.get("muon_momentum", 0.9)
    want = twin(before, STEPS, nesterov, momentum, joined)
    for name, values in after.items():
        moved = (want[name] - before[name]).norm()
        assert (values - want[name]).norm() <= 1e-12 * moved, (some, name)
        assert moved > 0, name
    instances = case.get("instances", 1)
    owned = [name for r in results for name in r[2]]
    stages = {name for name in owned}
    count = sum(is_matrix(n, v.shape) for n, v in want.items())
    assert all(owned.count(name) == instances for name in stages), "a matrix has two owners"
    fused = 0
    for flag, endings in JOINED.items():
        if options.get(flag):
            fused += sum(n.endswith(endings[1:]) for n in want)
    if "file" not in some:
        assert len(stages) == count - fused
    return after


@pytest.mark.parametrize("size, some", SHORT)
def test_the_update_equals_the_serial_twin(world, size, some):
    check(world, size, some)


@pytest.mark.prove
def test_the_update_equals_the_serial_twin_on_every_layout(world):
    for size, some in every_layout():
        check(world, size, some)


def test_bits_are_the_same_for_every_owner(world):
    """Given the same gradients: tp, dp, cp, ZeRO stage and the owner change no bit in bf16.

    shift: each matrix goes to a member so many places further on than the plan says.
    """
    case = BASE | dict(dtype="float32", layers=1)
    ways = [
        dict(dp=4, zero=0, shift=1), dict(dp=4, zero=1), dict(dp=4, zero=3, shift=2),
        dict(tp=2, dp=2, zero=1, shift=3), dict(tp=4, zero=0), dict(cp=4, zero=2, shift=1),
        dict(tp=2, dp=2, zero=2, bucket=4000, shift=2),
    ]  # fmt: skip
    for fast in (False, True):
        more = dict(muon=dict(muon_use_syrk=fast))
        _, alone, _ = updated(None, case | more)
        want = together([alone])
        seen = set()
        for way in ways:
            results = world(4).run(updated, case | more | way)
            seen.add(tuple(tuple(r[2]) for r in results))
            got = together([r[1] for r in results])
            assert got.keys() == want.keys()
            for name, values in got.items():
                assert torch.equal(values, want[name]), (way, name)
        assert len(seen) > 3, "no matrix had another owner"


@pytest.mark.parametrize("mode", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_equals_torch(mode, fused):
    """Bit for bit, iterations in bf16; torch is given each section, or the fused matrix."""
    options = dict(
        muon_momentum=0.95, muon_use_nesterov=True, muon_coefficient_type="simple",
        muon_scale_mode="shape_scaling" if mode == "original" else "spectral",
        muon_extra_scale_factor=1.0 if mode == "original" else 0.2,
        muon_no_split_qkv=fused, muon_no_split_gate_up=fused,
    )  # fmt: skip
    case = BASE | dict(dtype="float32", muon=options)
    before, after, owned = updated(None, case, steps=4)
    start, got = together([before]), together([after])
    groups: list[list[str]] = []
    for name in start:
        if is_matrix(name, tuple(start[name].shape)):
            same = [e for e in JOINED.values() if name.endswith(e)] if fused else []
            if same and not name.endswith(same[0][0]):
                groups[-1].append(name)
            else:
                groups.append([name])
    assert len(groups) == len(owned)
    for names in groups:
        param = torch.nn.Parameter(torch.cat([start[n] for n in names]))
        muon = torch.optim.Muon([param], lr=LR, weight_decay=DECAY, adjust_lr_fn=mode)
        for step in range(4):
            each = [gradient(n, tuple(start[n].shape), step, torch.float32) for n in names]
            param.grad = torch.cat(each)
            muon.step()
        assert torch.equal(param, torch.cat([got[n] for n in names])), names


def test_coefficients():
    """Each set makes singular values of about 1; by torch's own function for the simple one."""
    torch.manual_seed(0)
    g = torch.randn(24, 40)
    for kind, triples in SETS.items():
        steps = len(triples) if len(triples) > 1 else 5
        made = orthogonalise(g.clone(), coefficients_of(kind, steps))
        assert 0.5 < torch.linalg.svdvals(made).min() < torch.linalg.svdvals(made).max() < 1.4, kind
        fast = orthogonalise(g.clone(), coefficients_of(kind, steps), symmetric=True)
        assert (fast - made).norm() <= 1e-5 * made.norm()
    assert coefficients_of("polar_express", 10)[7:] == (SETS["polar_express"][-1],) * 3
    assert coefficients_of("quintic", 7)[5:] == SETS["quintic"][:2]
    tall, wide = (orthogonalise(x, SETS["quintic"]) for x in (g.T.clone(), g.clone()))
    assert torch.allclose(tall, wide.T, atol=1e-5)
