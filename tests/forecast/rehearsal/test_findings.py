# SPDX-License-Identifier: Apache-2.0
"""What a GPU run must not have in a step: waits of the host, wide dtypes, no kernel."""

from types import SimpleNamespace

import pytest
import torch

from forecast.rehearsal.events import Action, HostWait, Launch, Transfer, Where
from forecast.rehearsal.findings import communicators, launches, waits
from forecast.rehearsal.kernels_of_cuda import has_kernel, parse
from forecast.rehearsal.main import of_torch
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.watch import flops_of
from mpu.host_memory import read_values
from mpu.optim.offload import Offload
from training.settings.config import UsageError

BF, F32, F64 = "bfloat16", "float32", "float64"
PASS, UPDATE = Action("F chunk 0 micro-batch 0 in stage 0"), Action("the update of iteration 2")


def launch(op, dtypes, flops=0.0, host=(), nbytes=100, place="a.py:1"):
    shapes, where = ((4,),) * len(dtypes), Where("forward", place=place)
    return Launch(op, 0, shapes, dtypes[-1], (), (), nbytes, flops, where, (), tuple(dtypes), host)


def step(*events, dtype=torch.bfloat16, home=None):
    """Return a rehearsal whose second step has these events."""
    recorder = Recorder("cuda")
    recorder.events = [Action("iteration 1"), *events]
    run = SimpleNamespace(optimizer=SimpleNamespace(home=home))
    config = SimpleNamespace(run=SimpleNamespace(dtype=dtype))
    return SimpleNamespace(
        recorder=recorder, run=run, config=config, begin=0, first=1, loop=1, end=1 + len(events)
    )


MUCH = launch("aten::mm", (BF, BF, BF), flops=100.0, nbytes=10000, place="b.py:1")


@pytest.mark.parametrize(
    "event, kind",
    [
        (launch("aten::mm", (BF, BF, F32), flops=50.0), None),
        (launch("aten::mm", (F32, F32, F32), flops=50.0), "dtype"),
        (launch("aten::mm", (F32, F32, F32), flops=2.0), None),  # as a router's
        (launch("aten::addmm", (F32, BF, BF, F32), flops=50.0), None),  # behind what it adds to
        (launch("aten::add", (F64, F64), nbytes=500), "float64"),
        (launch("aten::add", (F64, F64), nbytes=50), None),  # as a norm's blocks
        (launch("aten::mkldnn_linear", (BF,)), "no kernel"),
        (launch("aten::add", (BF, BF), host=("a.py:1",)), "device"),
        (launch("aten::fill_", (BF, BF), host=("a.py:1",)), None),
    ],
    ids=str,
)
def test_what_a_bf16_run_must_not_launch(event, kind):
    found = [one.kind for one in launches(step(PASS, MUCH, event))]
    assert found == ([kind] if kind else [])


def test_an_fp32_run_multiplies_in_fp32():
    event = launch("aten::mm", (F32, F32), flops=50.0)
    assert list(launches(step(PASS, MUCH, event, dtype=torch.float32))) == []


def test_the_host_waits_where_the_program_says_so_or_where_it_updates():
    wait = HostWait(-1, 0, "aten::item", Where(place="a.py:1"))
    for action in (PASS, UPDATE):
        assert [one.kind for one in waits(step(action, wait))] == ["host read"]
        assert list(waits(step(action, wait._replace(declared=True)))) == []
    on_host = Offload([torch.zeros(1)], [torch.zeros(1)])
    assert list(waits(step(UPDATE, wait, home=on_host))) == []
    assert [one.kind for one in waits(step(PASS, wait, home=on_host))] == ["host read"]
    alone = step(PASS, wait)
    alone.begin = alone.first  # a first step makes tables
    assert list(waits(alone)) == []


@pytest.mark.parametrize("declared", [True, False])
def test_a_wait_is_declared_by_the_function_that_reads(declared):
    recorder = Recorder("cpu")

    class Value:
        def tolist(self):
            recorder.host_wait(reads="tolist")
            return [1]

    assert (read_values(Value()) if declared else Value().tolist()) == [1]
    (wait,) = recorder.events
    assert wait.declared is declared


def test_a_communicator_does_not_begin_in_a_step():
    one = Transfer(
        id=0, verb="all_reduce", axis="tp", group=(0, 1), peer=-1, number=0, bytes=8, sent=8,
        dtype=BF, shape=(4,), stream=1, origin=0, read=(), written=(), batch=-1, label="",
        where=Where(place="a.py:1"),
    )  # fmt: skip
    assert [found.kind for found in communicators(step(PASS, one))] == ["communicator"]
    assert list(communicators(step(PASS, one._replace(number=1)))) == []
    assert list(communicators(step(PASS, one._replace(verb="send")))) == []


def test_kernels_are_read_from_torchs_list():
    text = """
- func: on_both(Tensor self) -> Tensor
  dispatch:
    CPU, CUDA: both

- func: on_cpu(Tensor self) -> Tensor
  dispatch:
    CPU: alone
    MkldnnCPU: too

- func: made_of_others(Tensor self) -> Tensor

- func: two.a(Tensor self) -> Tensor
  dispatch:
    CPU: a

- func: two.b(Tensor self) -> Tensor
  structured_delegate: two.out
"""
    assert parse(text) == {"aten::on_cpu"}
    assert has_kernel("aten::mm") and has_kernel("weft::fused")
    assert not has_kernel("aten::to_mkldnn")


def test_a_product_in_place_has_the_flops_of_one_that_is_not():
    """Main gradients in bf16 are added to in place, of which torch's table has no formula."""
    out, a, b = (torch.empty(shape, device="meta") for shape in ((4, 6), (4, 8), (8, 6)))
    assert flops_of(torch.ops.aten.addmm_.default, (out, a, b), {}, out) == 2 * 4 * 6 * 8


@pytest.mark.parametrize("backward", [False, True])
def test_flash_attention_of_whole_rows_has_the_flops_of_their_squares(backward):
    """torch's formula takes [b, n, s, d], the operation without documents [b, s, n, d]."""
    b, s, n, d = 2, 512, 8, 64
    x = torch.empty(b, s, n, d, device="meta")
    products = 2.5 if backward else 1.0  # of the two of forward
    wanted = products * 4 * b * n * s * s * d / 2  # causal
    aten, lse = torch.ops.aten, torch.empty(b, n, s, device="meta")
    if backward:
        func = aten._flash_attention_backward.default
        args = (x, x, x, x, x, lse, None, None, s, s, 0.0, True, None, None)
    else:
        func = aten._flash_attention_forward.default
        args = (x, x, x, None, None, s, s, 0.0, True, False)
    assert flops_of(func, args, {}, (x,)) == wanted
    named = {"max_q": s, "max_k": s}
    if not backward:
        given = dict(cum_seq_q=None, cum_seq_k=None, **named, dropout_p=0.0, is_causal=True)
        given["return_debug_mask"] = False
        assert flops_of(func, (x, x, x), given, (x,)) == wanted




def test_what_torch_raises_is_no_mistake_in_the_flags():
    """A ValueError, too: of shapes, when the model runs while the flags are read."""
    x = torch.zeros(2)
    with pytest.raises(ValueError) as raised:
        torch.nn.functional.mse_loss(x, x, reduction="other")
    assert of_torch(raised.value)
    with pytest.raises(ValueError) as raised:
        raise UsageError("--num-layers 0")
    assert not of_torch(raised.value)
