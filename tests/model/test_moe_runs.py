# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's script at tiny size, upcycling, and a plain loop over transformers' model."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from mpu.grid import Grid
from tests.launcher import Launcher
from tests.training.flags.test_expert_rules import NVIDIA
from tools.checkpoint import main as convert
from tools.generate import load_model
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

# in place of what NVIDIA's script says: sizes, batch and the number of ranks
TINY = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 100
    --global-batch-size 8 --train-iters 20 --lr-decay-iters 20 --lr-warmup-iters 2 --lr 1e-2
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --device cpu
    --log-interval 1 --num-workers 0"""


@pytest.mark.prove
def test_the_script_of_nvidia_trains_at_tiny_size(launcher: Launcher) -> None:
    result = launcher.run(4, shlex.split(f"{NVIDIA} {TINY}"))
    assert result.codes == [0] * 4, result.said(0)
    losses = [row["loss"] for row in result.rows() if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0]


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {**DEFAULT, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@torch.no_grad()
@pytest.mark.parametrize("kind, rope", [("Llama", YARN), ("Qwen3", DEFAULT)])
def test_an_upcycled_model_is_the_dense_one_at_first(
    tmp_path: Path, kind: str, rope: dict[str, Any]
) -> None:
    import transformers

    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, head_dim=16)
    sizes |= dict(bos_token_id=None, eos_token_id=None, rope_parameters=rope)
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    theirs.save_pretrained(tmp_path / "dense")
    given = ["--upcycle", str(tmp_path / "dense"), "--save", str(tmp_path / "moe")]
    assert convert(["convert", *given, "--num-experts", "4"]) == 0
    tokens = torch.arange(40).view(2, 20)
    cpu = torch.device("cpu")
    sparse, _ = load_model(str(tmp_path / "moe"), Grid(), cpu, torch.float64)
    dense, _ = load_model(str(tmp_path / "dense"), Grid(), cpu, torch.float64)
    mine, wanted = sparse(tokens), dense(tokens)
    assert type(sparse).__name__ == "MoE"
    assert (mine - wanted).norm() < 1e-12 * wanted.norm()
    routers = [mlp.router.weight for mlp in (layer.mlp for layer in sparse.layers.values())]
    assert all(weight.std() > 0.1 for weight in routers)
    twice = ["--upcycle", str(tmp_path / "moe"), "--save", str(tmp_path / "again")]
    assert convert(["convert", *twice, "--num-experts", "4"]) == 2
    assert convert(["convert", *given]) == 2  # --num-experts is missing


SIZES = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 24 --num-attention-heads 4
    --num-query-groups 2 --group-query-attention --kv-channels 16 --seq-length 16 --vocab-size 99
    --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --mock-data
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 12 --qk-layernorm
    --norm-epsilon 1e-6 --micro-batch-size 4 --global-batch-size 4 --train-iters 20 --lr 1e-3
    --init-method-std 0.1 --clip-grad 0 --weight-decay 0.1"""


def batch_of(step: int) -> Batch:
    rows = torch.randint(0, 99, (4, 17), generator=torch.Generator().manual_seed(step))
    return Batch(rows[:, :-1], rows[:, 1:], None, None, None, first_sample=0, token_count=64)


@pytest.mark.prove
def test_twenty_steps_are_those_of_a_loop_over_transformers(tmp_path: Path) -> None:
    """AdamW on Qwen3MoeForCausalLM in plain torch, from the same weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from model import moe

    config = parse(shlex.split(SIZES), 1)
    run = pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())
    hf = moe.hf_config(run.model.config)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**hf, attn_implementation="eager")).float()
    names = moe.hf_names(run.model)
    weights: dict[str, Any] = {}
    for name, param in run.model.named_parameters():
        sections = param.detach().split(list(param.placement.sections) or [len(param)])
        weights |= {n: part.clone() for n, part in zip(names[name], sections, strict=True)}
    from safetensors.torch import save_file

    theirs.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = Qwen3MoeForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    decay = [p for p in theirs.parameters() if p.dim() > 1]
    plain = [p for p in theirs.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3, betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        eps=config.optimizer.adam_eps,
    )  # fmt: skip
    for step in range(20):
        batch = batch_of(step)
        logits = theirs(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        ours, _, _ = pretrain_llama.train_step(run, [batch], 1e-3)
        assert ours.item() == pytest.approx(loss.item(), rel=2e-5), step
