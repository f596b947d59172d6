# SPDX-License-Identifier: Apache-2.0
"""Fork the model as a user would: copy the file, rename the class, change a layer; train on 2
ranks, cut by tensor, data or pipeline parallelism.

The fork adds a gain vector to the attention's output, whose gradient is a partial sum over tp under
sequence parallelism, and a temperature to the logits, partial because each rank has its own
columns. Both are ordinary autograd code: `mpu.param.use` sends the gradient to the sink, and the
Placement says over which axis it is partial. Neither mpu nor training is touched.
"""

import importlib.util
import sys
from pathlib import Path

import torch

import pretrain_llama
from mpu.comm.watch import Watch
from mpu.context import LayerContext
from mpu.pipeline.engine import Engine
from mpu.zero.buckets import GradientBuckets
from mpu.zero.layout import Sharing
from mpu.zero.optimizer import Optimizer
from tests.twin import gathered
from training.config import BatchConfig, Config, ModelConfig, ParallelConfig
from training.data.batch import Batch
from training.pipeline import rank_stages

ROOT = Path(__file__).resolve().parent.parent


def write_fork(folder: Path) -> Path:
    """Copy model/llama.py and edit it the way a person would."""
    text = (ROOT / "model" / "llama.py").read_text()
    edits = {
        "class Llama(nn.Module)": "class Alpaca(nn.Module)",
        "from mpu.param import draw_normal, tie, unique_parameters": (
            "from mpu.param import Placement, draw_normal, parameter, tie, unique_parameters, use"
        ),
        "        self.proj = RowParallelLinear(a * d, h, ctx=ctx)\n": (
            "        self.proj = RowParallelLinear(a * d, h, ctx=ctx)\n"
            "        self.ctx = ctx\n"
            "        place = Placement((h,), axis=ctx.tp, reduce_axes=ctx.replicated_over)\n"
            "        self.gain = parameter(place, ctx.dtype, ctx.device, ctx.sink)\n"
        ),
        "        return self.proj(y)\n\n    def decode": (
            "        return self.proj(y) * use(self.gain, self.ctx.sink)\n\n    def decode"
        ),
        "            self.norm = RMSNorm(": (
            "            place = Placement((1,), axis=ctx.tp, reduce_axes=(ctx.tp,))\n"
            "            self.temperature = parameter(place, ctx.dtype, ctx.device, ctx.sink)\n"
            "            self.norm = RMSNorm("
        ),
        "        loss = vocab_parallel": (
            "        logits = logits * use(self.temperature, self.ctx.sink)\n"
            "        loss = vocab_parallel"
        ),
        "def hf_names(model: Llama)": "def hf_names(model)",
        '-> "Llama":': '-> "Alpaca":',
        "    return {name: table[name] for name, _ in unique_parameters(model)}": (
            "    for name, _ in unique_parameters(model):\n"
            "        table.setdefault(name, (name,))\n"
            "    return {name: table[name] for name, _ in unique_parameters(model)}"
        ),
    }
    for old, new in edits.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in model/llama.py"
        text = text.replace(old, new)
    path = folder / "alpaca.py"
    path.write_text(text)
    return path


def train_two_steps(comm, path: str, tp: int, pp: int, zero: int) -> dict:
    spec = importlib.util.spec_from_file_location("alpaca", path)
    alpaca = importlib.util.module_from_spec(spec)
    sys.modules["alpaca"] = alpaca
    spec.loader.exec_module(alpaca)
    grid = comm.grid(tp, pp=pp)
    sink = GradientBuckets(grid, torch.float64, Sharing(zero, 1000, gather_ahead=True))
    ctx = LayerContext(grid, tp > 1, torch.float64, torch.float64, torch.device("cpu"), sink)
    config = alpaca.LlamaConfig(50, 16, 24, 2, 4, 2, make_vocab_size_divisible_by=1)
    schedule = "zb-h1" if pp > 1 else None  # weight gradients that wait
    parallel = ParallelConfig(
        comm.size, tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule
    )
    settings = Config(ModelConfig(2, 16, 4, 8, vocab_size=50), parallel, BatchConfig(2, 4))
    stages = rank_stages(settings, grid.pp.rank)
    model = alpaca.Alpaca(config, ctx, stages=stages)
    sink.attach(model, model.chunk_of)
    for names in sink.fill():
        model.initialize(3, names)
    optimizer = Optimizer(model, sink, grid, alpaca.parameter_group, lr=1e-2, clip=0.0)
    device, watch = torch.device("cpu"), Watch()
    engine = Engine(grid, ctx.queue, watch, ctx.dtype, device)
    run = pretrain_llama.Run(settings, grid, device, model, engine, sink, optimizer, watch)
    rows = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    share = 4 // grid.dp.size
    rows = rows[grid.dp.rank * share : (grid.dp.rank + 1) * share]
    batches = [
        Batch(part[:, :-1], part[:, 1:], None, None, None, 0, part[:, 1:].numel())
        for part in rows.chunk(pp)
    ]
    losses = [pretrain_llama.train_step(run, batches, 1e-2)[0].item() for _ in range(2)]
    grads = {
        name: grad.tolist()
        for name, grad in gathered(sink, "own_grad").items()
        if "gain" in name or "temperature" in name
    }
    return {"losses": losses, "grads": grads}


def test_a_fork_trains_on_two_ranks(world, tmp_path):
    path = str(write_fork(tmp_path))
    (one,) = world(1).run(train_two_steps, path, 1, 1, 0)
    assert one["losses"][1] < one["losses"][0]
    for tp, pp, zero in ((1, 1, 0), (1, 1, 3), (2, 1, 0), (1, 2, 0)):
        seen = set()
        for result in world(2).run(train_two_steps, path, tp, pp, zero):
            assert torch.allclose(
                torch.tensor(result["losses"]), torch.tensor(one["losses"]), rtol=1e-10, atol=0
            )
            for name, grad in result["grads"].items():
                got, want = torch.tensor(grad), torch.tensor(one["grads"][name])
                assert (got - want).norm() <= 1e-12 * want.norm(), (tp, pp, zero, name)
                seen.add(name)
        assert seen == one["grads"].keys()
