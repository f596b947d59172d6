# SPDX-License-Identifier: Apache-2.0
"""Fork the model and plan its run: dry run, balance, FLOPs, memory and traffic are the fork's.

The fork is a copy of model/llama.py with another MLP width in each layer, one more norm a layer and
a second output layer with a loss of its own. Nothing else is changed.
"""

import importlib.util
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pretrain_llama
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from tests.training.small_llama import read
from tools import plan
from training.flags import model_sizes
from training.run import pipeline_stages
from training.run.model_profile import model_profile
from training.run.pipeline_stages import stages_of

ROOT = Path(__file__).resolve().parents[2]
EDITS = {
    "        return self.config\n": (
        "        width = self.config.ffn_hidden_size * (1 + i % 3 * 2)\n"
        "        return replace(self.config, ffn_hidden_size=width)\n"
    ),
    "        self.mlp = self.mlp_type(config, ctx)\n": (
        "        self.mlp = self.mlp_type(config, ctx)\n"
        "        self.last_norm = RMSNorm(config.hidden_size, ctx=ctx, eps=config.norm_epsilon)\n"
    ),
    "        return h + self.mlp(x)\n": ("        return h + self.last_norm(self.mlp(x))\n"),
    "            self.head = ColumnParallelLinear(": (
        "            self.second = ColumnParallelLinear(h, v, ctx=ctx, pad_to=pad)\n"
        "            self.head = ColumnParallelLinear("
    ),
    '"head": stage.loss}': '"head": stage.loss, "second": stage.loss}',
    "        return output_loss(self.head, h, labels, v, self.ctx, self.logits)": (
        "        loss = output_loss(self.head, h, labels, v, self.ctx)\n"
        "        return loss + output_loss(self.second, h, labels.roll(-1, 0), v, self.ctx)"
    ),
}
FLAGS = (
    "--num-layers 7 --vocab-size 300 --make-vocab-size-divisible-by 1 "
    "--untie-embeddings-and-output-weights"
)
WIDTHS = [96 * (1 + i % 3 * 2) for i in range(7)]
LAYERS = [64 * (64 + 2 * 32 + 64 + 3 * width) for width in WIDTHS]  # weights in matmuls
ATTENTION = 2 * 32 * 64  # forward FLOPs of a layer's, a token


def write_fork(folder: Path) -> str:
    """Copy model/llama.py and edit it the way a person would."""
    text = (ROOT / "model" / "llama.py").read_text()
    for old, new in EDITS.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in model/llama.py"
        text = text.replace(old, new)
    path = folder / "wide.py"
    path.write_text(text)
    return str(path)


def provider_of(path: str):
    """Load the fork; return its model provider."""
    spec = importlib.util.spec_from_file_location("wide", path)
    wide = importlib.util.module_from_spec(spec)
    sys.modules["wide"] = wide
    spec.loader.exec_module(wide)

    def provider(config, ctx, recompute=None, stages=None):
        size = wide.LlamaConfig(**model_sizes.of_model(config.model))
        return wide.Llama(size, ctx, recompute, stages)

    return provider


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_fork(tmp_path_factory.mktemp("fork"))


@pytest.fixture(scope="module")
def fork(path):
    return provider_of(path)


def real(config, provider, grid=None):
    """Build the fork on a CPU, in fp64, with weights."""
    kinds = (torch.float64, torch.float64, torch.device("cpu"), GradientSink(torch.float64))
    ctx = LayerContext(grid or Grid(), config.parallel.sequence_parallel, *kinds)
    model = provider(config, ctx)
    for _, param in model.named_parameters():
        torch.nn.init.normal_(param, 0.0, 0.02)
    return model


def tokens_of(config):
    return torch.randint(0, 300, (config.batch.micro_batch_size, config.model.seq_length))


def test_flops_and_parameters(fork):
    """Against torch's own counter in a real forward and backward; attention, which it counts whole,
    by hand."""
    config = read(FLAGS)
    model, tokens, counter = real(config, fork), tokens_of(config), FlopCounterMode(display=False)
    with counter:
        model(tokens, tokens).sum().backward()
    aten = torch.ops.aten
    products = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (aten.mm, aten.addmm))
    profile = model_profile(config, fork)
    assert profile.flops == products / tokens.numel() + 3 * 7 * ATTENTION
    assert profile.layers == tuple(2 * weights + ATTENTION for weights in LAYERS)
    assert profile.head == 2 * 2 * 64 * 300
    assert profile.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_balance_knows_each_layer(fork, p):
    config = read(f"{FLAGS} --pipeline-model-parallel-size {p} --global-batch-size 16", p)
    costs = [2 * weights + ATTENTION for weights in LAYERS]

    def slowest(bounds):
        work = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        return max([*work[:-1], work[-1] + 4 * 64 * 300])

    cut = stages_of(config, fork)
    found = slowest([0, *(stage.last for stage in cut)])
    assert found == min(slowest([0, *bars, 7]) for bars in combinations(range(8), p - 1))
    assert max(pipeline_stages.costs(config, fork).forward) == found


ITEM = ("x * x.abs().max().item()", "item() cannot be called on meta tensors: the model asks")


@pytest.mark.parametrize(
    "program, wrong, says",
    [
        ("--dry-run", *ITEM),
        ("", "x @ x", "RuntimeError: "),
        ("plan.py", "x + nowhere", "NameError: name 'nowhere' is not defined"),
        pytest.param("--rehearse", *ITEM, marks=pytest.mark.prove),
    ],
)
def test_a_forward_that_fails_on_meta_tensors_is_named_by_its_line(
    program, wrong, says, tmp_path, capsys, monkeypatch
):
    """In one sentence, of each program that runs the fork there before its first step."""
    text = (ROOT / "model" / "llama.py").read_text()
    line = "        return h + self.mlp(x)\n"
    assert text.count(line) == 1
    path = tmp_path / "wrong.py"
    path.write_text(text.replace(line, f"        return h + self.mlp({wrong})\n"))
    number = text[: text.index(line)].count("\n") + 1
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
        f"--vocab-size 128 --train-iters 1 --lr 1 --device cpu --model-file {path}"
    )
    monkeypatch.chdir(tmp_path)
    if program == "plan.py":
        code = plan.main([words, "2xcpu"])
    elif program == "--rehearse":  # which replaces functions of torch in its process
        argv = [ROOT / "pretrain_llama.py", *words.split(), program, "--rehearse-device", "cpu"]
        done = subprocess.run([sys.executable, *argv], stderr=subprocess.PIPE, text=True)
        code = done.returncode
    else:
        code = pretrain_llama.main([program, *words.split()] if program else words.split())
    err = done.stderr if program == "--rehearse" else capsys.readouterr().err
    said = err.splitlines()[-1]
    assert code == 2 and f"--model-file {path}: forward, line {number}: " in said and says in said
