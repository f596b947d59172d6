# SPDX-License-Identifier: Apache-2.0
"""Orthogonalise a matrix by Newton-Schulz iterations (Jordan et al. 2024, Muon).

    X_0 = G / |G|_F
    A = X X^T;  B = b A + c A A;  X <- a X + B X        once for each (a, b, c)

All singular values converge to about 1, so X approximates U V^T of G = U S V^T. X has no more rows
than columns; a tall G is transposed first. The order of operations is that of torch.optim.Muon.
"""

from math import sqrt

import torch
from torch import Tensor

EPS = 1e-7  # torch.optim.Muon's
Coefficients = tuple[tuple[float, float, float], ...]

# Sets of coefficients by Megatron's names (--muon-coefficient-type), with their sources
SIMPLE = (3.4445, -4.7750, 2.0315)  # K. Jordan
SETS: dict[str, Coefficients] = {
    "simple": (SIMPLE,),
    "quintic": (  # F. L. Cesista, by way of modded-nanogpt
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (  # Amsel et al. 2025, arXiv:2505.16932, with their factor of 1.01 for safety
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (  # Grishina et al. 2025, arXiv:2506.10935
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (  # T. Boissin, flash-newton-schulz
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "cubic5": (  # NVIDIA's emerging_optimizers, for five steps: no fifth power, so no A A
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    "deepseekv4": (*[SIMPLE] * 8, *[(2.0, -1.5, 0.5)] * 2),
}
REPEATS_LAST = ("polar_express", "cans", "deepseekv4")  # further steps; other sets start again


def coefficients_of(kind: str, steps: int) -> Coefficients:
    """Return (a, b, c) of each step; sets repeat as in NVIDIA's emerging_optimizers."""
    some = SETS[kind]
    if kind in REPEATS_LAST:
        return (*some, *[some[-1]] * max(0, steps - len(some)))[:steps]
    return tuple(some[i % len(some)] for i in range(steps))


def scale_of(rows: int, columns: int, mode: str) -> float:
    """Return the factor of an update [rows, columns] = [outputs, inputs] in a mode of Megatron's
    --muon-scale-mode. torch.optim.Muon's "original" is shape_scaling, and its "match_rms_adamw" is
    0.2 x spectral.
    """
    if mode == "spectral":  # Liu et al. 2025, arXiv:2502.16982
        return sqrt(max(rows, columns))
    ratio = rows / columns
    return sqrt(ratio if mode == "unit_rms_norm" else max(1, ratio))  # Pethick et al. 2502.07529


def orthogonalise(matrix: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the orthogonalised matrix [m, n], in its dtype; `matrix` is overwritten.

    The bits depend only on its values and shape, neither on its owner nor on other matrices.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=EPS))
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
