# SPDX-License-Identifier: Apache-2.0
"""Work out, from a Config alone, what a run would hold, compute and send: no model, no ranks.

s sequence, b micro-batch, h hidden, a query heads, g key/value heads, d head size, f ffn hidden,
L layers, V padded vocabulary, t tensor-parallel size, D data-parallel size, B bytes of a weight,
n = s b / t tokens a rank under sequence parallelism (SP), else n = s b
"""

from dataclasses import dataclass
from math import prod

import torch

from mpu.pipeline.layout import Stage
from mpu.pipeline.simulate import simulate
from training import batch_schedule, pipeline
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
    padding = m.padded_vocab_size(1) - m.vocab_size
    return count(shapes(config, tp=1)) - matrices * padding * m.hidden_size


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of a gradient, master or moment: fp32, or fp64 under --fp64."""
    return 8 if config.run.dtype == torch.float64 else 4


def state(config: Config, parameters: Shapes) -> dict[str, int]:
    """Return the bytes of these parameters, their gradients and their optimizer state.

    --use-distributed-optimizer shares the state among the data-parallel ranks; the padding of
    buckets, at most 1,024 elements a parameter and rank, is left out.
    """
    size, acc, n = config.run.dtype.itemsize, accumulate_bytes(config), count(parameters)
    p = config.parallel
    own = -(-n // p.data_parallel_size) if p.use_distributed_optimizer else n
    return {
        "parameters": n * size,
        "gradients": n * acc,
        "masters": own * acc if size < acc else 0,
        "moments": 2 * own * acc,
    }


@dataclass(frozen=True)
class Held:
    """What one pipeline rank keeps for backward at the fullest moment of a step, in bytes.

    for_b and for_w: left by F's for their B's and by B's for their W's, each at its own fullest
    moment; activations: both at once, with what a recomputed layer needs on top; logits: apart.
    """

    for_b: int
    for_w: int
    activations: int
    logits: int


def held(config: Config) -> list[Held]:
    """Follow the schedule, at the run's largest batch, and say what each pipeline rank keeps.

    Counted like Korthikanti et al. 2022 (arXiv:2205.05198, section 4), for the operations of this
    Llama: what each one keeps for backward. Buffers of collectives, of the allocator and of the
    kernels come on top.
    """
    p, size = config.parallel, config.run.dtype.itemsize
    tokens = config.model.seq_length * config.batch.micro_batch_size
    columns = config.model.padded_vocab_size(p.tensor_model_parallel_size)
    logits = tokens * columns // p.tensor_model_parallel_size * size
    cut = pipeline.stages_of(config)
    schedule = pipeline.schedule_of(config, max(pipeline.micro_batch_counts(config)))
    costs = pipeline.costs(config)
    kept = simulate(
        schedule, costs, [kept_for_b(config, s) for s in cut], [kept_for_w(config, s) for s in cut]
    )
    of_loss = [logits * stage.loss for stage in cut]
    apart = simulate(schedule, costs, of_loss, of_loss)  # their gradient waits for the head's W
    return [
        Held(
            int(kept.peak_for_b[r]),
            int(kept.peak_for_w[r]),
            int(kept.peak[r])
            + max(recomputed(config, stage) for stage in pipeline.rank_stages(config, r)),
            int(apart.peak[r]),
        )
        for r in range(p.pipeline_model_parallel_size)
    ]


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
    own = _own_tokens(config)
    heads = (2 * m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    return (
        own * (4 * m.hidden_size * size + 2 * acc)
        + tokens * (heads + 3 * m.ffn_hidden_size) // t * size
        + tokens * m.num_attention_heads // t * acc
    )


def kept_for_b(config: Config, stage: Stage) -> int:
    """Return the bytes that a stage keeps of one micro-batch until its B, logits apart.

    Full recomputation keeps one layer input a chunk of layers; the last norm its input and output.
    """
    m, p, layers = config.model, config.parallel, len(stage.layers)
    tokens = m.seq_length * config.batch.micro_batch_size
    one_input = _own_tokens(config) * m.hidden_size * config.run.dtype.itemsize
    layer, ends = layer_activations(config), 2 * one_input * stage.loss
    if p.recompute_granularity == "selective":  # the core keeps its input, and no softmax sums
        sums = tokens * m.num_attention_heads // p.tensor_model_parallel_size * 4
        return layers * (layer - sums) + ends
    if p.recompute_granularity != "full":
        return layers * layer + ends
    again, group = pipeline.recomputed_layers(config, stage), p.recompute_num_layers
    inputs = -(-again // group) if p.recompute_method == "uniform" else again
    return inputs * one_input + (layers - again) * layer + ends


def recomputed(config: Config, stage: Stage) -> int:
    """Return the bytes that a chunk of layers keeps while it runs again in B."""
    p, again = config.parallel, pipeline.recomputed_layers(config, stage)
    group = p.recompute_num_layers if p.recompute_method == "uniform" else 1
    return min(group, again) * layer_activations(config) if again else 0


def kept_for_w(config: Config, stage: Stage) -> int:
    """Return the bytes that a stage keeps of one micro-batch from B to W, where these are apart.

    Of every matmul the input and the gradient of the output: qkv, attention's projection, gate and
    up, down; of the embedding the gradient of its output; of the head its input (and, apart, the
    logits' gradient).
    """
    m, p, size = config.model, config.parallel, config.run.dtype.itemsize
    tokens, own = m.seq_length * config.batch.micro_batch_size, _own_tokens(config)
    heads = 2 * m.num_attention_heads + 2 * m.num_query_groups
    cut = tokens * (heads * m.kv_channels + 3 * m.ffn_hidden_size) // p.tensor_model_parallel_size
    layer = cut + 4 * own * m.hidden_size
    ends = tokens * m.hidden_size * stage.embedding + own * m.hidden_size * stage.loss
    return (len(stage.layers) * layer + ends) * size


def _own_tokens(config: Config) -> int:
    """Count the tokens of a micro-batch that a rank's hidden states hold."""
    p, tokens = config.parallel, config.model.seq_length * config.batch.micro_batch_size
    return tokens // p.tensor_model_parallel_size if p.sequence_parallel else tokens


def activations(config: Config) -> int:
    """Return the bytes the whole model keeps for one micro-batch, at the fullest moment."""
    (stage,) = whole(config)
    return kept_for_b(config, stage) + recomputed(config, stage)


def flops_per_token(config: Config) -> float:
    """Count the model's floating-point operations a trained token, without recomputation.

    6 for each weight in a matmul (2 forward, 4 backward), and 6 L s a d for causal attention's two
    products; look-ups and elementwise work are left out (Chowdhery et al. 2022, appendix B).
    """
    m = config.model
    return 3.0 * (m.num_layers * pipeline.layer_flops(m) + pipeline.head_flops(m))


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
        """Return the bytes one rank sends a step: of a collective, in a ring, (size - 1)/size of
        the tensor, twice for an all-reduce."""
        if self.verb == "send":
            return self.times * self.bytes
        factor = 2 if self.verb == "all-reduce" else 1
        return self.times * factor * self.bytes * (self.size - 1) // self.size


def traffic(config: Config, parameters: Shapes, pp_rank: int = 0) -> list[Traffic]:
    """List what a rank sends in a step; scalars and start-up are left out.

    Per layer and micro-batch: under SP 2 all-gathers and 2 reduce-scatters forward, 4 and 2
    backward, 2 more gathers where W is apart from B; else 2 all-reduces each way. The embedding
    and the output layer add one layer's end each. Full recomputation repeats the forward ones. A
    stage sends its output on and its input's gradient back. Gradients are all-reduced once a step.
    """
    m, p = config.model, config.parallel
    t, dp, pp = (
        p.tensor_model_parallel_size,
        p.data_parallel_size,
        p.pipeline_model_parallel_size,
    )
    stages = pipeline.rank_stages(config, pp_rank)
    steps = batch_schedule.micro_batches(config, 0)
    split = pipeline.schedule_of(config, steps).split
    tokens = m.seq_length * config.batch.micro_batch_size
    hidden = m.hidden_size * config.run.dtype.itemsize  # bytes of one token's
    tensor, acc = tokens * hidden, accumulate_bytes(config)
    layers = sum(len(s.layers) for s in stages)
    again = sum(pipeline.recomputed_layers(config, s) for s in stages)
    embedding, loss = any(s.embedding for s in stages), any(s.loss for s in stages)
    out = []
    if t > 1:
        if p.sequence_parallel:
            # embedding: scatter forward, gather backward; output layer: 2 gathers, 1 scatter
            gathers = (6 + 2 * split) * layers + 2 * again + embedding + 2 * loss
            scatters = 4 * layers + 2 * again + embedding + loss
            out.append(Traffic("tp", "all-gather", steps * gathers, tensor, t))
            out.append(Traffic("tp", "reduce-scatter", steps * scatters, tensor, t))
            norms = sum(prod(s) for s in parameters.values() if len(s) == 1)
            out.append(Traffic("tp", "all-reduce", 1, norms * acc, t))
        else:
            times = 4 * layers + 2 * again + embedding + loss
            out.append(Traffic("tp", "all-reduce", steps * times, tensor, t))
        if loss:
            out.append(Traffic("tp", "all-gather", steps, t * 3 * tokens * acc, t))
    if pp > 1:
        messages = steps * pipeline.messages(config, pp_rank)
        out.append(Traffic("pp", "send", messages, _own_tokens(config) * hidden, pp))
        if not m.untie_embeddings_and_output_weights and embedding != loss:
            (tied,) = (
                parameters[n] for n in ("embedding.weight", "head.weight") if n in parameters
            )
            out.append(Traffic("pp", "all-reduce", 1, prod(tied) * acc, 2))
    if dp > 1 and config.parallel.use_distributed_optimizer:
        size = config.run.dtype.itemsize
        out.append(Traffic("dp", "reduce-scatter", 1, count(parameters) * acc, dp))
        out.append(Traffic("dp", "all-gather", 1, count(parameters) * size, dp))
    elif dp > 1:
        out.append(Traffic("dp", "all-reduce", 1, count(parameters) * acc, dp))
    return out
