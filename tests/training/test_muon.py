# SPDX-License-Identifier: Apache-2.0
"""Muon is the same update on every layout: held to a serial twin, and to torch.optim.Muon.

Gradients are drawn by tensor name, so every layout is given the same ones. A rank reports its
rectangles of weights and momentum under the names that a checkpoint has; they are put together and
held against a twin that knows nothing of Weft.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pretrain_llama
from model import llama
from model.load import load_model_file
from mpu.comm.collectives import all_gather
from mpu.grid import Grid
from mpu.optim import owners
from mpu.optim.muon import MuonUpdater
from mpu.optim.newton_schulz import SETS, coefficients_of, orthogonalise
from mpu.param import Piece, draw_normal, placement_of, unique_parameters
from tests.model.twin import config_of, grid_of
from tests.training.small_llama import read
from training.faults.monitor import FailureMonitor
from training.settings.config import UsageError

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
        for turn in updater.exchanges
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


def is_matrix(name: str, shape: tuple[int, ...], ends: bool = False) -> bool:
    return len(shape) == 2 and (ends or name not in EMBEDDING)


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
    joined: tuple[tuple[str, ...], ...] = (), ends: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update whole tensors serially.

    joined: endings of the names that are one matrix together. ends: embeddings are matrices, too.
    """
    w = {name: values.clone().requires_grad_() for name, values in weights.items()}
    rest = [n for n in w if not is_matrix(n, w[n].shape, ends)]
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
ENDS = "tests/training/matrix_ends.py"
SHORT = [  # in `make test`: tp and ZeRO, cp, pp with tied ends, experts
    (4, dict(tp=2, dp=2, zero=1, tied=True)),
    (4, dict(cp=2, pp=2, zero=0, tied=True)),
    (4, dict(tp=1, dp=4, zero=3, instances=2)),
    (4, dict(tp=2, sp=True, dp=2, zero=2, **MOE)),
    (4, dict(tp=4, zero=0, sizes=dict(num_query_groups=2), muon=dict(muon_no_split_qkv=True))),
    (4, dict(tp=2, dp=2, zero=1, file=ENDS)),  # padding: 97 rows, padded to 102
]


OPTIONS = [
    {}, dict(muon_no_split_qkv=True), dict(muon_no_split_gate_up=True),
    dict(muon_use_nesterov=True, muon_momentum=0.95),
]  # fmt: skip
INSTANCES = [
    dict(dp=4, instances=2), dict(tp=2, sp=True, dp=2, instances=2),
    dict(dp=4, instances=2, **MOE), dict(dp=4, instances=4),
]  # fmt: skip
LAYOUTS = [
    dict(tp=2, dp=2), dict(tp=2, cp=2), dict(tp=2, pp=2), dict(dp=2, pp=2), dict(dp=4),
    dict(cp=2, dp=2), dict(tp=4), dict(pp=2, cp=2), dict(tp=2, dp=2, tied=True),
    dict(dp=2, pp=2, tied=True), dict(dp=2, tp=2, order="dp-tp-cp-pp"),
    dict(dp=4, order="dp-cp-tp-pp"), dict(tp=2, dp=2, offload=True), dict(dp=4, offload=True),
    dict(tp=4, sizes=dict(num_query_groups=2)),
    dict(tp=4, sizes=dict(num_query_groups=1, kv_channels=8)),
    dict(dp=4, **MOE), dict(tp=2, sp=True, dp=2, **MOE), dict(cp=2, dp=2, **MOE),
    dict(dp=4, **MOE | dict(ep=4)), dict(dp=2, pp=2, **MOE | dict(ep=1)),
    dict(tp=2, sp=True, dp=2, order="dp-tp-cp-pp", **MOE),
]  # fmt: skip


def every_layout() -> Iterator[tuple[int, dict]]:
    """Yield each layout at each ZeRO stage, with one of OPTIONS in turn."""
    for i, way in enumerate([*LAYOUTS, *INSTANCES]):
        yield 4, dict(zero=1 + i % 3, muon=OPTIONS[i % 4], **way)


def check(world, size: int, some: dict) -> dict[str, torch.Tensor]:
    case = BASE | some
    results = world(size).run(updated, case)
    before, after = (together([r[i] for r in results]) for i in (0, 1))
    options = case.get("muon", {})
    joined = tuple(JOINED[flag] for flag, on in options.items() if flag in JOINED and on)
    moe, ends = "ep" in some, some.get("file") == ENDS
    if moe and options.get("muon_no_split_gate_up"):
        joined += ((".w1.weight", ".w3.weight"),)
    nesterov, momentum = options.get("muon_use_nesterov", False), options.get("muon_momentum", 0.9)
    want = twin(before, STEPS, nesterov, momentum, joined, ends)
    for name, values in after.items():
        moved = (want[name] - before[name]).norm()
        error = float((values - want[name]).norm() / moved)
        assert error <= 1e-12, f"{name} is {error:.1e} from the serial twin: {some}"
        assert moved > 0, name
    instances = case.get("instances", 1)
    owned = [name for r in results for name in r[2]]
    stages = {name for name in owned}
    count = sum(is_matrix(n, v.shape, ends) for n, v in want.items())
    assert all(owned.count(name) == instances for name in stages), "a matrix has two owners"
    fused = 0
    for flag, endings in JOINED.items():
        if options.get(flag):
            endings += (".w1.weight", ".w3.weight") if "gate" in flag else ()
            fused += sum(n.endswith(tuple(e for e in endings[1:] if "w1" not in e)) for n in want)
    assert len(stages) == count - fused, "some matrices are not orthogonalised"
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
    _, alone, _ = updated(None, case)
    want = together([alone])
    seen = set()
    for way in ways:
        results = world(4).run(updated, case | way)
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
    assert coefficients_of("polar_express", 10)[7:] == (SETS["polar_express"][-1],) * 3
    assert coefficients_of("quintic", 7)[5:] == SETS["quintic"][:2]
    tall, wide = (orthogonalise(x, SETS["quintic"]) for x in (g.T.clone(), g.clone()))
    assert torch.allclose(tall, wide.T, atol=1e-5)


def skipped(comm, case: dict) -> tuple[bool, bool, list[int]]:
    """Make a step whose gradients are not numbers on one rank, between two others."""
    run = build(comm, case)
    give_gradients(run, 0)
    run.optimizer.step(LR)
    state = lambda: [v.clone() for *_, v in run.optimizer.named_state()]  # noqa: E731
    before, moments = weights_of(run), state()
    give_gradients(run, 1)
    if run.grid.rank == 0 or not case["zero"]:  # at stage 0 all ranks have the sum
        run.sink.buckets[0].grad_shard[0] = torch.nan
    _, found_inf = run.optimizer.step(LR)
    assert found_inf == 1
    same = all(
        torch.equal(torch.from_numpy(one[-1]), torch.from_numpy(other[-1]))
        for name, values in weights_of(run).items()
        for one, other in zip(values, before[name], strict=True)
    )
    kept = all(torch.equal(one, other) for one, other in zip(state(), moments, strict=True))
    give_gradients(run, 1)
    run.optimizer.step(LR)
    return same, kept, [run.optimizer.steps]


@pytest.mark.parametrize("zero, way", [(0, {}), (1, dict(offload=True)), (3, dict(states=True))])
def test_a_step_that_is_not_finite_changes_nothing(world, zero, way):
    case = BASE | dict(dp=2, zero=zero, dtype="float32", layers=1, **way)
    assert world(2).run(skipped, case) == [(True, True, [2])] * 2


FLAGS_REFUSED = [
    ("--optimizer lion", "--optimizer lion: must be one of adam, muon; Lion is not available here"),
    ("--optimizer sgd", "SGD is not available here; docs/optimizers.md says how to add an"),
    ("--optimizer soap", "SOAP is not available here"),
    ("--muon-tp-mode blockwise", "blockwise is refused: its update depends on the number of"),
    ("--muon-scalar-optimizer lion", "parameters that are not matrices are updated by AdamW"),
    ("--muon-fp32-matmul-prec low", "must be one of medium, high, highest; torch has no such"),
    ("--muon-coefficient-type cubic5 --muon-num-ns-steps 4", "its coefficients are those of 5"),
    ("--muon-coefficients 2,-1.5,0.5", "--muon-coefficients was removed: --muon-coefficient-type"),
]


@pytest.mark.parametrize("flags, said", FLAGS_REFUSED)
def test_flags_that_mean_no_update_here_are_one_sentence(flags, said):
    words = flags if "--optimizer" in flags else f"--optimizer muon {flags}"
    with pytest.raises(UsageError) as mistake:
        read(words)
    assert said in str(mistake.value) and "\n" not in str(mistake.value)


WRONG = {  # what a fork's file does: what is said
    "three sections as one": (
        {
            "qkv_linear(h, (a * d, g * d, g * d), ctx=ctx": "ColumnParallelLinear(h, "
            "(a + 2 * g) * d, ctx=ctx",
            '("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")': '("qkv",)',
        },
        "--optimizer muon: layers.0.attention.qkv.weight, of shape [128, 64], looks like a fused "
        "QKV weight, but its Placement has no sections: create it with qkv_linear "
        "(mpu/layers/qkv.py), or give --muon-no-split-qkv",
    ),
    "three dimensions": (
        {
            "        self.gate_up = ": "        self.cube = ctx.replicated_parameter((2, 3, 4), "
            "Region.REPLICATED)\n        self.gate_up = ",
        },
        "--optimizer muon: parameter_group of the --model-file returns 'matrix' for "
        "layers.0.mlp.cube, of shape [2, 3, 4], which is not a matrix: return 'vector', or stack "
        "the matrices of experts along dim 0 as sections (mpu/layers/experts.py)",
    ),
}
FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2
    --group-query-attention --seq-length 32 --max-position-embeddings 32 --vocab-size 128
    --mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-2"""


@pytest.mark.parametrize("what", WRONG)
def test_a_fork_without_matrices_is_refused(what, tmp_path, capsys):
    changes, said = WRONG[what]
    text = Path(llama.__file__).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    fork = tmp_path / "fork.py"
    fork.write_text(text.replace("import draw_normal,", "import Region, draw_normal,"))
    argv = [*FLAGS.split(), "--optimizer", "muon", "--model-file", str(fork)]
    for more in ([], ["--dry-run"]):
        assert pretrain_llama.main([*argv, *more]) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1] == f"pretrain_llama.py: {said}"


@pytest.mark.parametrize(
    "saved, loaded, kind", [("adam", "muon", "momentum_buffer"), ("muon", "adam", "exp_avg")]
)
def test_a_checkpoint_of_the_other_optimizer_is_refused(tmp_path, capsys, saved, loaded, kind):
    argv = [*FLAGS.split(), "--save", str(tmp_path), "--load", str(tmp_path)]
    assert pretrain_llama.main([*argv, "--optimizer", saved]) == 0
    capsys.readouterr()
    assert pretrain_llama.main([*argv, "--train-iters", "4", "--optimizer", loaded]) == 2
    assert (
        f"lacks optimizer state (model.layers.1.mlp.down_proj.weight.{kind}): give "
        "--finetune or --no-load-optim to take the weights only\n"
    ) in capsys.readouterr().err
