# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling within a launch: a program takes a ticket, does that work, takes the next.

Programs that are not on an SM yet take no tickets, so the running programs do all the work of a
launch, and none is idle while work is left:

    static       program p does p, p + P, ...    a program without an SM delays its share
    by tickets   a free program does the next    in the order of tiles.py, whatever programs run

The tickets are four counters in device memory, which are zero between launches: the last program to
leave resets them. So the host has no state, and a CUDA graph may replay the launch. Launches that
share tickets must be in one stream. The sum of a tile does not depend on the program that took it.
"""

import triton
import triton.language as tl

BEGUN, PUSHED, MULTIPLIED, LEFT = (tl.constexpr(i) for i in range(4))
TICKETS = 4


@triton.jit
def take(tickets, what):
    """Take a ticket; return its number, which counts from 0."""
    return tl.atomic_add(tickets + what, 1, sem="relaxed", scope="gpu")


@triton.jit
def leave(tickets):
    """Record that this program takes no more tickets; the last program resets them to zero.

    Acquire and release order the takes of all programs before the reset.
    """
    before = tl.atomic_add(tickets + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        for what in tl.static_range(4):
            tl.atomic_xchg(tickets + what, 0, sem="relaxed", scope="gpu")
