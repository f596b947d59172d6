# SPDX-License-Identifier: Apache-2.0
"""Micro-batches from CUDA graphs, by an imitation of torch.cuda's class, have eager steps' bits.

The imitation holds a capture to what a graph promises: nothing computes in it, and a replay does
the recorded operations again in the memory of the capture, with the numbers that the host had then.
"""

import inspect
import shlex
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_llama
from mpu.gradients import use
from mpu.grid import Grid
from mpu.layers import cross_entropy, fused
from mpu.layers.attention import core as attention
from tests.model.test_auxiliary_loss import FORK
from training.data.batch import DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.cuda_graph import Graphs, eager

FLAGS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 8
    --vocab-size 64 --train-iters 9 --lr 1e-2 --mock-data --fp64 --device cpu
    --untie-embeddings-and-output-weights --clip-grad 0
"""


class Recorder(TorchDispatchMode):
    """Run operations, keep them, and undo what they change of older tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.own, self.keep = [], {}, set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                x = args[i] if i < len(args) else kwargs[argument.name]
                key = x.untyped_storage().data_ptr()
                if key not in self.own and key not in self.before:
                    storage = x.untyped_storage()
                    self.before[key] = (storage, storage.clone())
        out = func(*args, **kwargs)
        made = [y for y in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(y)]
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs.values()))}
        self.own |= {y.untyped_storage().data_ptr() for y in made} - given
        self.keep.append((out, args, kwargs))  # so no address is used again
        self.calls.append((func, args, kwargs, out))
        return out


def tensors(values):
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (tuple, list)) or not isinstance(value, (str, bytes)) and hasattr(
            value, "__iter__"
        ):  # fmt: skip
            yield from tensors(value)


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph=False):
        self.calls = None

    def pool(self):
        return (0, 1)

    def reset(self):
        self.calls = None

    def replay(self):
        assert self.calls is not None, "replay before a capture has ended"
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                found = func(*args, **kwargs)
                pairs = zip(tensors([out]), tensors([found]), strict=True)
                for to, x in pairs:
                    if to.data_ptr() != x.data_ptr():
                        to.copy_(x)


class Cuda:
    """torch.cuda, as far as Graphs uses it."""

    CUDAGraph = CUDAGraph

    def __init__(self):
        self.captures = 0

    @contextmanager
    def graph(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        self.captures += 1
        with Recorder() as recorder:
            yield
        cuda_graph.calls = recorder.calls
        for storage, old in recorder.before.values():
            storage.copy_(old)  # nothing has computed


@pytest.fixture(autouse=True)
def operations_of_torch(monkeypatch):
    """Let no operation pass torch's dispatcher by, as none does on a GPU."""
    monkeypatch.setattr(fused, "fits", lambda *args, **kwargs: False)
    monkeypatch.setattr(cross_entropy, "fits", lambda *args, **kwargs: False)
    monkeypatch.setattr(attention, "takes_native", lambda *args: False)


def build(more=""):
    config = parse(shlex.split(f"{FLAGS} {more}"), 1)
    return pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())


def batches(step, count, masks=False):
    g = torch.Generator().manual_seed(step)
    rules = DocumentRules(3, masks, False, masks)
    rows = torch.randint(0, 64, (count, 2, 9), generator=g).numpy()
    return [make_batch(each, rules, i) for i, each in enumerate(rows)]


def train(run, counts, masks=False):
    found = []
    for step, count in enumerate(counts):
        loss, norm, _ = pretrain_llama.train_step(run, batches(step, count, masks), 1e-2)
        run.iteration += 1
        found += [loss.clone(), norm.clone()]
    return [*found, *(p.detach().clone() for p in run.model.parameters())]


def graphs_of(run, warmup=1):
    cuda, said = Cuda(), []
    run.compute = Graphs(
        pretrain_llama.run_schedule, run.config.parallel, warmup, said.append, cuda
    )
    return run.compute, cuda, said


@pytest.mark.parametrize("more,counts,masks,captures,replays", [
    ("", [4] * 4, False, 2, 12),
    ("", [1, 1, 1], False, 1, 2),
    ("--overlap-grad-reduce", [3] * 4, False, 2, 6),
    ("--recompute-granularity selective", [3] * 3, True, 2, 6),
    ("--recompute-granularity full --fused-linear-cross-entropy", [2] * 3, False, 2, 4),
    ("--ddp-bucket-size 999 --use-distributed-optimizer", [2, 2, 4, 4], False, 4, 10),
], ids=["all", "one", "buckets leave", "masks", "recomputed", "another batch size"])  # fmt: skip
def test_steps_have_the_bits_of_eager_ones(more, counts, masks, captures, replays):
    run = build(more)
    graphs, cuda, said = graphs_of(run)
    found = train(run, counts, masks)
    want = train(build(more), counts, masks)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert (cuda.captures, graphs.replays) == (captures, replays)
    assert said == ["--cuda-graph: micro-batches run from CUDA graphs from here on"]


def test_a_graph_reads_what_share_of_a_steps_tokens_counts(tmp_path):
    """Another one in each step: a fork's auxiliary loss is multiplied by it."""
    (tmp_path / "fork.py").write_text(FORK)
    more = f"--eod-mask-loss --model-file {tmp_path}/fork.py"
    run, other = build(more), build(more)
    graphs, _, _ = graphs_of(run)
    found, want = (train(each, [3] * 5, True) for each in (run, other))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    losses = run.model.ctx.auxiliary_losses
    counts = [sum(batch.token_count for batch in batches(step, 3, True)) for step in range(5)]
    assert graphs.replays == 12 and len({*counts}) > 1 and losses.share == counts[-1] / 48
    # a graph adds the values of a micro-batch first: fp64 rounds that sum in another order
    torch.testing.assert_close(
        losses.mean, other.model.ctx.auxiliary_losses.mean, rtol=1e-15, atol=0
    )


def test_the_warm_up_is_eager():
    run = build()
    graphs, cuda, said = graphs_of(run, warmup=3)
    train(run, [2] * 3)
    assert cuda.captures == graphs.replays == 0 and not said


def test_graphs_are_destroyed_before_the_process_groups(monkeypatch):
    """NCCL's commDestroySync polls until no graph holds the communicator; here it says so."""
    run, made = build(), []
    graphs, cuda, _ = graphs_of(run)
    cuda.CUDAGraph = lambda: made.append(CUDAGraph()) or made[-1]
    train(run, [2, 2, 4, 4])  # captured again for another number of tokens
    assert len(made) == 4 and graphs.captured

    def destroy_process_group():
        alive = [graph for graph in made[-2:] if graph.calls is not None]
        assert not alive, "waits for a graph, without end"
        done.append(True)

    done = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.destroy_process_group", destroy_process_group)
    run.grid.world_size = 2
    run.grid.close()
    assert done == [True] and not graphs.captured


def test_an_evaluation_and_a_profile_are_eager():
    run = build()
    graphs, cuda, _ = graphs_of(run, warmup=0)
    run.engine.spans = []
    train(run, [2])
    assert cuda.captures == 0
    run.engine.spans = None
    train(run, [2])
    assert cuda.captures == 2


def test_plain_autograd_is_told_and_stays_eager():
    run = build()
    graphs, cuda, said = graphs_of(run)
    run.sink.buckets[0].plain = True
    train(run, [2] * 3)
    assert cuda.captures == 0 and len(said) == 1 and use.__name__ in said[0]


def test_the_imitation_notices_a_read_of_the_host():
    cuda, x = Cuda(), torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with cuda.graph(CUDAGraph()):
            x.sum().item()


def test_the_imitation_computes_nothing_while_it_captures():
    cuda, graph, x, y = Cuda(), CUDAGraph(), torch.ones(3), torch.zeros(3)
    with cuda.graph(graph):
        z = x * 2
        y.add_(z)
    assert y.tolist() == [0, 0, 0]
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert y.tolist() == [20, 20, 20] and z.tolist() == [10, 10, 10]


def test_the_imitation_takes_what_torch_takes():
    theirs = inspect.signature(torch.cuda.graph.__init__).parameters
    ours = inspect.signature(Cuda.graph).parameters
    assert [*ours][1:] == [*theirs][1 : len(ours)]
    defaults = [ours[name].default for name in [*ours][2:]]
    assert defaults == [theirs[name].default for name in [*ours][2:]]
    for name in ("replay", "pool", "reset"):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
        assert [*inspect.signature(getattr(CUDAGraph, name)).parameters] == ["self"]


def test_who_is_eager():
    overlap = SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=True, shard_size=2)
    assert [eager(overlap, i, 4) for i in range(4)] == [True, False, False, True]
    plain = SimpleNamespace(overlap_grad_reduce=False, overlap_param_gather=True, shard_size=1)
    assert [eager(plain, i, 4) for i in range(4)] == [False] * 4
