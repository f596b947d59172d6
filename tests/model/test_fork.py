# SPDX-License-Identifier: Apache-2.0
"""Fork the model as a user would: copy the file, rename the class, change a layer.

The fork trains on 2 ranks under tensor, data or pipeline parallelism, is saved in one layout and
resumed in others. It adds a gain vector to the attention's output, whose gradient is a partial sum
over tp under sequence parallelism, and a temperature to the logits, partial because each rank has
its own columns. Both are ordinary autograd code: `mpu.gradients.use` sends the gradient to the
sink, and the region says over which axis it is partial. Nothing else is changed: --model-file names
the fork.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pretrain_llama
from model.load import ModelFile, load_model_file
from tests.model.twin import gathered
from tests.saved import check_equal, stored
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

ROOT = Path(__file__).resolve().parents[2]


def write_fork(folder: Path) -> Path:
    """Copy model/llama.py and edit it the way a person would."""
    text = (ROOT / "model" / "llama.py").read_text()
    edits = {
        "class Llama(nn.Module)": "class Alpaca(nn.Module)",
        "from mpu.param import draw_normal, placement_of": (
            "from mpu.gradients import use\nfrom mpu.param import Region, draw_normal, placement_of"
        ),
        "        self.proj = RowParallelLinear(a * d, h, ctx=ctx, bias=self.proj_bias)\n": (
            "        self.proj = RowParallelLinear(a * d, h, ctx=ctx, bias=self.proj_bias)\n"
            "        self.sink = ctx.sink\n"
            "        self.gain = ctx.replicated_parameter((h,), Region.SEQUENCE_PARALLEL)\n"
        ),
        "        return self.proj(y)\n": (
            "        return self.proj(y) * use(self.gain, self.sink)\n"
        ),
        "            self.norm = self.norm_type(": (
            "            columns = Region.TENSOR_PARALLEL\n"
            "            self.temperature = ctx.replicated_parameter((1,), columns)\n"
            "            self.norm = self.norm_type("
        ),
        "        return self.head(h)\n": (
            "        return self.head(h) * use(self.temperature, self.ctx.sink)\n"
        ),
        "def hf_names(model: Llama)": "def hf_names(model)",
        '-> "Llama":': '-> "Alpaca":',
        "Model, ModelConfig = Llama,": "Model, ModelConfig = Alpaca,",
    }
    for old, new in edits.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in model/llama.py"
        text = text.replace(old, new)
    path = folder / "alpaca.py"
    path.write_text(text)
    return path


def build_fork(
    comm, path: str, tp: int, pp: int, zero: int, seed: int = 3
) -> tuple[ModelFile, pretrain_llama.Run]:
    """Build the fork on one rank, in fp64."""
    settings = Config(
        ModelConfig(
            2, 16, 4, 8, ffn_hidden_size=24, num_query_groups=2, vocab_size=50,
            make_vocab_size_divisible_by=1, untie_embeddings_and_output_weights=True,
            model_file=path,
        ),
        ParallelConfig(
            comm.size, tp, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1,
            pipeline_schedule="zb-h1" if pp > 1 else None,  # weight gradients that wait
            zero_stage=zero, ddp_bucket_size=1000, overlap_param_gather=zero > 0,
        ),
        BatchConfig(2, 4),
        OptimizerConfig(lr=1e-2, lr_decay_style="constant", weight_decay=0.0, clip_grad=0.0),
        run=RunConfig(seed=seed, dtype=torch.float64),
    )  # fmt: skip
    run = pretrain_llama.build(
        settings, comm.grid(tp, pp=pp), torch.device("cpu"), FailureMonitor()
    )
    return load_model_file(path), run


def train(run: pretrain_llama.Run, steps: int) -> list[float]:
    """Train on the same few rows; return the losses."""
    rows = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    dp, pp = run.grid.dp, run.grid.pp.size
    share = 4 // dp.size
    rows = rows[dp.rank * share : (dp.rank + 1) * share]
    batches = [
        Batch(part[:, :-1], part[:, 1:], None, None, None, 0, part[:, 1:].numel())
        for part in rows.chunk(pp)
    ]
    return [pretrain_llama.train_step(run, batches, 1e-2)[0].item() for _ in range(steps)]


def train_steps(comm, path: str, tp: int, pp: int, zero: int, steps: int = 2) -> dict:
    _, run = build_fork(comm, path, tp, pp, zero)
    losses = train(run, steps)
    grads = {
        name: grad.tolist()
        for name, grad in gathered(run.sink.buckets, "grad_shard").items()
        if "gain" in name or "temperature" in name
    }
    return {"losses": losses, "grads": grads}


def go_on(comm, path: str, way: tuple[int, int, int], load: str, save: str, at: int) -> list[float]:
    """Load what another layout saved after `at` steps, if any, save it again as it is (to
    `save`/again), train two steps and save."""
    alpaca, run = build_fork(comm, path, *way, seed=3 if at == 0 else 4)

    def saver(folder: str) -> Saver:
        same = replace(run.config.run, seed=3)  # only the initial weights differ
        config = replace(run.config, checkpoint=CheckpointConfig(save=folder, load=load), run=same)
        names, hf = alpaca.hf_names(run.model), (alpaca.hf_config, alpaca.from_hf_config)
        return Saver(
            config, run.model.ctx, run.model, run.optimizer, names, *hf, {}, lambda line: None
        )

    if at:
        assert saver(load).resume.load() == (at, 4 * at)
        saver(f"{save}/again").save(at, 4 * at, must=True)
    losses = train(run, 2)
    saver(save).save(at + 2, 4 * (at + 2), must=True)
    return losses


def test_a_fork_trains_on_two_ranks(world, tmp_path):
    path = str(write_fork(tmp_path))
    (one,) = world(1).run(train_steps, path, 1, 1, 0)
    assert one["losses"][1] < one["losses"][0]
    for tp, pp, zero in ((1, 1, 0), (1, 1, 3), (2, 1, 0), (1, 2, 0)):
        seen = set()
        for result in world(2).run(train_steps, path, tp, pp, zero):
            assert torch.allclose(
                torch.tensor(result["losses"]), torch.tensor(one["losses"]), rtol=1e-10, atol=0
            )
            for name, grad in result["grads"].items():
                got, want = torch.tensor(grad), torch.tensor(one["grads"][name])
                assert (got - want).norm() <= 1e-12 * want.norm(), (tp, pp, zero, name)
                seen.add(name)
        assert seen == one["grads"].keys()


@pytest.mark.prove
def test_a_fork_is_saved_in_one_layout_and_loaded_in_others(world, tmp_path):
    """tp 2 -> pp 2 -> dp 2 at ZeRO level 3 -> one rank: what is loaded is what was saved, its own
    parameters and their state included, and it trains like one that never moved."""
    path = str(write_fork(tmp_path))
    ways = [(2, (2, 1, 0)), (2, (1, 2, 0)), (2, (1, 1, 3)), (1, (1, 1, 0))]
    losses, folders, at = [], [], 0
    for size, way in ways:
        load, save = str(folders[-1]) if folders else "", str(tmp_path / str(at))
        found = world(size).run(go_on, path, way, load, save, at)
        assert all(each == found[0] for each in found)
        losses += found[0]
        if folders:
            saved, again = (Path(folder) / f"step_{at:08d}" for folder in (load, f"{save}/again"))
            check_equal(stored(saved), stored(again))
        folders.append(save)
        at += 2
    (straight,) = world(1).run(train_steps, path, 1, 1, 0, at)
    assert losses == pytest.approx(straight["losses"], rel=1e-10) and losses[-1] < losses[0]
    last = stored(Path(folders[-1]) / f"step_{at:08d}")
    for own, shape in {"layers.1.attention.gain": (16,), "temperature": (1,)}.items():
        for kind in ("", ".exp_avg", ".exp_avg_sq"):
            first = stored(Path(folders[0]) / "step_00000002")[f"{own}{kind}"]
            assert last[f"{own}{kind}"].shape == shape
            assert first.all() and not torch.equal(first, last[f"{own}{kind}"])
