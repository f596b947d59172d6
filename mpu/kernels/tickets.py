# SPDX-License-Identifier: Apache-2.0
"""Hand out the work of a launch: a program takes a ticket, does that piece of work, takes the next.

Programs that have no SM yet take nothing, so a launch of any number of programs is done by those
that run, and none is idle while work is left:

    static       program p does p, p + P, ...    a program without an SM holds its share back
    by tickets   whoever is free does the next   in the order of tiles.py, whatever programs run

The tickets are four counters in device memory, which is zero between launches: the last program to
leave resets them. So nothing on the host knows of them, and a CUDA graph may replay the launch.
Launches that share tickets must be in one stream. What a tile's sum is does not depend on which
program took it.
"""

import triton
import triton.language as tl

BEGUN, PUSHED, MULTIPLIED, LEFT = (tl.constexpr(i) for i in range(4))
TICKETS = 4


@triton.jit
def take(tickets, what):
    """Return how many have been taken before."""
    return tl.atomic_add(tickets + what, 1, sem="relaxed", scope="gpu")


@triton.jit
def leave(tickets):
    """Note that this program takes no more; the last one leaves the tickets zero.

    Acquire and release: every program's takes come before the reset.
    """
    before = tl.atomic_add(tickets + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        for what in tl.static_range(4):
            tl.atomic_xchg(tickets + what, 0, sem="relaxed", scope="gpu")
