# SPDX-License-Identifier: Apache-2.0
"""Work out, from a Config alone, what a rank holds from step to step: no model, no ranks.

Parameters by name and shape, the buckets they lie in, the bytes of weights, gradients and optimizer
state. What comes and goes in a step is in training/buffers.py and training/activations.py, what is
sent in training/traffic.py.
"""

from math import prod

import torch

from mpu.pipeline.layout import Stage
from mpu.zero import layout
from mpu.zero.layout import BucketLayout, ParamEntry
from training import pipeline
from training.config import Config

Shapes = dict[str, tuple[int, ...]]


def whole(config: Config) -> tuple[Stage]:
    """Return the one stage that is the whole model."""
    return (Stage(0, config.model.num_layers, embedding=True, loss=True),)


def shapes(
    config: Config, tp: int | None = None, stages: tuple[Stage, ...] | None = None
) -> Shapes:
    """Return the parameters one rank holds, by the model's names, with all layers or its stages'.

    tp 1 gives whole matrices.
    """
    stages = stages or whole(config)
    m = config.model
    t = tp or config.parallel.tensor_model_parallel_size
    h, a, g, d, f = (
        m.hidden_size,
        m.num_attention_heads,
        m.num_query_groups,
        m.kv_channels,
        m.ffn_hidden_size,
    )
    vocabulary = m.padded_vocab_size(t) // t
    embedding, loss = any(s.embedding for s in stages), any(s.loss for s in stages)
    out: Shapes = {"embedding.weight": (vocabulary, h)} if embedding else {}
    for i in (i for stage in stages for i in stage.layers):
        out |= {
            f"layers.{i}.attention_norm.weight": (h,),
            f"layers.{i}.attention.qkv.weight": ((a + 2 * g) * d // t, h),
            f"layers.{i}.attention.proj.weight": (h, a * d // t),
            f"layers.{i}.mlp_norm.weight": (h,),
            f"layers.{i}.mlp.gate_up.weight": (2 * f // t, h),
            f"layers.{i}.mlp.down.weight": (h, f // t),
        }
    if loss:
        out["norm.weight"] = (h,)
        if m.untie_embeddings_and_output_weights or not embedding:
            out["head.weight"] = (vocabulary, h)
    return out


def count(parameters: Shapes) -> int:
    """Count the numbers in these parameters."""
    return sum(prod(shape) for shape in parameters.values())


def total_parameters(config: Config) -> int:
    """Count the model's parameters, without the padding of the vocabulary."""
    m = config.model
    matrices = 2 if m.untie_embeddings_and_output_weights else 1
    padded = m.padded_vocab_size(1)
    assert m.vocab_size is not None, "padded_vocab_size has raised"
    padding = padded - m.vocab_size
    return count(shapes(config, tp=1)) - matrices * padding * m.hidden_size


def accumulate_dtype(config: Config) -> torch.dtype:
    """Return the dtype of gradients, masters and moments: fp32, or fp64 under --fp64."""
    return torch.float64 if config.run.dtype == torch.float64 else torch.float32


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of a gradient, master or moment."""
    return accumulate_dtype(config).itemsize


def gradient_bytes(config: Config) -> int:
    """Return the bytes of a main gradient, where a rank adds up its micro-batches."""
    return 2 if config.parallel.main_grads_dtype == "bf16" else accumulate_bytes(config)


def level(config: Config) -> int:
    """Return the ZeRO level in effect: a rank that shares with no one keeps everything."""
    return config.parallel.zero if config.parallel.shard_size > 1 else 0


def chunk_of(name: str, stages: tuple[Stage, ...]) -> int:
    """Return the chunk, among a rank's stages, of a parameter; 0 where the name does not say."""
    part, *rest = name.split(".")
    for chunk, stage in enumerate(stages):
        here = {"embedding": stage.embedding, "norm": stage.loss, "head": stage.loss}
        if int(rest[0]) in stage.layers if part == "layers" else here.get(part):
            return chunk
    return 0


def flats(config: Config, pp_rank: int = 0, parameters: Shapes | None = None) -> list[BucketLayout]:
    """Lay the parameters of a pipeline rank, or others that a fork has, out in buckets.

    They stand apart where a gradient is summed over another axis: norms under sequence
    parallelism (tp), tied embeddings whose other end is on another pipeline rank (ends).
    """
    p, stages = config.parallel, pipeline.rank_stages(config, pp_rank)
    held = [
        shapes(config, stages=pipeline.rank_stages(config, rank))
        for rank in range(p.pipeline_model_parallel_size)
    ]
    parameters = parameters or held[pp_rank]
    size = p.ddp_bucket_size or layout.automatic_size(max(map(count, [parameters, *held])))
    tied = not config.model.untie_embeddings_and_output_weights
    apart = tied and any(s.embedding for s in stages) != any(s.loss for s in stages)
    entries = []
    for name, shape in parameters.items():
        axes = ("tp",) if len(shape) == 1 and p.sequence_parallel else ()
        if apart and name in ("embedding.weight", "head.weight"):
            axes = ("ends",)
        entries.append(ParamEntry(name, prod(shape), chunk_of(name, stages), axes))
    return layout.make_buckets(entries, size, p.data_parallel_size, by_block=level(config) == 3)


def state(config: Config, flats: list[BucketLayout]) -> dict[str, int]:
    """Return the bytes of parameters, gradients, masters and moments that a rank keeps, wherever
    these lie: masters in host memory are apart from the weights, whatever the dtype of these."""
    size, p = config.run.dtype.itemsize, config.parallel
    acc = accumulate_bytes(config)
    shared = level(config) or min(p.zero, 1)  # alone, an owner's sums are of all
    kept = layout.memory(flats, shared, p.shard_size, size, gradient_bytes(config), acc)
    if offloaded(config):
        kept["masters"] = kept["moments"] // 2
    return kept


def offloaded(config: Config) -> bool:
    """True where optimizer state lies in another memory than the weights."""
    return config.parallel.optimizer_cpu_offload and config.parallel.device != "cpu"


def host_bytes(config: Config, flats: list[BucketLayout]) -> int:
    """Return the bytes in host memory of what --optimizer-cpu-offload keeps there.

    Of the owned part a gradient, a master and two moments, and where weights are narrower the
    weights that go up.
    """
    if not offloaded(config):
        return 0
    acc, size, p = accumulate_bytes(config), config.run.dtype.itemsize, config.parallel
    own = sum(flat.length for flat in flats) // p.shard_size
    return own * (4 * acc + (size if size < acc else 0))


def flops_per_token(config: Config) -> float:
    """Count the model's floating-point operations a trained token, without recomputation.

    6 for each weight in a matmul (2 forward, 4 backward), and 6 L s a d for causal attention's two
    products; look-ups and elementwise work are left out (Chowdhery et al. 2022, appendix B).
    """
    m = config.model
    return 3.0 * (m.num_layers * pipeline.layer_flops(m) + pipeline.head_flops(m))
