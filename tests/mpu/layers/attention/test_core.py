# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and attention against formulas; documents in one row do not see each other."""

import pytest
import torch

from mpu.layers.attention.core import core_attention
from mpu.layers.fused import apply_rope
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.rope import rope_frequencies, rope_table


def table(length: int, d: int, dtype: torch.dtype = torch.float64):
    return rope_table(rope_frequencies(d, 100.0), length, dtype, torch.device("cpu"))


def test_rope_turns_by_an_angle_that_grows_with_position():
    cos, sin = table(5, 4)
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    y = torch.cat(apply_rope(x.flatten(2), cos, sin, 1, 1), 2)
    assert torch.equal(y[:, :, 2], x[:, :, 2]), "the value head turned"
    for pos in range(5):
        for pair, frequency in enumerate((1.0, 0.1)):
            a = torch.complex(x[pos, :, :2, pair], x[pos, :, :2, pair + 2])
            b = torch.complex(y[pos, :, :2, pair], y[pos, :, :2, pair + 2])
            turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(pos * frequency).double())
            torch.testing.assert_close(b, a * turn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_does_not_see_another(dtype):
    """Change a token of row 0's first document: all other documents' outputs keep every bit."""
    s, cut, d = 12, 5, 8
    cos, sin = table(s, d, torch.float32)
    packed = PackedSeqParams.of([cut, s - cut] * 2)
    qkv = torch.randn(s, 2, 4 * d).to(dtype)
    before = core_attention(qkv, cos, sin, 2, 1, packed)
    changed = qkv.clone()
    changed[2, 0] += 1.0
    after = core_attention(changed, cos, sin, 2, 1, packed)
    assert torch.equal(before[cut:], after[cut:]) and torch.equal(before[:, 1], after[:, 1])
    assert not torch.equal(before[2:cut, 0], after[2:cut, 0])
    alone = core_attention(qkv[:cut], cos[:cut], sin[:cut], 2, 1, None)
    error = (before[:cut] - alone).double().norm()  # another kernel may compute these
    assert error <= 2 * torch.finfo(dtype).eps * alone.double().norm()
