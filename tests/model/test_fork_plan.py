# SPDX-License-Identifier: Apache-2.0
"""Fork the model and plan its run: dry run, balance, FLOPs, memory and traffic are the fork's.

The fork is a copy of model/llama.py with another MLP width in each layer, one more norm a layer and
a second output layer with a loss of its own. Nothing else is changed.
"""

import importlib.util
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pretrain_llama
from forecast.recording import ACTIVATIONS, LOGITS, WORKING, Recording, record
from forecast.traffic import SMALL, traffic
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from tests.sampling import sampled
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


def recorded(path: str, flags: str) -> Recording:
    """Return the recording of the fork on one rank."""
    return record(read(f"{FLAGS} {flags} --model-file {path}"), pretrain_llama)[0]


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


@pytest.mark.parametrize(
    "more", sampled(["--recompute-granularity full --recompute-num-layers 2", ""], 2)
)
def test_what_is_kept_for_backward(fork, path, more):
    """Against what autograd keeps in a real forward: three norms a layer, both heads' logits."""
    stage, whole = recorded(path, f"--fp64 {more}"), recorded(path, "--fp64")
    config = read(f"{FLAGS} --fp64")
    tokens = tokens_of(config)
    assert stage.most(LOGITS) == 2 * tokens.numel() * 300 * 8
    kept, model = {}, real(config, fork)
    model.rope(None, 32)
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model._rope]}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    # three numbers, tables of 4 sines and 4 cosines, tokens, labels and the other labels
    beside = 3 * 8 + 2 * 4 * 32 * 8 + 3 * 8 * tokens.numel()
    most = whole.most(ACTIVATIONS)
    assert most + whole.most(LOGITS) == sum(kept.values()) + beside
    if more:
        assert stage.most(ACTIVATIONS) < most and stage.most(WORKING) > 2 * most / 8


def traced(comm, path: str, flags: str) -> tuple[Counter, list[str]]:
    """Run a micro-batch on two tensor-parallel ranks; return what was sent, and the norms."""
    seen: Counter = Counter()

    class Trace:
        def issued(self, verb, axis, tensor, sent, async_op, label):
            whole = tensor.nbytes * (axis.size if verb == "all_gather" else 1)
            seen[axis.name, verb, whole] += 1

    config, grid = read(flags, 2), comm.grid(2)
    model = real(config, provider_of(path), grid.traced(Trace()))
    tokens = tokens_of(config)
    model(tokens, tokens).sum().backward()
    grid.traced(None)
    norms = [name for name, p in model.named_parameters() if p.placement.reduce_axes]
    return seen, norms


@pytest.mark.prove
@pytest.mark.parametrize("sp", ["--sequence-parallel", ""])
def test_traffic_is_what_two_ranks_send(world, tmp_path, sp):
    path = write_fork(tmp_path)
    flags = f"{FLAGS} --tensor-model-parallel-size 2 {sp} --fp64"
    seen, norms = world(2).run(traced, path, flags)[0]
    rows = traffic(read(f"{flags} --model-file {path}", 2), pretrain_llama)
    once = ("grad sum", *SMALL)
    found = Counter[tuple[str, str, int]]()
    for row in rows:
        if row.purpose not in once:
            found[row.axis, row.verb, row.bytes] += row.times
    assert found == seen
    loss = ("tp", "all_gather", 2 * 3 * 2 * 32 * 8)
    assert seen[loss] == 2  # one a head
    # a micro-batch's norms are summed once a step, three a layer and the last one
    partial = [row.bytes for row in rows if row.axis == "tp" and row.purpose == "grad sum"]
    padded = -(-len(norms) * 1024 // 2048) * 2048 * 8  # each to a block, all of them to two
    assert partial == ([padded] if sp else [])
    assert len(norms) == (3 * 7 + 1 if sp else 0)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("x * x.abs().max().item()", "item() cannot be called on meta tensors: the model asks"),
        ("x @ x", "RuntimeError: "),
        ("x + nowhere", "NameError: name 'nowhere' is not defined"),
    ],
)
@pytest.mark.parametrize(
    "program", ["--dry-run", "", "plan.py", pytest.param("--rehearse", marks=pytest.mark.prove)]
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
