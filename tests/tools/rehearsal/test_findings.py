# SPDX-License-Identifier: Apache-2.0
"""Single events of a step that a GPU run must not have: host reads, wide dtypes, no kernel."""

import pytest
import torch

from mpu.module_tracker import ROOT
from tools.rehearsal.events import Launch, Where
from tools.rehearsal.findings import HOST_MAY_WAIT, may_wait, wrong
from tools.rehearsal.kernels_of_cuda import has_kernel, parse
from tools.rehearsal.loop_rules import DECIDES
from tools.rehearsal.traffic_rules import SORTS
from tools.rehearsal.watch import flops_of


def launch(op, place, dtypes, shapes=None, flops=0.0, host=()):
    shapes = shapes or ((4,),) * len(dtypes)
    where = Where(place=place)
    return Launch(op, 0, shapes, dtypes[-1], (), (), 0, flops, where, (), tuple(dtypes), host)


BF, F32, F64 = "bfloat16", "float32", "float64"
MODEL, NORMS = "model/llama.py:9", "mpu/layers/fused.py:9"


@pytest.mark.parametrize(
    "event, kind",
    [
        (launch("aten::add", MODEL, (BF, BF)), None),
        (launch("aten::add", MODEL, (F32, F32)), "dtype"),
        (launch("aten::add", MODEL, (F32, F32), ((), ())), None),
        (launch("aten::add", NORMS, (F32, F32)), None),
        (launch("aten::add", NORMS, (F32, BF)), "dtype"),
        (launch("aten::add", NORMS, (F64, F64)), "float64"),
        (launch("aten::sum", "pretrain_llama.py:9", (F32, F64), ((4,), ())), None),
        (launch("aten::sum", "pretrain_llama.py:9", (F64, F64), ((4,), (4,))), "float64"),
        (launch("aten::mm", NORMS, (BF, BF, F32), flops=1.0), None),
        (launch("aten::mm", NORMS, (F32, F32, F32), flops=1.0), "dtype"),
        (launch("aten::mkldnn_linear", NORMS, (BF,)), "no kernel"),
        (launch("aten::add", NORMS, (BF, BF), host=("a.py:1",)), "device"),
    ],
    ids=str,
)
def test_what_a_bf16_run_must_not_launch(event, kind):
    assert [found for found, _ in wrong(event, BF)] == ([kind] if kind else [])


def test_an_fp32_run_computes_in_fp32():
    assert list(wrong(launch("aten::mm", MODEL, (F32, F32), flops=1.0), F32)) == []


def line_of(file, text):
    lines = (ROOT / file).read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_the_host_may_wait_where_the_log_reads_and_nowhere_else_in_its_file():
    assert may_wait(line_of("training/run/log.py", "loss.item()"))
    assert may_wait(line_of("training/run/stop.py", "self._arrived.synchronize()"))
    assert not may_wait("training/run/log.py:1")
    assert not may_wait("model/llama.py:1")


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


@pytest.mark.parametrize("table", [HOST_MAY_WAIT, DECIDES, SORTS])
def test_the_lines_that_rules_know_are_in_their_files(table):
    for file, known in table.items():
        text = (ROOT / file).read_text()
        assert [words for words in known if words not in text] == [], file
