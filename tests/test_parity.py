# SPDX-License-Identifier: Apache-2.0
"""The whole model against its serial twin, in fp64: loss, gradient norm and EVERY parameter
gradient.

The twin below is plain torch autograd on full tensors and knows nothing of Weft. Each case runs the
product's own `train_step` on a layout; every rank reports its rectangles of the gradient in
canonical names, and each rectangle is compared with the twin's. Sizes are odd on purpose: local
sizes of 3 and 5, a vocabulary of 97 padded to a multiple of 3 t.
"""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from model.llama import hf_names
from mpu.comm.watch import Watch
from mpu.param import placement_of, unique_parameters
from training.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from training.data.batch import Batch

ROWS, S, V = 6, 12, 97
SIZES = dict(
    num_layers=3, hidden_size=28, num_attention_heads=8, seq_length=S, ffn_hidden_size=20,
    num_query_groups=4, kv_channels=6, vocab_size=V, make_vocab_size_divisible_by=3,
    max_position_embeddings=S, use_rope_scaling=True, rotary_base=500.0, init_method_std=0.2,
)  # fmt: skip


def config_of(case: dict) -> Config:
    tp, dp = case["tp"], case["dp"]
    return Config(
        ModelConfig(**SIZES, untie_embeddings_and_output_weights=not case["tied"]),
        ParallelConfig(
            world_size=tp * dp,
            tensor_model_parallel_size=tp,
            sequence_parallel=case["sp"],
            recompute_granularity=case["recompute"],
            recompute_method="uniform" if case["recompute"] == "full" else None,
            recompute_num_layers=2 if case["recompute"] == "full" else None,
            overlap_grad_reduce=case.get("overlap", True),
            ddp_bucket_size=case.get("bucket", 500),
        ),
        BatchConfig(ROWS // (dp * case["m"]), ROWS),
        OptimizerConfig(lr=case.get("lr", 0.0), clip_grad=case.get("clip", 0.0), weight_decay=0.1),
        DataConfig(eod_mask_loss=case.get("masks", False)),
        run=RunConfig(seed=5, dtype=getattr(torch, case.get("dtype", "float64"))),
    )


def global_batch(step: int = 0, masks: bool = False) -> dict[str, torch.Tensor | None]:
    g = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, V, (ROWS, S + 1), generator=g)
    made = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    made |= {"loss_mask": None, "position_ids": None, "document_ids": None}
    if masks:
        made["loss_mask"] = (torch.rand(ROWS, S, generator=g) > 0.3).float()
        cut = torch.randint(1, S, (ROWS, 1), generator=g)
        at = torch.arange(S).expand(ROWS, S)
        made["document_ids"] = (at >= cut).int()
        made["position_ids"] = torch.where(at >= cut, at - cut, at)
    return made


def micro_batches(case: dict, dp_rank: int, step: int = 0) -> list[Batch]:
    """Cut the global batch as the loader does: micro-batch k of rank r is rows (k D + r) b on."""
    dp, m = case["dp"], case["m"]
    b, whole, made = ROWS // (dp * m), global_batch(step, case.get("masks", False)), []
    for k in range(m):
        first = (k * dp + dp_rank) * b
        part = {n: None if t is None else t[first : first + b] for n, t in whole.items()}
        count = b * S if part["loss_mask"] is None else int(part["loss_mask"].sum())
        made.append(Batch(**part, first_sample=first, token_count=count))
    return made


def run_layout(comm, case: dict, steps: int = 1) -> dict:
    """Run on one rank: losses, norms, and this rank's rectangles of the last gradient."""
    config = config_of(case)
    grid = comm.grid(case["tp"])
    run = pretrain_llama.build(config, grid, torch.device("cpu"), Watch())
    losses, norms = [], []
    for step in range(steps):
        batches = micro_batches(case, grid.dp.rank, step)
        loss, norm, found_inf = pretrain_llama.train_step(run, batches, config.optimizer.lr)
        assert found_inf.item() == 0
        losses.append(loss.item())
        norms.append(norm.item())
    grads, names = [], hf_names(run.model)
    for name, param in unique_parameters(run.model):
        assert param.grad is None, "a layer touched .grad"
        for piece in placement_of(param).pieces(names[name]):
            local = run.sink.main[param].narrow(piece.dim, piece.local, piece.size)
            grads.append((piece.name, piece.dim, piece.start, local.numpy()))
    weights = [p.detach().float().numpy() for p in run.model.parameters()]
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


class Twin:
    """The serial twin: a Llama in plain torch, on full fp64 tensors under canonical names."""

    def __init__(self, tied: bool) -> None:
        case = dict(tp=1, dp=1, sp=False, recompute=None, tied=tied, m=1)
        from mpu.grid import Grid

        run = pretrain_llama.build(config_of(case), Grid(), torch.device("cpu"), Watch())
        names, self.w = hf_names(run.model), {}
        for name, param in unique_parameters(run.model):  # the initial weights only
            for piece in placement_of(param).pieces(names[name]):
                full = param.detach().narrow(piece.dim, piece.local, piece.size).clone()
                self.w[piece.name] = full.requires_grad_()

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        d = SIZES["kv_channels"]
        inverse = []
        for i in range(0, d, 2):  # Llama 3.1's rule, written out
            f = SIZES["rotary_base"] ** (-i / d)
            wavelength = 2 * np.pi / f
            if wavelength > 8192:
                f = f / 8.0
            elif wavelength > 8192 / 4.0:
                smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
                f = (1 - smooth) * f / 8.0 + smooth * f
            inverse.append(f)
        angle = positions[..., None].double() * torch.tensor(inverse, dtype=torch.float64)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [b, 1, s, d/2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[name]

    def loss(self, batch: dict) -> torch.Tensor:
        """Return the mean loss over the tokens that count."""
        w, heads, groups = self.w, SIZES["num_attention_heads"], SIZES["num_query_groups"]
        h = w["model.embed_tokens.weight"][batch["tokens"]]
        b, s, _ = h.shape
        positions = batch["position_ids"]
        positions = torch.arange(s).expand(b, s) if positions is None else positions
        look = torch.ones(s, s, dtype=torch.bool).tril()[None]
        if batch["document_ids"] is not None:
            look = look & (batch["document_ids"][:, :, None] == batch["document_ids"][:, None])
        for i in range(SIZES["num_layers"]):
            at = f"model.layers.{i}."
            x = self.norm(h, at + "input_layernorm.weight")
            q, k, v = (
                (x @ w[f"{at}self_attn.{n}_proj.weight"].t()).view(b, s, -1, 6).transpose(1, 2)
                for n in "qkv"
            )
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            scores = (q @ k.transpose(-1, -2)) / 6**0.5
            weights = scores.masked_fill(~look[:, None], -torch.inf).softmax(-1)
            y = (weights @ v).transpose(1, 2).reshape(b, s, -1)
            h = h + y @ w[f"{at}self_attn.o_proj.weight"].t()
            x = self.norm(h, at + "post_attention_layernorm.weight")
            gate, up = (x @ w[f"{at}mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
            h = h + (F.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].t()
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        logits = self.norm(h, "model.norm.weight") @ head.t()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"]
        mask = torch.ones(b * s, dtype=torch.float64) if mask is None else mask.flatten().double()
        return (loss * mask).sum() / mask.sum()

    def train(self, steps: int, lr: float, clip: float, masks: bool = False) -> tuple[list, list]:
        """Take AdamW steps as the product does; return losses and gradient norms."""
        decay = [p for p in self.w.values() if p.dim() > 1]
        plain = [p for p in self.w.values() if p.dim() == 1]
        adam = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=lr, betas=(0.9, 0.999), eps=1e-8,
        )  # fmt: skip
        losses, norms = [], []
        for step in range(steps):
            adam.zero_grad()
            loss = self.loss(global_batch(step, masks))
            loss.backward()
            limit = clip or torch.inf
            norms.append(torch.nn.utils.clip_grad_norm_(list(self.w.values()), limit).item())
            adam.step()
            losses.append(loss.item())
        return losses, norms


def check(results: list[dict], twin: Twin, loss: float, norm: float) -> None:
    """Compare what every rank reports with the twin; each gradient within 1e-12 of its norm."""
    covered: dict[str, int] = {}
    for result in results:
        assert result["losses"][0] == pytest.approx(loss, rel=1e-12)
        assert result["norms"][0] == pytest.approx(norm, rel=1e-12)
        for name, dim, start, local in result["grads"]:
            full = twin.w[name].grad
            want = full.narrow(dim, start, local.shape[dim])
            error = (torch.from_numpy(local) - want).norm() / full.norm()
            assert error < 1e-12, f"{name} rows {start}: {error:.1e}"
            covered[name] = covered.get(name, 0) + local.size
    assert covered.keys() == twin.w.keys()
    assert all(covered[n] >= w.numel() for n, w in twin.w.items())


def cases(world: int) -> list[dict]:
    """List every case of the matrix that fills `world` ranks."""
    keys = ("tp", "dp", "sp", "recompute", "tied", "m")
    values = ((1, 2, 4), (1, 2), (False, True), (None, "selective", "full"), (False, True), (1, 3))
    every = [dict(zip(keys, v, strict=True)) for v in itertools.product(*values)]
    return [c for c in every if c["tp"] * c["dp"] == world and not (c["sp"] and c["tp"] == 1)]


def run_cases(comm, some: list[dict]) -> list[dict]:
    return [run_layout(comm, case) for case in some]


@pytest.fixture(scope="module")
def twins() -> dict:
    """Return, for (tied, masks), a twin with the gradients of global batch 0, its loss and norm."""
    made = {}
    for tied, masks in itertools.product((False, True), (False, True)):
        twin = Twin(tied)
        (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, masks=masks)
        made[tied, masks] = (twin, loss, norm)
    return made


def compare(world, twins, size: int, some: list[dict]) -> None:
    results = world(size).run(run_cases, some)
    for i, case in enumerate(some):
        twin, loss, norm = twins[case["tied"], case.get("masks", False)]
        try:
            check([r[i] for r in results], twin, loss, norm)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sample_of_the_matrix(world, twins, size):
    every = cases(size)
    compare(world, twins, size, random.Random(size).sample(every, min(12, len(every))))


@pytest.mark.prove
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_whole_matrix(world, twins, size):
    compare(world, twins, size, cases(size))


@pytest.mark.parametrize("size, tp", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_masked_documents(world, twins, size, tp):
    """Document masks, restarted positions and a loss mask that falls unevenly on the ranks."""
    base = dict(tp=tp, dp=size // tp, sp=tp > 1, tied=False, masks=True)
    some = [base | {"recompute": r, "m": m} for r in (None, "selective") for m in (1, 3)]
    compare(world, twins, size, some)


@pytest.mark.parametrize("size, tp", [(1, 1), (2, 2), (2, 1)])
def test_twenty_steps_follow_the_twin(world, size, tp):
    twin = Twin(tied=False)
    losses, norms = twin.train(20, lr=1e-2, clip=0.5)
    case = dict(tp=tp, dp=size // tp, sp=tp > 1, recompute=None, tied=False, m=1, lr=1e-2, clip=0.5)
    for result in world(size).run(run_layout, case, 20):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["norms"] == pytest.approx(norms, rel=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_and_overlap_change_no_bit(world, dtype):
    """Other buckets, reduced under backward or after: the same bits, clipping active."""
    base = dict(tp=2, dp=2, sp=True, recompute=None, tied=True, m=3, lr=1e-2, clip=0.1, dtype=dtype)
    ways = [{"bucket": b, "overlap": o} for b in (1, 500, 10**9) for o in (True, False)]
    results = [world(4).run(run_layout, base | way, 4) for way in ways]
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert mine["norms"] == theirs["norms"]
            for a, b in zip(mine["weights"], theirs["weights"], strict=True):
                assert np.array_equal(a, b)
