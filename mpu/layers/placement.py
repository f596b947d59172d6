# SPDX-License-Identifier: Apache-2.0
"""Say how a weight is cut by its rows, as those of column-parallel layers and embeddings are."""

from mpu.context import LayerContext
from mpu.param import Placement, divide


def column_placement(
    width: int, sections: tuple[int, ...], ctx: LayerContext, pad_to: int = 0
) -> Placement:
    """Return the Placement of a [sum(sections), width] weight cut by rows.

    pad_to: round the local rows of a single section up to a multiple of this.
    """
    tp = ctx.tp
    if pad_to:
        (rows,) = sections
        local = -(-rows // (pad_to * tp.size)) * pad_to
    else:
        local = sum(
            divide("tensor-parallel", n, tp, "output features of a column-parallel layer")
            for n in sections
        )
    return Placement((sum(sections), width), 0, tp, sections, local)
