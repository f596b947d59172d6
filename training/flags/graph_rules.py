# SPDX-License-Identifier: Apache-2.0
"""Refuse --cuda-graph where a micro-batch reads the host, or its memory or its work changes."""

from collections.abc import Iterator

from training.config import Config, GpuConfig, UsageError
from training.flags.zero_rules import on_cpu
from training.schedule import micro_batch_counts

GRAPH = "--cuda-graph"


def check(config: Config) -> None:
    """Raise UsageError naming the flag that does not go with --cuda-graph, and why."""
    g = config.gpu
    if not g.cuda_graph:
        if g.cuda_graph_warmup_steps != GpuConfig.cuda_graph_warmup_steps:
            raise UsageError(f"--cuda-graph-warmup-steps {g.cuda_graph_warmup_steps} needs {GRAPH}")
        return
    for flag, why in _forbid(config):
        raise UsageError(f"{GRAPH} with {flag}: {why}")


def _forbid(config: Config) -> Iterator[tuple[str, str]]:
    g, p, data = config.gpu, config.parallel, config.data
    if on_cpu(config):
        yield "--device cpu", "a CPU has no CUDA graphs"
    size = p.pipeline_model_parallel_size
    if size > 1 or p.virtual_stages > 1:
        why = "the host decides when messages leave, so a graph holds no pipeline"
        yield f"--pipeline-model-parallel-size {size}", why
    if (cp := p.context_parallel_size) > 1:
        why = "attention copies the order of the ranks' tokens from the host"
        yield f"--context-parallel-size {cp}", why
    if g.cpu_offload_activations:
        yield "--cpu-offload-activations", "its host memory differs between micro-batches"
    if p.zero == 3:
        yield "--zero-stage 3", "weights are gathered into other memory for each block"
    if p.zero == 2:
        yield "--zero-stage 2", "whole gradients have other memory in each step"
    if p.zero_reduce_each_microbatch:
        yield "--zero-reduce-each-microbatch", "every micro-batch starts sums"
    if not config.model.untie_embeddings_and_output_weights:
        why = "look-ups of a tied matrix are summed in memory that each step allocates"
        yield "tied embeddings, without --untie-embeddings-and-output-weights", why
    if data.reset_attention_mask:
        yield "--reset-attention-mask", "documents have other lengths in each micro-batch"
    if p.tp_comm_overlap != "none":
        why = "the host counts what its flags wait for"
        yield f"--tp-comm-overlap {p.tp_comm_overlap}", why
    level = config.fault.empty_unused_memory_level
    if level:
        yield f"--empty-unused-memory-level {level}", "a graph keeps the memory that it runs in"
    few = min(micro_batch_counts(config))
    taken = int(p.overlap_grad_reduce) + int(p.overlap_param_gather and p.shard_size > 1)
    if few <= taken:
        flags = ["--overlap-grad-reduce"] * p.overlap_grad_reduce
        flags += ["--overlap-param-gather"] * (taken > p.overlap_grad_reduce)
        why = f"their micro-batches are eager, and a step has {few}: take a larger batch"
        yield " and ".join(flags), why
