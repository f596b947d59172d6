# SPDX-License-Identifier: Apache-2.0
"""Work out, from a Config alone, what a rank keeps for backward while a schedule runs.

s sequence, b micro-batch, h hidden, a query heads, g key/value heads, d head size, f ffn hidden,
t tensor-parallel size, B bytes of a weight, n = s b / t tokens a rank under sequence parallelism
(SP), else n = s b
"""

from dataclasses import dataclass

from mpu.pipeline.layout import Stage
from mpu.pipeline.simulate import simulate
from training import pipeline
from training.config import Config
from training.estimate import whole


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
    own = own_tokens(config)
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
    one_input = own_tokens(config) * m.hidden_size * config.run.dtype.itemsize
    layer, ends = layer_activations(config), 2 * one_input * stage.loss
    if p.recompute_granularity == "selective":  # the core keeps its input, and no softmax sums
        sums = tokens * m.num_attention_heads // p.tensor_model_parallel_size * 4
        return layers * (layer - sums) + ends
    if p.recompute_granularity != "full":
        return layers * layer + ends
    again, group = pipeline.recomputed_layers(config, stage), p.recompute_num_layers or 1
    inputs = -(-again // group) if p.recompute_method == "uniform" else again
    return inputs * one_input + (layers - again) * layer + ends


def recomputed(config: Config, stage: Stage) -> int:
    """Return the bytes that a chunk of layers keeps while it runs again in B."""
    p, again = config.parallel, pipeline.recomputed_layers(config, stage)
    group = (p.recompute_num_layers or 1) if p.recompute_method == "uniform" else 1
    return min(group, again) * layer_activations(config) if again else 0


def kept_for_w(config: Config, stage: Stage) -> int:
    """Return the bytes that a stage keeps of one micro-batch from B to W, where these are apart.

    Of every matmul the input and the gradient of the output: qkv, attention's projection, gate and
    up, down; of the embedding the gradient of its output; of the head its input (and, apart, the
    logits' gradient).
    """
    m, p, size = config.model, config.parallel, config.run.dtype.itemsize
    tokens, own = m.seq_length * config.batch.micro_batch_size, own_tokens(config)
    heads = 2 * m.num_attention_heads + 2 * m.num_query_groups
    cut = tokens * (heads * m.kv_channels + 3 * m.ffn_hidden_size) // p.tensor_model_parallel_size
    layer = cut + 4 * own * m.hidden_size
    ends = tokens * m.hidden_size * stage.embedding + own * m.hidden_size * stage.loss
    return (len(stage.layers) * layer + ends) * size


def own_tokens(config: Config) -> int:
    """Count the tokens of a micro-batch that a rank's hidden states hold."""
    p, tokens = config.parallel, config.model.seq_length * config.batch.micro_batch_size
    return tokens // p.tensor_model_parallel_size if p.sequence_parallel else tokens


def activations(config: Config) -> int:
    """Return the bytes the whole model keeps for one micro-batch, at the fullest moment."""
    (stage,) = whole(config)
    return kept_for_b(config, stage) + recomputed(config, stage)
