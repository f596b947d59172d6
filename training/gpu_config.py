# SPDX-License-Identifier: Apache-2.0
"""Define what a GPU does beside computing: activations in host memory, steps as CUDA graphs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuConfig:
    """Where activations wait for backward, and who launches a step; see docs/activations.md."""

    cpu_offload_activations: bool = False
    cpu_offloading_num_layers: int | None = None  # of each stage; None: all but its last unit
    offload_modules: tuple[str, ...] = ()  # of a layer; empty: all
    min_offloaded_tensor_size: int = 1 << 20  # elements
    cuda_graph: bool = False
    cuda_graph_warmup_steps: int = 3
