# SPDX-License-Identifier: Apache-2.0
"""The kernels of the loss in Triton's interpreter, and compiled for GPUs without one.

Against fp64 on the same logits. With eps = 2^-23, S the log of the sum of exp, p = exp(l - S):

    loss       within 4 eps (1 + |S| + |l_target|)
    gradient   within |weight| eps (4 p (1 + |l| + |S|) + 2 [target]), then rounded to its dtype

The interpreter cuts bf16 off where a GPU rounds: bf16 gradients may miss an ulp here, not half one.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="this platform has no triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpu.context import LayerContext
from mpu.kernels import cross_entropy as kernels
from mpu.layers import cross_entropy, softmax_rows
from tests.mpu.kernels.test_ahead_of_time import spilled

EPS = 2.0**-23
WEIGHTS = (1.0, 0.0, -3.5, 1e-4)  # a masked token's is 0


def case(n: int, v: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(n * v)
    logits = (torch.randn(n, 1, v, generator=g) * scale).to(dtype)
    labels = torch.randint(0, v, (n, 1), generator=g)
    labels[0], labels[-1] = 0, v - 1
    weight = torch.tensor(WEIGHTS)[torch.randint(0, 4, (n, 1), generator=g)]
    return logits, labels, weight


def on_kernels(comm, t: int, n: int, v: int, local: int, dtype: torch.dtype, scale: float):
    """Return one rank's losses and gradient: `local` columns a rank, padding is poisoned."""
    logits, labels, weight = case(n, v, dtype, scale)
    padded = torch.full((n, 1, local * t), 1e6, dtype=dtype)
    padded[..., :v] = logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "fits", lambda *tensors, accumulate: False)
        patch.setattr(softmax_rows, "on_triton", lambda rows, accumulate: True)
        ctx = LayerContext(comm.grid(t), dtype=dtype)
        mine = padded.chunk(t, -1)[ctx.tp.rank].contiguous().requires_grad_()
        loss = cross_entropy.vocab_parallel_cross_entropy(mine, labels, v, ctx)
        (loss * weight).sum().backward()
    assert loss.dtype == torch.float32 and mine.grad.dtype == dtype
    return loss.detach().numpy(), mine.grad.float().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "t, n, v, local, scale",
    [(1, 5, 17, 19, 1.0), (1, 3, 4096, 4096, 1000.0), (1, 2, 9001, 9002, 1.0), (1, 1, 1, 1, 1.0),
     (2, 5, 17, 9, 1.0), (2, 3, 4100, 4099, 30.0), (2, 4, 9, 9, 1.0)],
)  # fmt: skip
def test_equals_fp64(interpreted, t, n, v, local, scale, dtype):
    logits, labels, weight = (x.double() if x.is_floating_point() else x for x in case(
        n, v, dtype, scale))  # fmt: skip
    logits.requires_grad_()
    want = F.cross_entropy(logits[:, 0], labels[:, 0], reduction="none")[:, None]
    (want * weight).sum().backward()
    logits, wanted = logits.detach()[:, 0], logits.grad[:, 0]
    log_sum = logits.logsumexp(-1, keepdim=True)
    of_target = logits.gather(-1, labels).abs()
    share, hit = (logits - log_sum).exp(), F.one_hot(labels[:, 0], v)
    bound = weight.abs() * EPS * (4 * share * (1 + logits.abs() + log_sum.abs()) + 2 * hit)
    bound += (
        wanted.abs() * (2.0**-7 if dtype == torch.bfloat16 else EPS) + 2.0**-125
    )  # below it numbers are subnormal
    for rank, (loss, grad) in enumerate(
        interpreted(t).run(on_kernels, t, n, v, local, dtype, scale)
    ):
        error = (torch.from_numpy(loss).double() - want.detach()).abs()
        assert (error <= 4 * EPS * (1 + log_sum.abs() + of_target)).all()
        real = min(max(v - rank * local, 0), local)
        got, mine = torch.from_numpy(grad)[:, 0].double(), slice(rank * local, rank * local + real)
        assert ((got[:, :real] - wanted[:, mine]).abs() <= bound[:, mine]).all()
        assert not got[:, real:].any(), "padding has a gradient"


@pytest.mark.parametrize("major, element", [(8, "fp32"), (9, "bf16"), (10, "bf16")])
def test_compiles_and_spills_nothing(major, element, tmp_path):
    for kernel in (kernels.softmax_stats_kernel, kernels.softmax_gradient_kernel):
        types = {"rows": f"*{element}", "labels": "*i64", "BLOCK": "constexpr"}
        types |= {name: "*fp32" for name in ("out", "log_sum", "weight")}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name == "width"  # as a padded vocabulary is
        }
        source = ASTSource(kernel.jitted, signature, {"BLOCK": kernels.BLOCK}, attrs)
        options = {"num_warps": kernels.WARPS}
        asm = triton.compile(source, target=GPUTarget("cuda", 10 * major, 32), options=options).asm
        assert not spilled(asm, tmp_path)
        assert "ld.global.v4" in asm["ptx"], "logits are not read 16 bytes at a time"
        if element == "bf16" and "out" not in types.keys() & set(kernel.arg_names):
            assert "cvt.rn.bf16" in asm["ptx"]
