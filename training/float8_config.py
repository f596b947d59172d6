# SPDX-License-Identifier: Apache-2.0
"""Define the settings of matmuls in float8."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Float8Config:
    """Which layers multiply in float8, and how they scale; see docs/float8.md."""

    fp8_format: str | None = None  # "e4m3", "hybrid"; None: no float8
    fp8_recipe: str | None = None  # "tensorwise", "rowwise", "blockwise", "mxfp8"
    fp8_wgrad_bf16: bool = False
    fp8_param_gather: bool = False
    fp8_auto: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1  # with first_last_layers_bf16
    num_layers_at_end_in_bf16: int = 1
