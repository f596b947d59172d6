# SPDX-License-Identifier: Apache-2.0
"""What context parallelism costs a rank in one layer, worked out by hand: memory and traffic.

The dry run measures both with the rest of the model; these formulas are what tests hold it to.

Memory is what attention needs beside its inputs q, k, v, from the start of its forward and from the
start of its backward, at its fullest moment, for rows of one document on the busiest rank, beside
the workspace of a kernel. Traffic is the bytes that leave a rank. docs/long_context.md has both as
a table.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes: what lives at most in forward and in backward, and what is kept between them.

    kept: beside q, k and v themselves, which the forward is given and autograd saves (a2a does not:
    what it keeps takes their place).
    """

    forward: int
    kept: int
    backward: int


@dataclass(frozen=True)
class AttentionSizes:
    """One layer's attention on a rank: s tokens of each of b rows (cp s: of all ranks), a query
    heads, g key/value heads, of size d; bytes of a number and of a wide one (fp32 or fp64).
    """

    cp: int
    s: int
    b: int
    a: int
    g: int
    d: int
    bytes: int = 2
    wide: int = 4

    @property
    def q(self) -> int:
        """Return the bytes of queries, of the output, or of a gradient of either."""
        return self.s * self.b * self.a * self.d * self.bytes

    @property
    def kv(self) -> int:
        """Return the bytes of K and V together."""
        return 2 * self.s * self.b * self.g * self.d * self.bytes

    @property
    def lse(self) -> int:
        """Return the bytes of the log-sum-exp."""
        return self.s * self.b * self.a * self.wide

    def exchanged(self, ranks: int) -> "AttentionSizes":
        """Return the sizes after an all-to-all over `ranks`: fewer heads, more tokens."""
        g = max(self.g, ranks)  # replicated where there are fewer
        fewer = {"cp": self.cp // ranks, "a": self.a // ranks, "g": g // ranks}
        return replace(self, s=self.s * ranks, **fewer)


def memory(kind: str, sizes: AttentionSizes) -> Memory:
    """Return what --cp-comm-type `kind` needs at cp > 1."""
    if kind == "all_gather":
        return _gather(sizes)
    if kind == "p2p":
        return _ring(sizes)
    return _heads(sizes)


def _gather(x: AttentionSizes) -> Memory:
    q, kv, lse, wide = x.q, x.kv, x.lse, x.wide // x.bytes
    every, index = x.cp * kv, 8 * x.cp * x.s
    out, output = wide * q + lse, q + lse
    forward = max(
        out + kv + every + q + lse,  # own keys, while the others come
        out + 2 * every + index,  # as they came, and in order
        out + every + q + 3 * lse,  # all other keys; the merge
        wide * q + output,
    )
    block = q + kv if x.cp > 2 else max(q + kv // 2, q // 2 + kv)  # dq, dk, dv of a block
    backward = wide * q + max(
        every + kv + (q + kv) // 2,
        kv // 2 + 2 * index + 2 * every,  # dK and dV of own keys; K and V, or dK and dV, twice
        kv // 2 + 2 * index + every + wide * kv + block,  # a piece's sums
    )
    return Memory(forward, output, backward)


def _ring(x: AttentionSizes) -> Memory:
    q, kv, lse, wide = x.q, x.kv, x.lse, x.wide // x.bytes
    later = 2 * kv if x.cp > 2 else kv  # K and V, and the next of them but for the last turn
    forward = wide * q + q + max(2 * kv + 2 * lse, later + 4 * lse)
    block = max(q + kv // 2, q // 2 + kv)  # its dq, dk and dv
    sums = 2 * wide * kv  # dK and dV that come, and those that leave
    third = kv + (kv if x.cp > 3 else 0) + sums + block if x.cp > 2 else 0  # and later turns
    backward = wide * q + max(
        2 * kv + (q + kv) // 2,
        kv // 2 + max(later + block, later + sums, third),  # dK and dV of own keys
        kv + sums + (q + kv) // 2,
    )
    return Memory(forward, q + lse, backward)


def _heads(x: AttentionSizes) -> Memory:
    q, lse, index, inside = x.q, x.lse, 16 * x.s * x.cp, x.exchanged(x.cp)
    more = inside.kv - x.kv  # K and V of replicated heads
    every = q + inside.kv
    kept = every + 2 * q + lse + index  # q, k, v of other tokens; the output, here and there
    forward = max(3 * every + (inside.kv if more else 0), every + lse + 3 * q)
    return Memory(
        forward + index,
        kept,
        # dy of other tokens; their gradients; these on their way back, when all kept is free
        max(2 * q, q + every, 2 * every - q - lse),
    )


def traffic(kind: str, sizes: AttentionSizes) -> tuple[int, int]:
    """Return the bytes that a rank sends in a layer's forward and in its backward.

    Recomputation does the forward once more.
    """
    if kind == "all_gather":
        sent = (sizes.cp - 1) * sizes.kv
        return sent, 2 * sent
    if kind == "p2p":
        wide = sizes.wide // sizes.bytes  # dK and dV travel in wide numbers
        sent = (sizes.cp - 1) * sizes.kv
        return sent, sent + wide * sent
    ranks = sizes.cp
    heads = (2 * sizes.q + sizes.exchanged(ranks).kv) * (ranks - 1) // ranks
    return heads, heads
