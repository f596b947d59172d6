# SPDX-License-Identifier: Apache-2.0
"""Which private names of torch are there, and what Weft does without each: the same numbers, or a
sentence where that feature is asked for.

On another torch `test_this_torch_has_every_name` lists those that are gone or take other arguments.
The other tests hide a name in torch itself.
"""

import importlib
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu import torch_private
from mpu.comm.collectives import ProcessGroupTransport
from mpu.comm.transport import Axis
from mpu.context import LayerContext
from mpu.gradients import GradientSink, WeightGradientQueue
from mpu.grid import Grid, group_options
from mpu.kernels.by_address import CALLS
from mpu.layers import cross_entropy, fused
from mpu.layers.attention.backends import Card, kernel_of
from mpu.layers.attention.block_attention import block_attention
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.fused import apply_rope
from mpu.layers.linear import ColumnParallelLinear
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.module_tracker import ModuleTracker
from tests.launcher import Launcher
from tests.mpu.layers.attention.test_block_attention import ReadsByAddress, flash_stand_in
from training.faults.hang_watch import flight_recorder
from training.flags.parse import parse
from training.settings.config import UsageError

ROOT = Path(torch_private.__file__).parents[1]
ATEN = "torch.ops.aten"
FLASH, CPU = f"{ATEN}._scaled_dot_product_flash_attention", "_for_cpu"
CUDNN = f"{ATEN}._scaled_dot_product_cudnn_attention"
FEW = "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 2"
FEW += " --seq-length 16 --lr 1e-2 --train-iters 3"
H100 = Card("cuda", 9, 0, 91900)


def owner_of(path: str) -> tuple[Any, str]:
    parts = path.split(".")
    found: Any = torch
    for n, part in enumerate(parts[1:-1], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:n]))
        found = getattr(found, part)
    return found, parts[-1]


def hide(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Let torch itself be without a name."""
    owner, name = owner_of(path)
    if path.startswith("torch.ops") and not name.startswith("_schema"):  # looked up when asked
        kind, found = type(owner), type(owner).__getattr__

        def without(self: Any, asked: str) -> Any:
            if self is owner and asked == name:
                raise AttributeError(f"{path} is hidden")
            return found(self, asked)

        monkeypatch.setattr(kind, "__getattr__", without)
        monkeypatch.delitem(vars(owner), name, raising=False)
    elif isinstance(owner, type) and name not in vars(owner):  # inherited from a class in C

        def missing(self: Any) -> None:
            raise AttributeError(f"{path} is hidden")

        monkeypatch.setattr(owner, name, property(missing), raising=False)
    elif isinstance(sys.modules.get(path), type(sys)):
        monkeypatch.setitem(sys.modules, path, None)
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.delattr(owner, name)


# which names there are


def test_this_torch_has_every_name():
    """On a newer torch: the list of what it lacks, each with what is done without it."""
    assert torch_private.lacking() == []
    named = {name.path for name in torch_private.NAMES}
    met = [row for row in CALLS if row.startswith("aten::_")]  # a rehearsal recognises them
    for row in met:
        assert torch_private.find(row.replace("aten::", f"{ATEN}.")), row
    assert len(named) == len(torch_private.NAMES) > 30 and len(met) > 5


@pytest.mark.parametrize("path", [name.path for name in torch_private.NAMES if not name.nccl])
def test_a_name_that_is_hidden_is_the_one_that_is_named(monkeypatch, path):
    if path in ("torch.Tensor._version", "torch.autograd.Function._backward_cls"):
        return  # of a class: see below
    hide(monkeypatch, path)
    own = [line for line in torch_private.lacking() if line.startswith(f"no {path}: ")]
    assert len(own) == 1 and len(own[0]) > len(path) + 10
    others = {line.split(": ")[0] for line in torch_private.lacking()} - {f"no {path}"}
    assert all(path in other for other in others), "names inside of it alone"


def test_an_operator_that_takes_other_arguments_is_lacking(monkeypatch):
    """As aten::_flash_attention_forward did from version to version."""

    def argument(name: str) -> Any:
        return SimpleNamespace(name=name)

    schema = SimpleNamespace(arguments=[argument(n) for n in ("query", "key", "value", "causal")])
    other = type("Packet", (), {"default": SimpleNamespace(_schema=schema)})()
    monkeypatch.setitem(vars(torch.ops.aten), FLASH.rpartition(".")[2], other)
    (line,) = torch_private.lacking()
    assert line.startswith(f"{FLASH} does not take is_causal: auto computes")
    assert not torch_private.has_attention("flash") and torch_private.has_attention("cpu")


# attention


def gradients(kernel: Any, packed: PackedSeqParams | None, window: int = 0) -> list[Tensor]:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, n, 13, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    out = block_attention(q, k, v, packed, window, kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


@pytest.mark.parametrize(
    ("kernel", "lacks"),
    [("flash", "_flash_attention_forward"), ("flash", FLASH), ("flash", f"{FLASH}_backward"),
     ("cudnn", CUDNN), ("cudnn", f"{CUDNN}_backward"), ("cudnn", FLASH)],
)  # fmt: skip
def test_blocks_on_a_gpu_without_torchs_operators(monkeypatch, kernel, lacks):
    """By stand-ins. Blocks of a window have single keys, which cuDNN does not take."""
    lacks = lacks.rpartition(".")[2]

    class Lacks(ReadsByAddress):
        _flash_attention_forward = staticmethod(flash_stand_in)

        def __getattribute__(self, name: str) -> Any:
            if name == lacks:
                raise AttributeError(f"{name} is hidden")
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            if name == lacks:
                raise AttributeError(f"{name} is hidden")
            return super().__getattr__(name)

    packed = PackedSeqParams.of([2, 7, 4]) if kernel == "flash" else None
    want = [gradients("math", packed, window) for window in (0, 4)]
    monkeypatch.setattr(torch_private, "aten", Lacks())
    torch.testing.assert_close([gradients(kernel, packed, window) for window in (0, 4)], want)


def test_a_flag_that_needs_an_operator_is_refused_and_auto_takes_another_kernel(monkeypatch):
    bf16, whole = torch.bfloat16, H100
    assert kernel_of("auto", whole, bf16, 64, "blocks") == "cudnn"
    hide(monkeypatch, CUDNN)
    lacks = whole._replace(lacks=torch_private.attention_lacks())
    assert lacks.lacks == (CUDNN.rpartition(".")[2],)
    assert kernel_of("auto", lacks, bf16, 64, "blocks") == "flash"
    assert kernel_of("auto", lacks, bf16, 64, "rows") == "cudnn"  # torch calls its own
    for work in ("rows", "blocks"):
        with pytest.raises(ValueError, match="^--attention-backend fused: torch .* has no aten::"):
            kernel_of("fused", lacks, bf16, 64, work)
    hide(monkeypatch, FLASH)
    lacks = whole._replace(lacks=torch_private.attention_lacks())
    assert kernel_of("auto", lacks, bf16, 64, "blocks") == "math"
    assert kernel_of("auto", lacks, bf16, 64, "documents") == "flash"  # by another operator
    with pytest.raises(ValueError, match="^--attention-backend flash: .* as Weft calls it"):
        kernel_of("flash", lacks, bf16, 64, "rows")
    hide(monkeypatch, f"{ATEN}._flash_attention_forward")
    lacks = whole._replace(lacks=torch_private.attention_lacks())
    assert kernel_of("auto", lacks, bf16, 64, "documents") == "math"


# other kernels


# autograd


def test_results_are_copied_where_torch_does_not_say_who_made_them(monkeypatch):
    """RoPE and the loss write over what a linear gave: the same numbers from a copy."""
    layer = ColumnParallelLinear(8, 48, ctx=LayerContext(Grid()))
    torch.nn.init.normal_(layer.weight)
    labels, angle = torch.randint(48, (5, 2)), torch.rand(5, 1, 1, 4)

    def found() -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(5, 2, 8, requires_grad=True)
        loss = vocab_parallel_cross_entropy(layer(x), labels, 48, layer.ctx)
        turned = apply_rope(layer(x), angle.cos(), angle.sin(), 2, 2)
        parts = (loss.sum() + sum(y.square().sum() for y in turned),)
        return [loss.detach(), *torch.autograd.grad(parts, x)]

    want = found()

    def unknown(x: Tensor, function: Any) -> bool:
        return torch_private.is_result_of(x, object)  # which has no such name

    for file in (cross_entropy, fused):  # torch itself needs the name, so it cannot be hidden
        monkeypatch.setattr(file, "is_result_of", unknown)
    torch.testing.assert_close(found(), want)


def test_a_storage_is_one_python_object_as_long_as_it_lives():
    """A plain one, one on meta, one that only autograd keeps."""
    for device in ("cpu", "meta"):
        x = torch.ones(6, 4, device=device, requires_grad=True)
        y = (x * 2).exp()
        node, known = y.grad_fn, id(y.untyped_storage())
        others = [y[2:].untyped_storage(), y.detach().view(-1).untyped_storage()]
        assert {id(one) for one in others} == {known}
        del y, others
        made = [torch.empty(6, 4, device=device).untyped_storage() for _ in range(100)]
        assert id(node._saved_result.untyped_storage()) == known not in map(id, made)
        z = torch.empty(8, device=device)
        known = id(z.untyped_storage())
        z.untyped_storage().resize_(0)
        assert id(z.untyped_storage()) == known


def test_tools_that_follow_a_model_say_what_is_lacking(monkeypatch, capsys, tmp_path):
    import pretrain_llama
    from forecast.rehearsal import main as rehearsal
    from tools import bisect_runs, explain, fork_check
    from training.run.watch.first_nonfinite import find_first

    path = "torch._C._current_autograd_node"
    hide(monkeypatch, path)
    says = f"is not available: torch {torch.__version__} has no {path}"
    with pytest.raises(ValueError, match="^following a model through its backward is not avail"):
        ModuleTracker(torch.nn.Linear(2, 2), WeightGradientQueue(), GradientSink(torch.float32))
    assert says in find_first(*[None] * 5)[0]  # type: ignore[arg-type]
    assert explain.main([]) == 2 and says in capsys.readouterr().err
    model = ["--model", str(ROOT / "model/llama.py")]
    assert fork_check.main(model) == 2 and says in capsys.readouterr().err
    assert bisect_runs.main(["x", "y"]) == 2 and says in capsys.readouterr().err
    assert rehearsal.main(pretrain_llama, [*FEW.split(), "--rehearse"]) == 2
    assert f"pretrain_llama.py --rehearse: --rehearse {says}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["FakeTensor", "FakeTensorMode"])
def test_a_rehearsal_without_fake_tensors_is_refused(monkeypatch, capsys, name):
    import pretrain_llama
    from forecast.rehearsal import main as rehearsal

    path = f"torch._subclasses.fake_tensor.{name}"
    hide(monkeypatch, path)
    assert rehearsal.main(pretrain_llama, [*FEW.split(), "--rehearse"]) == 2
    assert f"--rehearse is not available: torch {torch.__version__} has no {path}" in (
        capsys.readouterr().err
    )


def test_what_sees_operations_is_refused_where_torch_shows_none():
    from mpu.meta_tensors import MetaOperations

    class Sees(torch_private.NoMode):
        """As MetaOperations, where torch has no TorchDispatchMode."""

    assert issubclass(MetaOperations, torch_private.DispatchMode)
    with pytest.MonkeyPatch.context() as patch:
        hide(patch, torch_private.DISPATCH_MODE)
        with pytest.raises(ValueError, match="seeing what torch computes is not available"):
            Sees().__enter__()
    with pytest.raises(ValueError, match=r"does not say what .* takes \(its _schema\)"):
        torch_private.schema(SimpleNamespace())


# modes, groups, memory and files


def test_options_of_a_group_without_a_time_limit(monkeypatch):
    import torch.distributed as dist

    class Options:
        __slots__ = ("config", "high")

        def __init__(self, is_high_priority_stream: bool) -> None:
            self.high, self.config = is_high_priority_stream, SimpleNamespace()

    group = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    made = group_options(timedelta(seconds=5), True, {"max_ctas": 4})
    assert made.high and made.config.max_ctas == 4


@pytest.mark.parametrize("name", ["empty", "rendezvous"])
def test_gpus_that_share_no_memory_say_why(monkeypatch, name):
    pytest.importorskip("triton")
    from mpu.comm import symmetric_cuda
    from mpu.comm.symmetric import Unavailable

    path = f"torch.distributed._symmetric_memory.{name}"
    hide(monkeypatch, path)
    monkeypatch.setattr(symmetric_cuda, "gather_bytes", lambda data, *about: [data] * 2)
    axis = Axis("tp", 0, 2, (0, 1), ProcessGroupTransport(None))
    with pytest.raises(Unavailable, match=f"^memory that GPUs share is not available: .*{path}"):
        symmetric_cuda._Memory(axis, torch.device("cpu"), 1024)


def test_a_hang_is_reported_without_a_flight_recorder(monkeypatch):
    if torch_private.nccl_record() is not None:
        hide(monkeypatch, "torch._C._distributed_c10d._dump_nccl_trace_json")
    assert flight_recorder() == ""


@pytest.mark.parametrize("name", ["_record_memory_history", "_dump_snapshot"])
def test_a_record_of_memory_is_refused_by_its_flag(monkeypatch, name):
    words = [*FEW.split(), "--device", "cuda", "--dry-run", "--record-memory-history"]
    words += ["--micro-batch-size", "1"]
    assert parse(words, 1).log.record_memory_history
    hide(monkeypatch, f"torch.cuda.memory.{name}")
    with pytest.raises(UsageError, match=f"--record-memory-history is not .*{name}.*omit the flag"):
        parse(words, 1)


def test_an_export_for_megatron_is_refused_first(monkeypatch, tmp_path):
    from tools.checkpoints.mcore_export import export_mcore

    hide(monkeypatch, "torch.distributed.checkpoint.filesystem._StorageInfo")
    with pytest.raises(ValueError, match="^--to-mcore is not available: torch .*_StorageInfo"):
        export_mcore(tmp_path / "none", tmp_path / "out", print)
    assert not list(tmp_path.iterdir())


# a whole run

HIDING = """
def missing(x):
    raise AttributeError("hidden")

for name in ("_fused_adamw_", "_foreach_add_", "_foreach_sub_", "_foreach_zero_", "_foreach_copy_"):
    delattr(torch, name)
for module, name in ((torch.overrides, "_get_current_function_mode_stack"),
                     (torch.utils._python_dispatch, "_get_current_dispatch_mode_stack"),
                     (torch._C, "_current_autograd_node")):
    delattr(module, name)
torch.Tensor._version = property(missing)
GONE = ("_linear_pointwise", "silu_backward", "_scaled_dot_product_flash_attention_for_cpu")
kind = type(torch.ops.aten)
found = kind.__getattr__
kind.__getattr__ = lambda self, name: missing(name) if name in GONE else found(self, name)
for space in (torch.ops.aten, torch.ops.mkldnn):
    for name in GONE:
        vars(space).pop(name, None)
"""


@pytest.mark.prove
def test_a_run_goes_on_without_them(launcher: Launcher, tmp_path):
    """With experts, their overlap, documents and host copies; losses of the same numbers."""
    (tmp_path / "hiding.py").write_text((ROOT / "model/moe.py").read_text() + HIDING)
    flags = f"""{FEW} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
        --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --micro-batch-size 1
        --global-batch-size 4 --reset-position-ids --reset-attention-mask --device cpu
        --moe-router-enable-expert-bias --moe-router-score-function sigmoid --num-workers 0
        --moe-router-load-balancing-type none --log-interval 1"""
    found = []
    for more in ("", f"--model-file {tmp_path}/hiding.py"):
        result = launcher.run(2, shlex.split(f"{flags} {more}"))
        assert result.codes == [0, 0], result.said(0)
        found.append([(row["loss"], row["grad_norm"]) for row in result.rows() if "loss" in row])
    assert len(found[0]) == 3
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]))
