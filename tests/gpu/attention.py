# SPDX-License-Identifier: Apache-2.0
"""Every way that attention takes on CUDA, against float64: results, gradients, operators.

`paths` are those of one rank, through `core_attention`. `context` plays the ranks of a
context-parallel axis as threads of one process, whose keys and values travel through memory.
"""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mpu.comm.transport import DONE
from mpu.layers.attention import kv_exchange
from mpu.layers.attention.backends import BACKENDS, Kernel, card_of, why_no_cudnn
from mpu.layers.attention.block_attention import block_attention
from mpu.layers.attention.core import CoreAttention
from mpu.layers.attention.shards import batch_shards
from mpu.layers.packed_seq_params import PackedSeqParams
from tests.gpu.launched import ATTENTION, Operators
from tests.gpu.row import Row, Skip

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
HEADS, GROUPS = 8, 2
ASKED = [name for name in BACKENDS if name != "te"]  # whose attention is a class of its own
NAMES = ("y", "dq", "dk", "dv")


def exact(q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...], window: int) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v by a mask: q [b, a, s, d], k and v [b, g, S, d]."""
    s, keys = q.shape[2], k.shape[2]
    number = torch.repeat_interleave(
        torch.arange(len(documents), device=q.device), torch.tensor(documents, device=q.device)
    )
    at = torch.arange(keys, device=q.device)
    seen = (at[:, None] >= at) & (number[:, None] == number)
    if window:
        seen &= at[:, None] - at < window
    each = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(each, 1).mT * q.shape[3] ** -0.5
    weights = scores.masked_fill(~seen[keys - s :], -torch.inf).softmax(-1)
    return weights @ v.repeat_interleave(each, 1)


def apart(got: Tensor, want: Tensor) -> float:
    """Return the norm of a difference over that of what is wanted."""
    return ((got.double() - want).norm() / want.norm()).item()


def drawn(row: Row, s: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v as a layer has them, views of one tensor [s, b, n, d], and dy."""
    qkv = torch.randn(s, 1, HEADS + 2 * GROUPS, d, device=row.device).to(dtype)
    dy = torch.randn(s, 1, HEADS, d, device=row.device).to(dtype)
    parts = qkv.split([HEADS, GROUPS, GROUPS], 2)
    return [x.permute(1, 2, 0, 3) for x in (*parts, dy)]


def compare(
    row: Row, what: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor], given: list[Tensor],
    documents: tuple[int, ...], window: int = 0,
) -> list[str]:  # fmt: skip
    """Write the errors of an attention's result and gradients; return the operators that ran."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    wide = [x.detach().double().requires_grad_() for x in given[:3]]
    with Operators("attention") as seen:
        y = attend(*leaves)
        grads = torch.autograd.grad(y, leaves, given[3])
    want = exact(*wide, documents, window)
    wanted = torch.autograd.grad(want, wide, given[3].double())
    parts = zip(NAMES, (y.detach(), *grads), (want.detach(), *wanted), strict=True)
    found = {name: apart(got, right) for name, got, right in parts}
    row.check(what, most(found), LIMITS[given[0].dtype], errors=found, operators=seen.names)
    return seen.names


def most(errors: dict[str, float]) -> float:
    """Return the largest of some errors, or not a number where one is not."""
    return max(errors.values()) if all(e == e for e in errors.values()) else float("nan")


def whole(q: Tensor, k: Tensor, v: Tensor, asked: str = "auto") -> Tensor:
    """Attend causally as a layer does, by --attention-backend: [b, n, s, d] -> [b, a, s, d]."""
    given = [x.permute(2, 0, 1, 3) for x in (q, k, v)]
    y = CoreAttention(asked).attend(*given, None, None, 0)
    return y.unflatten(2, (q.shape[1], -1)).permute(1, 2, 0, 3)


def paths(row: Row) -> None:
    """Causal by each of torch's kernels, documents, windows, and one new token after others."""
    torch.manual_seed(1)
    s = 96 if row.tiny else 2048
    lengths, ran = (s // 2 - 3, 1, 2, s // 2), set[str]()
    for dtype in LIMITS:
        short = str(dtype).removeprefix("torch.")
        for d in (32,) if row.tiny else (64, 128, 20):
            given, ends = drawn(row, s, d, dtype), PackedSeqParams.of(lengths).to(row.device)

            def documents(q: Tensor, k: Tensor, v: Tensor, ends: Any = ends) -> Tensor:
                return block_attention(q, k, v, ends, 0)

            def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return block_attention(q, k, v, None, 40)

            def both(q: Tensor, k: Tensor, v: Tensor, ends: Any = ends) -> Tensor:
                return block_attention(q, k, v, ends, 40)

            cases: list[tuple[str, Callable[..., Tensor], tuple[int, ...], int]] = [
                *((f"causal, {asked}", partial(whole, asked=asked), (s,), 0) for asked in ASKED),
                ("documents", documents, lengths, 0),
                ("window", windows, (s,), 40),
                ("documents and window", both, lengths, 40),
            ]
            for name, attend, ends_at, window in cases:
                what = f"{name}, {short}, d {d}"

                def one(
                    what: str = what, attend: Callable[..., Tensor] = attend, window: int = window,
                    ends_at: tuple[int, ...] = ends_at, given: list[Tensor] = given,
                ) -> None:  # fmt: skip
                    try:
                        ran.update(compare(row, what, attend, given, ends_at, window))
                    except ValueError as why:  # the kernel that is asked for does not take this
                        raise Skip(str(why)) from None

                row.part(what, one)
            q, k, v, _ = given
            for new in (1, 9):
                mine = q[:, :, -new:]
                cached = [k[:, :, :-new].clone(), v[:, :, :-new].clone()]
                last = [x[:, :, -new:].permute(2, 0, 1, 3) for x in (q, k, v)]
                y = CoreAttention().attend(*last, None, cached, 0)
                y = y.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3)
                want = exact(mine.double(), k.double(), v.double(), (s,), 0)
                row.check(f"{new} new tokens, {short}, d {d}", apart(y, want), LIMITS[dtype])
    complete(row, ran)


class Loop:
    """A context-parallel axis whose ranks are threads: what one gives, the others read in memory.

    Each verb is a meeting of all ranks. They share the device's current stream, so a kernel that
    reads another rank's tensor is queued behind the one that wrote it.
    """

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def _meet(self, rank: int, x: Tensor, take: Callable[[], Tensor]) -> Tensor:
        self.given[rank] = x
        self.barrier.wait()
        found = take()
        self.barrier.wait()
        return found

    def all_gather(self, x: Tensor, axis: Any, **how: Any) -> tuple[Tensor, Any]:
        return self._meet(axis.rank, x, lambda: torch.cat(self.given)), DONE

    def reduce_scatter(self, x: Tensor, axis: Any, **how: Any) -> tuple[Tensor, Any]:
        def take() -> Tensor:
            mine = [each.chunk(axis.size)[axis.rank] for each in self.given]
            return torch.stack([each.double() for each in mine]).sum(0).to(x.dtype)

        return self._meet(axis.rank, x, take), DONE

    def exchange(
        self, x: Tensor, axis: Any, to: int, source: int, into: Tensor, label: Any = None
    ) -> Any:
        self._meet(axis.rank, x, lambda: into.copy_(self.given[source]))
        return DONE


def played(
    way: Callable[..., Any], size: int, given: list[Tensor], documents: tuple[int, ...],
    window: int, operators: list[str], kernel: Kernel = "cpu",
) -> list[Tensor]:  # fmt: skip
    """Return y, dq, dk, dv of all tokens, [s, b, n, d]: each rank attends as a thread.

    operators: gets the names of the attention operators that ran.
    """
    held, loop = batch_shards(size, (documents,)), Loop(size)
    whole = [x.permute(2, 0, 1, 3) for x in given]
    outs = [torch.full_like(whole[i], float("nan")) for i in (0, 0, 1, 2)]
    errors = list[BaseException]()

    def play(rank: int) -> None:
        try:
            places = torch.tensor([i for r in held[rank] for i in r], device=whole[0].device)
            q, k, v, dy = (x.index_select(0, places) for x in whole)
            axis = SimpleNamespace(rank=rank, size=size, name="cp")
            saved = SimpleNamespace()
            saved.save_for_backward = lambda *xs: setattr(saved, "saved_tensors", xs)
            turn = way(axis, held, documents, window, kernel)
            apply = kv_exchange.ContextExchange
            with torch.no_grad(), Operators("attention") as seen:  # of this thread
                y = apply.forward(saved, q, k, v, turn)
                grads = apply.backward(saved, dy)[:3]
            operators.extend(name for name in seen.names if name not in operators)
            for out, mine in zip(outs, (y, *grads), strict=True):
                out.index_copy_(0, places, mine)
        except BaseException as error:
            errors.append(error)
            loop.barrier.abort()

    stands = {name: getattr(loop, name) for name in ("all_gather", "reduce_scatter", "exchange")}
    with mock.patch.multiple(kv_exchange, **stands):
        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return outs


def context(row: Row) -> None:
    """Ring and gather of 2 and 4 ranks against whole attention in float64: y, dq, dk and dv."""
    torch.manual_seed(1)
    s, d = (64, 32) if row.tiny else (2048, 128)
    ran = set[str]()
    cases = {
        "one document": ((s,), 0),
        "documents": ((s // 2 - 5, 9, s // 2 - 4), 0),
        "a window": ((s,), s // 3),
    }
    for dtype in (torch.bfloat16,) if row.tiny else LIMITS:
        given = drawn(row, s, d, dtype)
        wide = [x.detach().double().requires_grad_() for x in given[:3]]
        for name, (documents, window) in cases.items():
            want = exact(*wide, documents, window)
            wanted = [want.detach(), *torch.autograd.grad(want, wide, given[3].double())]
            for size in (2, 4):
                ways = kv_exchange.Ring, kv_exchange.Gather
                for way, kernel in product(ways, kernels(row, dtype, d)):
                    short = str(dtype).removeprefix("torch.")
                    what = f"{way.__name__} of {size} ranks, {name}, {short}, {kernel}"

                    def play(
                        what: str = what, way: Any = way, size: int = size, window: int = window,
                        documents: tuple[int, ...] = documents, wanted: list[Tensor] = wanted,
                        given: list[Tensor] = given, dtype: torch.dtype = dtype,
                        kernel: Kernel = kernel,
                    ) -> None:  # fmt: skip
                        seen = list[str]()
                        outs = played(way, size, given, documents, window, seen, kernel)
                        parts = zip(NAMES, outs, wanted, strict=True)
                        found = {n: apart(x.permute(1, 2, 0, 3), right) for n, x, right in parts}
                        worst = most(found)
                        row.check(what, worst, 1.5 * LIMITS[dtype], errors=found, operators=seen)
                        ran.update(seen)

                    row.part(what, play)
    complete(row, ran)


def kernels(row: Row, dtype: torch.dtype, d: int) -> list[Kernel]:
    """Return the kernels of blocks that this device has for a dtype."""
    if not row.cuda:
        return ["cpu"]
    if dtype != torch.bfloat16:
        return ["math"]
    why = why_no_cudnn(card_of(row.device), dtype, d, "blocks")
    return ["flash", "math"] if why else ["cudnn", "flash", "math"]


def complete(row: Row, ran: set[str]) -> None:
    """Fail the row where, on CUDA, an operator of ATTENTION that it is to run did not run."""
    wanted = {call for call, where in ATTENTION.items() if where == row.name}
    found = {name.replace("::", ".") for name in ran}
    if any(name.startswith("aten._scaled_dot_product_") for name in found):
        found.add("F.scaled_dot_product_attention")
    if row.cuda and why_no_cudnn(card_of(row.device), torch.bfloat16, 128, "blocks"):
        wanted = {call for call in wanted if "cudnn" not in call}
    missing = sorted(wanted - found) if row.cuda else []
    row.check(f"ran {', '.join(sorted(ran))}", len(missing), 0, missing=missing)
