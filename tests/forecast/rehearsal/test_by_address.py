# SPDX-License-Identifier: Apache-2.0
"""The table of what kernels read by address: its rows are calls of the product, and its mutants
(layout_mutants.py) are found, with no finding on the layouts without them.
"""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from forecast.rehearsal.host import CALLS as NATIVE
from mpu.kernels.by_address import CALLS, TENSOR, scaled_mm, wrong
from tests.forecast.rehearsal.layout_mutants import ENVIRONMENT, MUTANTS

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("layout_mutants.py")
BY_AUTOGRAD = {"_flash_attention_backward"}  # of aten's own forward


def test_each_row_is_a_call_of_the_product_and_each_call_has_a_row():
    native = {f"weft::{name}" for name in NATIVE} - {"weft::copy"}  # which takes bytes
    assert {row for row in CALLS if not row.startswith("aten::")} == native
    files = [*(ROOT / "mpu").rglob("*.py"), ROOT / "forecast/rehearsal/device.py"]
    text = "\n".join(path.read_text() for path in files if path.name != "by_address.py")
    for row in CALLS:
        kind, _, name = row.partition("::")
        if kind == "aten" and name not in BY_AUTOGRAD:
            called = {"_scaled_mm_v2": r"F\.scaled_mm\(", "mm.dtype": r"torch\.mm\(.*out_dtype",
                      "addmm.dtype": r"torch\.addmm\(.*out_dtype"}  # fmt: skip
            assert re.search(called.get(name, rf"\.{name}\b"), text), row
    assert all(row.source for row in CALLS.values())


def test_each_triton_kernel_declares_what_it_costs_and_its_arguments_by_their_names():
    pytest.importorskip("triton", reason="this platform has no triton")
    seen = 0
    for path in (ROOT / "mpu/kernels").glob("*.py"):
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), flags=re.M):
            kernel = getattr(import_module(f"mpu.kernels.{path.stem}"), name)
            said = kernel.declared
            assert said.requires.source == f"mpu/kernels/{path.name}", name
            assert set(said.requires.of) <= set(kernel.arg_names), name
            seen += 1
    assert seen == 25


def test_a_row_names_the_argument_and_its_source():
    lse = torch.zeros(2, 3, 4).transpose(1, 2)
    call = "aten::_scaled_dot_product_flash_attention_backward"
    ((x, why),) = wrong(call, {"query": torch.zeros(2, 4, 3, 8), "logsumexp": lse})
    assert x is lse and "reads logsumexp by address, which must be contiguous" in why
    assert "attention" in why and "not read again" in why
    assert not list(wrong(call, {"logsumexp": lse.contiguous(), "query": None}))


def test_codes_at_an_odd_address_are_refused():
    codes = torch.zeros(32, 33, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :32]
    other, one = torch.zeros(32, 32, dtype=torch.uint8).view(codes.dtype), torch.ones(())
    assert not list(scaled_mm(other, other.t(), one, TENSOR, one, TENSOR))
    (_, why), = scaled_mm(codes, other.t(), one, TENSOR, one, TENSOR)  # fmt: skip
    assert "multiples of 16 bytes" in why


def tried(first: int, last: int) -> None:
    words = [sys.executable, PROGRAM, str(first), str(last)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nfound ") == last - first


@pytest.mark.prove
def test_the_log_sum_exp_of_a_ring_is_found():
    pytest.importorskip("triton", reason="this platform has no triton")
    tried(0, 1)


@pytest.mark.prove
def test_every_mutant_is_found_and_nothing_without_one():
    pytest.importorskip("triton", reason="this platform has no triton")
    tried(1, len(MUTANTS) + len(ENVIRONMENT))
