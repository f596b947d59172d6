# SPDX-License-Identifier: Apache-2.0
"""Work out, from a Config alone, what a run would hold, compute and send: no model, no ranks.

s sequence, b micro-batch, h hidden, a query heads, g key/value heads, d head size, f ffn hidden,
L layers, V padded vocabulary, t tensor-parallel size, D data-parallel size, B bytes of a weight,
n = s b / t tokens a rank under sequence parallelism (SP), else n = s b
"""

from dataclasses import dataclass
from math import prod

import torch

from training import batch_schedule
from training.config import Config

Shapes = dict[str, tuple[int, ...]]


def shapes(config: Config, tp: int | None = None) -> Shapes:
    """Return the parameters one rank holds, by the model's names; tp 1 gives the whole model."""
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
    out: Shapes = {"embedding.weight": (vocabulary, h)}
    for i in range(m.num_layers):
        out |= {
            f"layers.{i}.attention_norm.weight": (h,),
            f"layers.{i}.attention.qkv.weight": ((a + 2 * g) * d // t, h),
            f"layers.{i}.attention.proj.weight": (h, a * d // t),
            f"layers.{i}.mlp_norm.weight": (h,),
            f"layers.{i}.mlp.gate_up.weight": (2 * f // t, h),
            f"layers.{i}.mlp.down.weight": (h, f // t),
        }
    out["norm.weight"] = (h,)
    if m.untie_embeddings_and_output_weights:
        out["head.weight"] = (vocabulary, h)
    return out


def count(parameters: Shapes) -> int:
    """Count the numbers in these parameters."""
    return sum(prod(shape) for shape in parameters.values())


def total_parameters(config: Config) -> int:
    """Count the model's parameters, without the padding of the vocabulary."""
    m = config.model
    matrices = 2 if m.untie_embeddings_and_output_weights else 1
    padding = m.padded_vocab_size(1) - m.vocab_size
    return count(shapes(config, tp=1)) - matrices * padding * m.hidden_size


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of a gradient, master or moment: fp32, or fp64 under --fp64."""
    return 8 if config.run.dtype == torch.float64 else 4


def memory(config: Config, parameters: Shapes) -> dict[str, int]:
    """Return the bytes one rank holds, by kind, with one micro-batch in flight.

    Counted like Korthikanti et al. 2022 (arXiv:2205.05198, section 4), for the operations of this
    Llama: what each one keeps for backward. Buffers of collectives, of the allocator and of the
    kernels come on top.
    """
    p, size, acc = config.parallel, config.run.dtype.itemsize, accumulate_bytes(config)
    m, n = config.model, count(parameters)
    tokens = m.seq_length * config.batch.micro_batch_size
    columns = m.padded_vocab_size(p.tensor_model_parallel_size) // p.tensor_model_parallel_size
    return {
        "parameters": n * size,
        "gradients": n * acc,
        "masters": n * acc if size < acc else 0,
        "moments": 2 * n * acc,
        "activations": activations(config),
        "logits": tokens * columns * size,
    }


def layer_activations(config: Config) -> int:
    """Return the bytes that one layer keeps for backward when nothing is recomputed.

        both norms' inputs and outputs     4 n h B, and 2 n inverse lengths
        q, k, v after rotation             s b (a + 2g) d B / t
        attention's output                 s b a d B / t, and s b a / t softmax sums
        gate and up, and their product     s b 3 f B / t

    That paper's GPT keeps s b h (34 + 5 a s/h)/t bytes in 16 bits under SP; here there is no
    dropout and no s x s matrix.
    """
    m, p, size, acc = config.model, config.parallel, config.run.dtype.itemsize, 4
    t, tokens = p.tensor_model_parallel_size, m.seq_length * config.batch.micro_batch_size
    own = tokens // t if p.sequence_parallel else tokens
    heads = (2 * m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    return (
        own * (4 * m.hidden_size * size + 2 * acc)
        + tokens * (heads + 3 * m.ffn_hidden_size) // t * size
        + tokens * m.num_attention_heads // t * acc
    )


def activations(config: Config) -> int:
    """Return the bytes kept for backward by the layers and the last norm, at the fullest moment.

    Full recomputation keeps one layer input a chunk, and, while a chunk runs again, its layers.
    """
    m, p, size = config.model, config.parallel, config.run.dtype.itemsize
    tokens = m.seq_length * config.batch.micro_batch_size
    t = p.tensor_model_parallel_size
    own = tokens // t if p.sequence_parallel else tokens
    layer, one_input = layer_activations(config), own * m.hidden_size * size
    ends = 2 * one_input  # the last norm's input and output
    if p.recompute_granularity == "selective":  # the core keeps its input, and no softmax sums
        return m.num_layers * (layer - tokens * m.num_attention_heads // t * 4) + ends
    if p.recompute_granularity != "full":
        return m.num_layers * layer + ends
    group = p.recompute_num_layers
    if p.recompute_method == "uniform":
        return -(-m.num_layers // group) * one_input + group * layer + ends
    return group * one_input + (m.num_layers - group) * layer + (layer if group else 0) + ends


def flops_per_token(config: Config) -> float:
    """Count the model's floating-point operations a trained token, without recomputation.

    6 for each weight in a matmul (2 forward, 4 backward), and 6 L s a d for causal attention's two
    products; look-ups and elementwise work are left out (Chowdhery et al. 2022, appendix B).
    """
    m = config.model
    a, g, d, h = m.num_attention_heads, m.num_query_groups, m.kv_channels, m.hidden_size
    weights = m.num_layers * (h * d * (2 * a + 2 * g) + 3 * h * m.ffn_hidden_size)
    weights += h * m.vocab_size
    return 6.0 * weights + 6.0 * m.num_layers * m.seq_length * a * d


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step: how many, and the bytes of the whole tensor of each."""

    axis: str
    verb: str
    times: int
    bytes: int
    size: int  # ranks of the axis

    @property
    def sent(self) -> int:
        """Return the bytes one rank sends a step, in a ring: (size - 1)/size of the tensor, twice
        for an all-reduce."""
        factor = 2 if self.verb == "all-reduce" else 1
        return self.times * factor * self.bytes * (self.size - 1) // self.size


def traffic(config: Config, parameters: Shapes) -> list[Traffic]:
    """List what a step sends over each axis; scalars and start-up are left out.

    Per layer and micro-batch: under SP 2 all-gathers and 2 reduce-scatters forward, 4 and 2
    backward; else 2 all-reduces each way. The embedding and the output layer add one layer's end
    each. Full recomputation repeats the forward ones. Gradients are all-reduced once a step.
    """
    m, p = config.model, config.parallel
    t, dp = p.tensor_model_parallel_size, p.data_parallel_size
    steps = batch_schedule.micro_batches(config, 0)
    tokens = m.seq_length * config.batch.micro_batch_size
    whole = tokens * m.hidden_size * config.run.dtype.itemsize
    acc, layers = accumulate_bytes(config), m.num_layers
    again = 0
    if p.recompute_granularity == "full":
        again = layers if p.recompute_method == "uniform" else min(layers, p.recompute_num_layers)
    out = []
    if t > 1:
        if p.sequence_parallel:
            # embedding: scatter forward, gather backward; output layer: 2 gathers, 1 scatter
            gathers, scatters = 6 * layers + 2 * again + 3, 4 * layers + 2 * again + 2
            out.append(Traffic("tp", "all-gather", steps * gathers, whole, t))
            out.append(Traffic("tp", "reduce-scatter", steps * scatters, whole, t))
            norms = sum(prod(s) for s in parameters.values() if len(s) == 1)
            out.append(Traffic("tp", "all-reduce", 1, norms * acc, t))
        else:
            out.append(Traffic("tp", "all-reduce", steps * (4 * layers + 2 * again + 2), whole, t))
        out.append(Traffic("tp", "all-gather", steps, t * 3 * tokens * acc, t))  # the loss
    if dp > 1:
        out.append(Traffic("dp", "all-reduce", 1, count(parameters) * acc, dp))
    return out
