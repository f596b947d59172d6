# SPDX-License-Identifier: Apache-2.0
"""The serial twin of the whole model, and how a layout is run and compared with it.

The twin is plain torch autograd on full tensors and knows nothing of Weft. Each case runs the
product's own `train_step` on a layout; every rank reports its rectangles of the gradient in
canonical names, and each rectangle is compared with the twin's. Sizes are odd on purpose: local
sizes of 3 and 5, a vocabulary of 97 padded to a multiple of 3 t.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from model.llama import hf_names
from model.load import load_model_file
from mpu.comm.collectives import all_gather
from mpu.grid import Grid
from mpu.layers import linear_cross_entropy
from mpu.layers.attention.max_logits import MaxLogits
from mpu.layers.linear import use_overlap
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.overlap.choices import METHODS, OverlapMap
from mpu.param import placement_of, unique_parameters
from training.data.batch import Batch
from training.data.context_part import context_part
from training.faults.monitor import FailureMonitor
from training.run.autotune.overlap import projections
from training.settings.arguments import (
    BatchConfig,
    DataConfig,
    GpuConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from training.settings.config import Config
from training.settings.update_rules import needs_full_matrices, optimizer_groups

ROWS, S, V = 6, 12, 97
SIZES = dict(
    num_layers=3, hidden_size=28, num_attention_heads=8, seq_length=S, ffn_hidden_size=20,
    num_query_groups=4, kv_channels=6, vocab_size=V, make_vocab_size_divisible_by=3,
    max_position_embeddings=S, use_rope_scaling=True, rotary_base=500.0, init_method_std=0.2,
)  # fmt: skip


def config_of(case: dict) -> Config:
    tp, dp, pp, cp = case["tp"], case["dp"], case.get("pp", 1), case.get("cp", 1)
    rows = case.get("rows", ROWS)
    sizes = SIZES | {"num_layers": case.get("layers", SIZES["num_layers"])} | case.get("sizes", {})
    sizes |= dict.fromkeys(("seq_length", "max_position_embeddings"), case.get("s", S))
    return Config(
        ModelConfig(
            **sizes,
            untie_embeddings_and_output_weights=not case["tied"],
            model_file=case.get("file", ModelConfig.model_file),
        ),
        ParallelConfig(
            world_size=tp * dp * pp * cp,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            rank_order=case.get("order", ParallelConfig.rank_order),
            cp_comm_type=case.get("comm", "p2p"),
            pipeline_model_parallel_size=pp,
            pipeline_schedule=case.get("schedule"),
            num_virtual_stages_per_pipeline_rank=case.get("v"),
            microbatch_group_size_per_virtual_pipeline_stage=case.get("group"),
            pipeline_model_parallel_layout=case.get("layout"),
            defer_embedding_wgrad_compute=case.get("defer", False),
            sequence_parallel=case["sp"],
            expert_model_parallel_size=case.get("ep", 1),
            moe_token_dispatcher_type=case.get("dispatch", "allgather"),
            overlap_moe_expert_parallel_comm=case.get("beside", False),
            recompute_granularity=case["recompute"],
            fused_linear_cross_entropy="chunk" in case,
            recompute_method="uniform" if case["recompute"] == "full" else None,
            recompute_num_layers=2 if case["recompute"] == "full" else None,
            overlap_grad_reduce=case.get("overlap", True),
            optimizer_backend=case.get("backend", "torch"),
            tp_comm_overlap=case.get("path", "none"),
            zero_stage=case.get("zero", 0),
            overlap_param_gather=case.get("gather", False),
            zero_reduce_each_microbatch=case.get("each", False),
            num_distributed_optimizer_instances=case.get("instances", 1),
            grad_reduce_in_bf16=case.get("wire", False),
            main_grads_dtype=case.get("main", "fp32"),
            optimizer_state_offload=case.get("states", False),
            ddp_bucket_size=case.get("bucket", 500),
        ),
        BatchConfig(rows // (dp * case["m"]), rows),
        OptimizerConfig(
            lr=case.get("lr", 0.0),
            clip_grad=case.get("clip", 0.0),
            weight_decay=0.1,
            optimizer=case.get("optimizer", "adam"),
            param_group=case.get("groups", ()),
            **case.get("muon", {}),
        ),
        DataConfig(eod_mask_loss=case.get("masks", False)),
        run=RunConfig(seed=5, dtype=getattr(torch, case.get("dtype", "float64"))),
        gpu=case.get("gpu", GpuConfig()),
        moe=MoEConfig(**case.get("moe", {})),
        extra=case.get("extra", ()),
    )


def global_batch(
    step: int = 0, masks: bool = False, count: int = ROWS, s: int = S
) -> dict[str, torch.Tensor | None]:
    g = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, V, (count, s + 1), generator=g)
    made = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    made |= {"loss_mask": None, "position_ids": None, "document_ids": None}
    if masks:
        made["loss_mask"] = (torch.rand(count, s, generator=g) > 0.3).float()
        begins = torch.rand(count, s, generator=g) < 0.3  # documents of any length
        begins[0], begins[-1], begins[:, 0] = False, True, True  # one document; single tokens
        at = torch.arange(s).expand(count, s)
        made["document_ids"] = begins.cumsum(1)
        made["position_ids"] = at - torch.where(begins, at, 0).cummax(1).values
    return made


def batch_of(case: dict, step: int = 0) -> dict[str, torch.Tensor | None]:
    """Return a case's global batch. case["edit"] changes it: {name: whole tensor}."""
    rows, s = case.get("rows", ROWS), case.get("s", S)
    return global_batch(step, case.get("masks", False), rows, s) | case.get("edit", {})


def micro_batches(
    case: dict, dp_rank: int, step: int = 0, context: tuple[int, int] = (0, 1)
) -> list[Batch]:
    """Cut the global batch as the loader does: micro-batch k of rank r is rows (k D + r) b on."""
    dp, m, rows = case["dp"], case["m"], case.get("rows", ROWS)
    b, batch, made = rows // (dp * m), batch_of(case, step), []
    for k in range(m):
        first = (k * dp + dp_rank) * b
        part = {n: None if t is None else t[first : first + b] for n, t in batch.items()}
        ids = part.pop("document_ids")
        part["packed_seq_params"] = None if ids is None else packed(ids)
        mask, tokens = part["loss_mask"], part["tokens"]
        count = tokens.numel() if mask is None else int(mask.sum())
        whole = Batch(**part, first_sample=first, token_count=count)
        made.append(context_part(whole, *context))
    return made


def packed(ids: torch.Tensor) -> PackedSeqParams:
    """Return the documents of rows in which each token has its document's number: ids [b, s]."""
    of_row = [row.unique_consecutive(return_counts=True)[1].tolist() for row in ids]
    return PackedSeqParams.of([length for lengths in of_row for length in lengths])


def grid_of(comm, config: Config, memory: bool = False) -> Grid:
    """Return the grid of a config over a running world."""
    p = config.parallel
    return comm.grid(
        p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size,
        p.num_distributed_optimizer_instances, memory=memory,
        query_groups=config.model.num_query_groups,
        order=tuple(p.rank_order.split("-")), ep=config.expert_model_parallel_size,
        needs_full_matrices=needs_full_matrices(config),
    )  # fmt: skip


def run_layout(comm, case: dict, steps: int = 1) -> dict:
    """Run on one rank: losses, norms, and this rank's rectangles of the last gradient.

    case["chunk"]: columns of the vocabulary in a chunk of --fused-linear-cross-entropy.
    """
    linear_cross_entropy.CHUNK_BYTES, linear_cross_entropy.ALIGNED = 0, case.get("chunk", 1)
    config = config_of(case)
    memory = case.get("memory", True)
    grid = grid_of(comm, config, memory)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    if case.get("path") == "auto":  # one after the other instead of what is fastest
        ways = itertools.cycle(METHODS if memory else ("ring", "none"))
        choices: dict[str, str] = {}
        tokens = config.batch.micro_batch_size * config.model.seq_length // grid.cp.size
        for p in projections(run.model, tokens).values():
            choices |= {p.forward: next(ways), p.backward: next(ways)}
        use_overlap(run.model, OverlapMap("auto", choices))
    elif config.parallel.tp_comm_overlap != "none":
        use_overlap(run.model, OverlapMap(config.parallel.tp_comm_overlap))
    if case.get("offload"):  # on a CPU pretrain_llama.py leaves it out, as there is nothing to gain
        run.optimizer = pretrain_llama.Optimizer(
            run.model, run.sink, grid, optimizer_groups(config), cpu_offload=True,
            clip=config.optimizer.clip_grad,
        )  # fmt: skip
    losses, norms = [], []
    for step in range(steps):
        batches = micro_batches(case, grid.dp.rank, step, (grid.cp.rank, grid.cp.size))
        loss, norm, found_inf = pretrain_llama.train_step(run, batches, config.optimizer.lr)
        assert found_inf.item() == 0
        losses.append(loss.item())
        norms.append(norm.item())
    run.sink.wait_for_weights()
    gathered_weights = gathered(run.sink.weight_buckets, "param_shard")
    sums = gathered(run.sink.buckets, "grad_shard")
    for bucket in run.sink.weight_buckets:
        for name, param, _ in bucket.params:
            if bucket.weights is not None:
                assert torch.equal(param, gathered_weights[name]), "the weights were not gathered"
    grads, held, names = [], [], load_model_file(config.model.model_file).hf_names(run.model)
    for name, param in unique_parameters(run.model):
        assert param.grad is None, "a layer touched .grad"
        for piece in placement_of(param).pieces(names[name]):
            for found, of in ((grads, sums), (held, gathered_weights if "held" in case else {})):
                if name in of:
                    local = of[name].narrow(piece.dim, piece.local, piece.size)
                    found.append((piece.name, piece.dim, piece.start, local.numpy()))
    weights = {n: w.float().numpy() for n, w in gathered_weights.items()}
    made = {"losses": losses, "norms": norms, "grads": grads, "weights": weights, "held": held}
    made["params_norm"] = run.optimizer.params_norm().item()
    made["state"] = sum(len(values) for _, _, _, values in run.optimizer.named_state())
    made["steps"] = run.optimizer.steps
    logits = (noted := run.sink.state_of(MaxLogits)) and noted.largest
    made["logits"] = None if logits is None else logits.tolist()  # of this rank's layers and heads
    return made | {"auxiliary": run.model.ctx.auxiliary_losses.mean.item()}


def gathered(buckets: Sequence[Any], kind: str) -> dict[str, torch.Tensor]:
    """Gather the owners' parts of the weights ("param_shard") or sums ("grad_shard"), by name."""
    found = {}
    for bucket in buckets:
        flat = getattr(bucket, kind)
        if bucket.shard is not None:  # at stage 0 each is the whole
            flat = all_gather(flat, bucket.shard)[0]
        for name, param, start in bucket.params:
            found[name] = flat[start : start + param.numel()].view(param.shape)
    return found


def run_cases(comm, some: list[dict], steps: int = 1) -> list[dict]:
    return [run_layout(comm, case, steps) for case in some]


ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8)


class Twin:
    """The serial twin: a Llama in plain torch, on full fp64 tensors under canonical names.

    file: of the model whose initial weights it takes; where those have a q_norm, so has the twin.
    sizes: those that differ from SIZES. more: entries of the case whose weights it takes. z_loss:
    the coefficient of the output layer's.
    """

    z_loss = 0.0
    embedding_mult, softmax_scale, logits_divisor = 1.0, 0.0, 1.0  # muP's

    def __init__(
        self,
        tied: bool,
        layers: int = SIZES["num_layers"],
        rows: int = ROWS,
        file: str = ModelConfig.model_file,
        sizes: dict | None = None,
        **more: Any,
    ) -> None:
        case = dict(tp=1, dp=1, sp=False, recompute=None, tied=tied, m=1, layers=layers, file=file)
        case |= more
        case["sizes"] = sizes or {}
        self.sizes = SIZES | case["sizes"]
        self.layers, self.rows = layers, rows
        run = pretrain_llama.build(config_of(case), Grid(), torch.device("cpu"), FailureMonitor())
        names, self.w = hf_names(run.model), {}
        for name, param in unique_parameters(run.model):  # the initial weights only
            for piece in placement_of(param).pieces(names[name]):
                full = param.detach().narrow(piece.dim, piece.local, piece.size).clone()
                self.w[piece.name] = full.requires_grad_(param.requires_grad)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        d = self.sizes["kv_channels"]
        inverse, factor = [], 1.0
        for i in range(0, d, 2):  # Llama 3.1's rule, written out
            f = SIZES["rotary_base"] ** (-i / d)
            wavelength = 2 * np.pi / f
            if wavelength > 8192:
                f = f / 8.0
            elif wavelength > 8192 / 4.0:
                smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
                f = (1 - smooth) * f / 8.0 + smooth * f
            inverse.append(f)
        if self.sizes.get("position_embedding_type") == "yarn":
            inverse, factor = self.yarn(d)
        angle = positions[..., None].double() * torch.tensor(inverse, dtype=torch.float64)
        cos, sin = (factor * part[:, None] for part in (angle.cos(), angle.sin()))  # [b, 1, s, d/2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def yarn(self, d: int) -> tuple[list[float], float]:
        """Return YaRN's frequencies of a head of size d, and what multiplies cos and sin."""
        base, factor = self.sizes["rotary_base"], self.sizes["rotary_scaling_factor"]
        length = self.sizes["yarn_original_max_position_embeddings"]
        at = {}
        for name in ("yarn_beta_fast", "yarn_beta_slow"):  # where a frequency turns so often
            turns = self.sizes[name]
            at[name] = d / 2 * np.log(length / (2 * np.pi * turns)) / np.log(base)
        low, high = max(0.0, at["yarn_beta_fast"]), min(d - 1.0, at["yarn_beta_slow"])
        out = []
        for i in range(d // 2):
            f, slow = base ** (-2 * i / d), min(1.0, max(0.0, (i - low) / (high - low)))
            out.append((1 - slow) * f + slow * f / factor)
        return out, 1 + 0.1 * np.log(factor)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[name]

    def loss(self, batch: dict) -> torch.Tensor:
        """Return the mean loss over the tokens that count, and over all what blocks add to it."""
        w, d = self.w, self.sizes["kv_channels"]
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_query_groups"]
        h = w["model.embed_tokens.weight"][batch["tokens"]] * self.embedding_mult
        b, s, _ = h.shape
        positions = batch["position_ids"]
        positions = torch.arange(s).expand(b, s) if positions is None else positions
        look = torch.ones(s, s, dtype=torch.bool).tril()[None]
        auxiliary = 0.0
        if batch["document_ids"] is not None:
            look = look & (batch["document_ids"][:, :, None] == batch["document_ids"][:, None])
        for i in range(self.layers):
            at = f"model.layers.{i}."
            x = self.norm(h, at + "input_layernorm.weight")
            q, k, v = (
                (x @ w[f"{at}self_attn.{n}_proj.weight"].t()).view(b, s, -1, d).transpose(1, 2)
                for n in "qkv"
            )
            if f"{at}self_attn.q_norm.weight" in w:
                q, k = (
                    self.norm(t, f"{at}self_attn.{n}_norm.weight") for t, n in ((q, "q"), (k, "k"))
                )
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            scores = (q @ k.transpose(-1, -2)) * (self.softmax_scale or d**-0.5)
            scores = scores.masked_fill(~look[:, None], -torch.inf)
            weights = self.scores(scores, i).softmax(-1)
            y = (weights @ v).transpose(1, 2).reshape(b, s, -1)
            h = h + y @ w[f"{at}self_attn.o_proj.weight"].t()
            x = self.norm(h, at + "post_attention_layernorm.weight")
            h = h + self.mlp(x, at) + self.more(x, at)
            auxiliary += self.auxiliary(h)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        logits = self.norm(h, "model.norm.weight") @ head.t() / self.logits_divisor
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = loss + self.z_loss * logits.flatten(0, 1).logsumexp(-1).square()
        mask = batch["loss_mask"]
        mask = torch.ones(b * s, dtype=torch.float64) if mask is None else mask.flatten().double()
        return (loss * mask).sum() / mask.sum() + auxiliary / (b * s)

    def swiglu(self, x: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
        gate, up, down = (self.w[f"{name}.weight"] for name in (gate, up, down))
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def mlp(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """Return the MLP of x; at: its layer's names."""
        return self.swiglu(x, *(f"{at}mlp.{n}_proj" for n in ("gate", "up", "down")))

    def scores(self, scores: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the scores of attention [b, a, s, s], -infinity where a key is hidden."""
        return scores

    def auxiliary(self, h: torch.Tensor) -> torch.Tensor | float:
        """Return what a block adds to the loss, summed over the tokens: nothing."""
        return 0.0

    def more(self, x: torch.Tensor, at: str) -> torch.Tensor | float:
        """Return what a fork's layer adds beside its MLP; x: the MLP's input, at: its names."""
        return 0.0

    def train(
        self, steps: int, lr: float, clip: float, masks: bool = False, case: dict | None = None,
        make=ADAMW,
    ) -> tuple[list, list]:  # fmt: skip
        """Take AdamW steps as the product does, on a case's batches; return losses and norms.

        make: of groups and a learning rate another optimizer.
        """
        case = case or dict(masks=masks, rows=self.rows)
        trained = [p for p in self.w.values() if p.requires_grad]
        decay = [p for p in trained if p.dim() > 1]
        plain = [p for p in trained if p.dim() == 1]
        adam = make(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=lr
        )
        losses, norms = [], []
        for step in range(steps):
            adam.zero_grad()
            loss = self.loss(batch_of(case, step))
            loss.backward()
            limit = clip or torch.inf
            norms.append(torch.nn.utils.clip_grad_norm_(trained, limit).item())
            adam.step()
            losses.append(loss.item())
        return losses, norms


def check(results: list[dict], twin: Twin, loss: float, norm: float, within: float = 1e-12) -> None:
    """Compare what every rank reports with the twin; each gradient `within` that part of its norm.

    loss, norm: those of the first step; the gradients are the last step's.
    """
    covered: dict[str, int] = {}
    for result in results:
        assert result["losses"][0] == pytest.approx(loss, rel=within)
        assert result["norms"][0] == pytest.approx(norm, rel=within)
        for name, dim, start, local in result["grads"]:
            full = twin.w[name].grad
            want = full.narrow(dim, start, local.shape[dim])
            error, size = (torch.from_numpy(local) - want).norm(), full.norm()
            assert error <= within * size, f"{name} rows {start}: {error:.1e} of {size:.1e}"
            covered[name] = covered.get(name, 0) + local.size
    trained = {name: w for name, w in twin.w.items() if w.requires_grad}
    assert covered.keys() == trained.keys()
    assert all(covered[n] >= w.numel() for n, w in trained.items())


def compare(world, twin_of, size: int, some: list[dict]) -> None:
    """Run cases on a world and hold each against its twin: twin_of(case) -> (Twin, loss, norm)."""
    for first in range(0, len(some), 20):  # a world answers within its time-out
        cases = some[first : first + 20]
        results = world(size).run(run_cases, cases)
        for i, case in enumerate(cases):
            try:
                check([r[i] for r in results], *twin_of(case))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Say whether the tensors that both hold, by name, are equal to the last bit."""
    return all(np.array_equal(one[name], other[name]) for name in one.keys() & other.keys())
