# SPDX-License-Identifier: Apache-2.0
"""Build the ZeroConfig of a run: how data-parallel ranks share gradients and weights."""

import torch

from mpu.zero.bucket_layout import ZeroConfig
from training.settings.config import Config


def zero_config(config: Config) -> ZeroConfig:
    """Return the ZeroConfig of the flags."""
    p = config.parallel
    return ZeroConfig(
        zero_stage=p.zero,
        bucket_size=p.ddp_bucket_size or 0,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        reduce_each_micro_batch=p.zero_reduce_each_microbatch,
        grad_reduce_dtype=torch.bfloat16 if p.grad_reduce_in_bf16 else None,
        main_grads_dtype=torch.bfloat16 if p.main_grads_dtype == "bf16" else None,
        keep_unsharded=p.pipeline_model_parallel_size > 1,
    )
