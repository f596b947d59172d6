# SPDX-License-Identifier: Apache-2.0
"""A training state that is known without a run, and each rank's part of it in every layout.

Each tensor of the canonical state is a pure function of its name, so any process can compute any
element. How a rank cuts it is written out here once more, in plain torch: `local` shares no code
with the placements, pieces and rectangles that a checkpoint goes through. There are two models, so
that every tensor-parallel size up to 8 divides one of them. A vocabulary of 97 is padded at all
sizes but one, to 120 rows over 8 ranks, the last of which has padding only.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

import pretrain_llama
from model.llama import from_hf_config, hf_config, hf_names
from mpu.grid import Grid
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.run.saver import Saver
from training.settings.arguments import (
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from training.settings.config import Config

KINDS = ("master", "exp_avg", "exp_avg_sq")
V, PAD, LAYERS, STEPS = 97, 3, 9, 11  # STEPS: updates that the canonical state has seen
COMMON = dict(num_layers=LAYERS, hidden_size=12, kv_channels=2, vocab_size=V,
              make_vocab_size_divisible_by=PAD)  # fmt: skip
MODELS = {  # by the batch, a multiple of every data-parallel size; a sequence likewise
    24: dict(num_attention_heads=48, num_query_groups=24, ffn_hidden_size=24, seq_length=24),
    35: dict(num_attention_heads=35, num_query_groups=35, ffn_hidden_size=35, seq_length=35),
}
ROWS = {24: {1: 6, 2: 6, 3: 4, 4: 3, 6: 2, 8: 3}, 35: {1: 7, 5: 7, 7: 5}}  # a micro-batch, by dp


def micro_batches_of(case: dict) -> int:
    return case["model"] // (case["dp"] * ROWS[case["model"]][case["dp"]])


def config_of(case: dict, seed: int = 5) -> Config:
    """case: model, tp, pp, dp, sp, zero, tied, dtype; schedule, v, instances where they differ.

    groups: key/value heads, where they are not the model's.
    """
    model, m = case["model"], micro_batches_of(case)
    grouped = case.get("schedule") == "interleaved"
    groups = {"num_query_groups": case["groups"]} if "groups" in case else {}
    return Config(
        ModelConfig(
            **COMMON | MODELS[model] | groups,
            max_position_embeddings=MODELS[model]["seq_length"],
            untie_embeddings_and_output_weights=not case["tied"],
        ),
        ParallelConfig(
            world_size=case["tp"] * case["pp"] * case["dp"],
            tensor_model_parallel_size=case["tp"],
            pipeline_model_parallel_size=case["pp"],
            pipeline_schedule=case.get("schedule"),
            num_virtual_stages_per_pipeline_rank=case.get("v"),
            microbatch_group_size_per_virtual_pipeline_stage=m if grouped else None,
            sequence_parallel=case["sp"],
            zero_stage=case["zero"],
            num_distributed_optimizer_instances=case.get("instances", 1),
            optimizer_state_offload=case.get("states", False),
            ddp_bucket_size=case.get("bucket", 3000),
        ),
        BatchConfig(ROWS[model][case["dp"]], model),
        OptimizerConfig(
            lr=1e-3,
            lr_decay_style="constant",
            clip_grad=0.5,
            optimizer=case.get("optimizer", "adam"),
        ),
        run=RunConfig(seed=seed, dtype=getattr(torch, case["dtype"])),
    )


def build(grid: Grid, case: dict, seed: int = 5) -> pretrain_llama.Run:
    return pretrain_llama.build(config_of(case, seed), grid, torch.device("cpu"), FailureMonitor())


def saver_of(run: pretrain_llama.Run, root: str, behind: bool = False) -> Saver:
    """Make what saves to, and loads from, a directory; the seed may be another than there.

    behind: while training continues.
    """
    places = CheckpointConfig(save=root, load=root, allow_change=("seed",), async_save=behind)
    config, ctx, names = replace(run.config, checkpoint=places), run.model.ctx, hf_names(run.model)
    digests = {"tokenizer_digest": "a tokenizer", "corpus_digest": "a corpus"}
    notes: list[str] = []
    hf = hf_config, from_hf_config
    return Saver(config, ctx, run.model, run.optimizer, names, *hf, digests, notes.append)


def train(run: pretrain_llama.Run, steps: range) -> list[float]:
    """Train on the global batches of the steps; return the losses."""
    rows, length = run.config.batch.global_batch_size, run.config.model.seq_length
    b, dp = run.config.batch.micro_batch_size, run.grid.dp
    losses = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        every = torch.randint(0, V, (rows, length + 1), generator=g)
        batches = []
        for first in range(dp.rank * b, rows, dp.size * b):
            part = every[first : first + b]
            ids = part[:, :-1], part[:, 1:]
            batches.append(Batch(*ids, None, None, None, first, b * length))
        losses.append(pretrain_llama.train_step(run, batches, 1e-3)[0].item())
    run.sink.wait_for_weights()
    return losses


class Canonical:
    """The canonical state of a model: `whole(name)` is a tensor, `local` what a rank has of it."""

    def __init__(self, case: dict) -> None:
        c = config_of(case | dict(tp=1, pp=1, dp=1, sp=False, zero=0, instances=1, v=None,
                                  schedule=None)).model  # fmt: skip
        self.dtype = getattr(torch, case["dtype"])
        self._made: dict[tuple[str, str], Tensor] = {}
        self.state_dtype = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        h, q, k = c.hidden_size, c.num_attention_heads * 2, c.num_query_groups * 2
        f = c.ffn_hidden_size
        self.shapes = {"model.embed_tokens.weight": (V, h), "model.norm.weight": (h,)}
        if c.untie_embeddings_and_output_weights:
            self.shapes["lm_head.weight"] = (V, h)
        for i in range(LAYERS):
            inside = {
                "input_layernorm": (h,), "post_attention_layernorm": (h,),
                "self_attn.q_proj": (q, h), "self_attn.k_proj": (k, h),
                "self_attn.v_proj": (k, h), "self_attn.o_proj": (h, q),
                "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
            }  # fmt: skip
            self.shapes |= {f"model.layers.{i}.{n}.weight": s for n, s in inside.items()}

    def kinds(self) -> list[str]:
        return ["", *(k for k in KINDS if k != "master" or self.dtype == torch.bfloat16)]

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a checkpoint must hold, by its names in there."""
        return {
            f"{name}.{kind}" if kind else name: self.whole(name, kind)
            for name in self.shapes
            for kind in self.kinds()
        }

    def whole(self, name: str, kind: str = "") -> Tensor:
        """Return a tensor, no two elements alike: +-2^-e (1 + m), e and m scrambled indices.

        A bf16 weight has 4096 values, a wider number 65536 and more.
        """
        if (name, kind) in self._made:
            return self._made[name, kind]
        shape, seed = self.shapes[name], zlib.crc32(f"{name} {kind}".encode())
        dtype = self.state_dtype if kind else self.dtype
        at = torch.arange(prod(shape), dtype=torch.int64)
        code, low = (at * 1597 + seed) % 4096, (at * 40503 + seed) % 65536
        exponent, sign, m = code // 256, code // 128 % 2, code % 128 / 2.0**7
        if dtype != torch.bfloat16:
            m = m + low / 2.0**23
        if dtype == torch.float64:
            m = m + (65535 - low) / 2.0**40
        values = (1 + m.double()) * 2.0 ** (-1 - exponent)
        if kind == "exp_avg":
            values = values * 2.0**-12
        if kind == "exp_avg_sq":
            values = values * 2.0**-20
        else:
            values = values * (1 - 2 * sign)
        made = values.to(dtype)
        assert torch.equal(made.double(), values) and len(made.unique()) == len(made)
        self._made[name, kind] = made.view(shape)
        return self._made[name, kind]

    def local(self, name: str, kind: str, t: int, r: int) -> Tensor:
        """Return what tensor-parallel rank r of t holds of a parameter, zeros as its padding."""

        def cut(theirs: str, dim: int) -> Tensor:
            return self.whole(f"{theirs}.weight", kind).chunk(t, dim)[r]

        part = name.split(".")
        if part[0] in ("embedding", "head"):
            tied = part[0] == "embedding" or "lm_head.weight" not in self.shapes
            full = self.whole("model.embed_tokens.weight" if tied else "lm_head.weight", kind)
            rows = -(-V // (PAD * t)) * PAD * t
            return torch.cat([full, full.new_zeros(rows - V, full.shape[1])]).chunk(t)[r]
        if part[0] == "norm":
            return self.whole("model.norm.weight", kind)
        at = f"model.layers.{part[1]}"
        match part[2:-1]:
            case ["attention_norm"]:
                return self.whole(f"{at}.input_layernorm.weight", kind)
            case ["mlp_norm"]:
                return self.whole(f"{at}.post_attention_layernorm.weight", kind)
            case ["attention", "qkv"]:
                return torch.cat([cut(f"{at}.self_attn.{n}_proj", 0) for n in "qkv"])
            case ["attention", "proj"]:
                return cut(f"{at}.self_attn.o_proj", 1)
            case ["mlp", "gate_up"]:
                return torch.cat([cut(f"{at}.mlp.{n}_proj", 0) for n in ("gate", "up")])
            case ["mlp", "down"]:
                return cut(f"{at}.mlp.down_proj", 1)
        raise AssertionError(name)

    def held(self, run: pretrain_llama.Run) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Yield (what, the run's tensor, what must stand in it, where that is no padding) for all
        that a rank keeps: weights, its own part of them, masters, moments. They lie flat."""
        tp, optimizer = run.grid.tp, run.optimizer
        for i, bucket in enumerate(run.sink.buckets):
            flats = {}
            real = torch.zeros(bucket.length, dtype=torch.bool)
            for kind in self.kinds():
                dtype = self.state_dtype if kind else self.dtype
                flats[kind] = torch.zeros(bucket.length, dtype=dtype)
                for name, param, start in bucket.params:
                    part = self.local(name, kind, tp.size, tp.rank).flatten()
                    assert len(part) == param.numel(), name
                    flats[kind][start : start + len(part)] = part
                    real[start : start + len(part)] = part != 0  # no value is 0
            found = [("", bucket.low, bucket.param_shard)]
            if bucket.weights is not None:
                found.append(("", 0, bucket.weights))
            if optimizer.masters[i] is not bucket.param_shard:
                found.append(("master", bucket.low, optimizer.masters[i]))
            for segment in optimizer.segments[i]:
                state = segment.updater.state(segment.weights)
                found += [(kind, segment.low, values) for kind, values in state.items()]
            for kind, low, tensor in found:
                here = slice(low, low + len(tensor))
                yield f"{kind or 'weights'} of bucket {i}", tensor, flats[kind][here], real[here]

    @torch.no_grad()
    def fill(self, run: pretrain_llama.Run) -> None:
        """Put the canonical state into a run."""
        for _, tensor, values, _ in self.held(run):
            tensor.copy_(values)
        run.optimizer.loaded(STEPS)

    def check(self, run: pretrain_llama.Run) -> int:
        """Hold all of a rank's state, padding included, to the canonical one; count elements."""
        count = 0
        for what, tensor, values, real in self.held(run):
            assert same_bits(tensor, values), f"{what}: {wrong(tensor, values)}"
            count += int(real.sum())
        assert run.optimizer.steps == STEPS
        return count

    def check_fresh(self, run: pretrain_llama.Run) -> None:
        """Hold a run that has loaded nothing to zeros in all padding, and to other weights."""
        for what, tensor, values, real in self.held(run):
            assert not tensor[~real].any(), what
            assert not real.any() or not same_bits(tensor, values), what


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def wrong(one: Tensor, other: Tensor) -> str:
    places = (one != other).nonzero().flatten().tolist()
    return f"{len(places)} of {one.numel()} elements differ, the first at {places[:3]}"
