# SPDX-License-Identifier: Apache-2.0
"""Check --tp-comm-overlap against the layout and the device."""

from training.config import Config, UsageError
from training.flags import zero_rules


def check(config: Config) -> None:
    """Raise UsageError for a method that this layout, or a GPU, cannot take."""
    p = config.parallel
    flag, pp = f"--tp-comm-overlap {p.tp_comm_overlap}", p.pipeline_model_parallel_size
    if p.tp_comm_overlap != "none" and not p.sequence_parallel:
        raise UsageError(
            f"{flag} needs --sequence-parallel: without it every "
            "rank holds the whole sequence, and there is no communication to overlap with a matmul"
        )
    if p.tp_comm_overlap == "symmetric" and pp > 1 and not zero_rules.on_cpu(config):
        raise UsageError(
            f"{flag} with --pipeline-model-parallel-size {pp} needs --device cpu: on a GPU a "
            "kernel that waits for a peer's rows may hold the SMs of a message that the peer waits "
            "for; none, ring and auto, which then chooses between these two, go with a pipeline"
        )
