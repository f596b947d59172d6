# SPDX-License-Identifier: Apache-2.0
"""Whatever builds a model of a run's flags builds it with the run's context, on drawn flags."""

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.overlap.choices import OverlapMap
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.model_profile import rank_model
from training.run.pipeline_stages import rank_stages
from training.run.trial import trials
from training.run.warm_up import run_chunks
from training.settings.config import UsageError

CPU = torch.device("cpu")
FLAGS = """--mock-data --vocab-size 96 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3
    --device cpu --num-workers 0"""
# flags of a run: of each row one is drawn
DENSE = (
    ("", "--bf16", "--fp64", "--bf16 --main-grads-dtype bf16 --zero-stage 1"),
    ("", "--fused-linear-cross-entropy"),
    ("", "--log-max-attention-logit"),
    ("", "--qk-clip --qk-clip-threshold 7 --qk-clip-alpha 0.25"),
    ("", "--output-z-loss-coeff 1e-3"),
    ("", "--attention-backend unfused"),
    ("", "--recompute-granularity selective"),
    ("", "--reset-attention-mask --reset-position-ids"),
)
EXPERTS = (
    ("--num-experts 8 --moe-router-topk 2", "--num-experts 16 --moe-router-topk 4"),
    ("", "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type auto"),
    (
        "",
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02",
        "--moe-router-load-balancing-type aux_loss lagged_global_aux_loss "
        "--moe-aux-loss-coeff 0.02 0.3",
    ),
    ("", "--moe-z-loss-coeff 1e-3"),
    (
        "",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.01",
        "--moe-router-pre-softmax",
    ),
    ("", "--moe-router-num-groups 4 --moe-router-group-topk 2"),
    (
        "",
        "--moe-expert-capacity-factor 1.5",
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    ),
    ("", "", "--moe-router-force-load-balancing"),
)
# what a rank has for itself, or a step
OWN = {"grid", "device", "sink", "queue", "interleaver", "auxiliary_losses", "tp"}


def drawn(seed: int) -> list[str]:
    """Return a command line that is not refused."""
    chance = random.Random(seed)
    while True:
        words = FLAGS.split()
        for row in DENSE + EXPERTS * chance.choice((0, 1, 1)):
            words += chance.choice(row).split()
        try:
            parse(words, 1)
        except UsageError:
            continue
        return words


class Recorder:
    """A model provider that keeps the contexts that it is given."""

    def __init__(self) -> None:
        self.contexts: list[LayerContext] = []

    def __call__(self, config: Any, ctx: LayerContext, *more: Any) -> Any:
        self.contexts.append(ctx)
        return pretrain_llama.model_provider(config, ctx, *more)


def values(ctx: LayerContext) -> dict[str, Any]:
    return {f.name: getattr(ctx, f.name) for f in fields(LayerContext) if f.name not in OWN}


def contexts(words: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the fields of a run's context, and of those of all else that builds its model."""
    config, grid = parse(words, 1), Grid(launch=Launch())
    run = pretrain_llama.build(config, grid, CPU, FailureMonitor())
    found, seen = {}, Recorder()
    run_chunks(run, seen, pretrain_llama.run_schedule, OverlapMap())
    rank_model(config, seen, rank_stages(config, pretrain_llama.model_provider, 0), 0)
    for name, ctx in zip(("warm-up", "estimate"), seen.contexts, strict=True):
        found[name] = values(ctx)
    with pytest.MonkeyPatch.context() as patch:
        import training.run.trial as module

        patch.setattr(module, "_norm", lambda config, ctx: found.update(trial=values(ctx)))
        next(trials(config, CPU)).call()
    return values(run.model.ctx), found


@pytest.mark.prove
def test_all_contexts_of_a_run_are_its_own() -> None:
    """But for tokens that are spread evenly where weights are zeros, and for kernels of other
    libraries on meta tensors.
    """
    differ = set()
    for seed in range(24):
        words = drawn(seed)
        run, found = contexts(words)
        even = {"experts": run["experts"]._replace(force_balance=True)}
        meta = {"norm_backend": "weft", "attention_backend": "auto"}
        wanted = {"warm-up": run | even, "estimate": run | meta, "trial": run}
        for name, ctx in found.items():
            assert ctx == wanted[name], (name, " ".join(words))
        plain = values(LayerContext())
        differ |= {name for name, value in run.items() if value != plain[name]}
    kinds = {"dtype", "accumulate", "loss_in_chunks", "experts", "attention_backend"}
    assert differ == kinds | {"log_max_attention_logit", "qk_clip", "output_z_loss"}
