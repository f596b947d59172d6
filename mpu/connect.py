# SPDX-License-Identifier: Apache-2.0
"""Choose the transport of each axis: memory shared by its ranks, or the process group.

Startup calls each function once, after the process groups exist and before the first step. Each
returns lines for the log: the transport of an axis, or why it cannot be shared memory.
"""

from dataclasses import replace
from datetime import timedelta

import torch

from mpu.comm.collectives import by_process_group, group_of
from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.symmetric import Unavailable
from mpu.comm.transport import Axis
from mpu.comm.workspace import Workspace
from mpu.grid import Grid
from mpu.kernels import available


def share(grid: Grid, timeout: timedelta) -> list[str]:
    """Use shared memory for the collectives of CPU tensors over tp, cp, dp_cp, ep and edp, their
    parts, and the world.

    Collective over the world. Axes over the same ranks share one workspace.
    """
    lines, spaces = [], dict[tuple[int, ...], Workspace | str]()
    parts = ("tp_kv", "dp_cp_shard", "dp_cp_replicate")
    experts = ("ep", "edp", "edp_shard", "edp_replicate")
    for name in ("tp", "cp", "dp_cp", *parts, *experts, "world"):
        axis: Axis = getattr(grid, name)
        if axis.size == 1:
            continue
        if axis.ranks not in spaces:
            try:
                here = grid.launch.local_world
                spaces[axis.ranks] = Workspace(by_process_group(axis), timeout, here)
            except Unavailable as error:
                spaces[axis.ranks] = str(error)
            space = spaces[axis.ranks]
            shared = isinstance(space, Workspace)
            medium = "shared memory" if shared else f"{grid.backend}; {space}"
            lines.append(f"collectives of {name} ({axis.size} ranks): {medium}")
        space = spaces[axis.ranks]
        if isinstance(space, Workspace):
            transport = SharedMemoryTransport(group_of(axis), space, axis.staged)
            setattr(grid, name, replace(axis, transport=transport))
        else:
            setattr(grid, name, by_process_group(axis, why_not=space))
    return lines


def share_gpus(grid: Grid, device: torch.device, timeout: timedelta) -> list[str]:
    """Set up the GPU memory that overlap kernels of the tp axis share. Collective over tp.

    Not with a pipeline: a kernel that waits for a peer's rows occupies its SMs, and the message for
    which the peer waits may need them. The kernels leave SMs for NCCL, but it has not been measured
    that these are enough (training/flags/rules.py rejects `symmetric` there).
    """
    if grid.tp.size == 1:
        return []
    try:
        if grid.pp.size > 1:
            raise Unavailable(f"--pipeline-model-parallel-size {grid.pp.size} must be 1 on GPUs")
        if why := available.why_not():
            raise Unavailable(why)
        from mpu.comm.symmetric_cuda import SMS_LEFT, CudaSymmetricTransport, CudaWorkspace

        left = SMS_LEFT if grid.world_size > grid.tp.size else 1
        workspace = CudaWorkspace(grid.tp, device, timeout, left)
        transport = CudaSymmetricTransport(group_of(grid.tp), workspace, grid.tp.staged)
        grid.tp, medium = replace(grid.tp, transport=transport), "symmetric memory"
    except Unavailable as error:
        grid.tp = by_process_group(grid.tp, why_not=str(error))
        medium = f"not available: {error}"
    return [f"overlap kernels of tp ({grid.tp.size} ranks): {medium}"]
