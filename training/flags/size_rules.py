# SPDX-License-Identifier: Apache-2.0
"""Check the sizes of a model and of a batch, and that they divide over the ranks."""

from training.settings import batch_size
from training.settings.arguments import ModelConfig
from training.settings.config import Config, UsageError

TOKENS = 1 << 23  # of one micro-batch
PASSES = 1 << 17  # forwards of all stages in one step


def check(config: Config) -> None:
    """Raise UsageError for sizes of a model that are invalid in every layout."""
    m = config.model
    if m.kv_channels % 2:
        raise UsageError(f"--kv-channels {m.kv_channels} must be even: positions rotate in pairs")
    divides(
        f"--num-attention-heads {m.num_attention_heads}",
        m.num_attention_heads % m.num_query_groups,
        f"--num-query-groups {m.num_query_groups}",
        "each key/value head serves the same number of query heads",
    )
    if m.ffn_hidden_size < 1:
        raise UsageError(
            f"--ffn-hidden-size is missing: --hidden-size {m.hidden_size} is too small to "
            "derive it from"
        )
    if m.use_mup and not m.mup_base_hidden_size:
        raise UsageError(
            "--use-mup needs --mup-base-hidden-size, the hidden size of the model whose learning "
            f"rate was searched; if this is that model, give {m.hidden_size}, Megatron-LM's default"
        )
    if m.seq_length > m.max_position_embeddings:
        raise UsageError(
            f"--seq-length {m.seq_length} is longer than --max-position-embeddings "
            f"{m.max_position_embeddings}"
        )
    if m.rotary_seq_len_interpolation_factor > 1:
        if m.use_rope_scaling or m.position_embedding_type == "yarn":
            other = "--use-rope-scaling" if m.use_rope_scaling else "--position-embedding-type yarn"
            raise UsageError(
                "--rotary-seq-len-interpolation-factor "
                f"{m.rotary_seq_len_interpolation_factor:g} and {other} exclude each other"
            )
    if m.position_embedding_type == "yarn":
        _yarn(m)


def _yarn(m: ModelConfig) -> None:
    """Raise UsageError for settings of YaRN that contradict each other or other flags."""
    if m.rotary_base <= 1:
        raise UsageError(
            f"--rotary-base {m.rotary_base:g} must be above 1 with --position-embedding-type yarn"
        )
    if m.yarn_beta_fast < m.yarn_beta_slow:
        raise UsageError(
            f"--yarn-beta-fast {m.yarn_beta_fast:g} must be at least --yarn-beta-slow "
            f"{m.yarn_beta_slow:g}"
        )


def mup_notes(config: Config) -> list[str]:
    """Return lines on muP's width factor, and on flags that do not scale with the width."""
    m, o = config.model, config.optimizer
    if not m.use_mup:
        return []
    times = f"{m.hidden_size / m.mup_base_hidden_size:g}"
    lines = [f"muP: the width is {times} x that of --mup-base-hidden-size {m.mup_base_hidden_size}"]
    if o.optimizer == "muon" and o.muon_scale_mode == "spectral":
        lines.append(
            "--use-mup with --muon-scale-mode spectral: the best learning rate of one width does "
            "not carry over to another; use --muon-scale-mode unit_rms_norm"
        )
    if o.decoupled_lr is not None:
        lines.append(
            "--use-mup with --decoupled-lr: --decoupled-lr is the learning rate of the embedding "
            "and the output layer at every width"
        )
    return lines


def check_cut(config: Config) -> None:
    """Raise UsageError if heads or channels do not divide over the tensor-parallel ranks.

    A rank has whole query heads. It also has whole key/value heads or, if there are fewer of them
    than ranks, a part of one head, which equally many ranks share (mpu/layers/qkv.py).
    """
    m, t = config.model, config.parallel.tensor_model_parallel_size
    tp, groups = f"--tensor-model-parallel-size {t}", f"--num-query-groups {m.num_query_groups}"
    why = "each rank holds whole"
    heads, k = m.num_attention_heads, m.num_query_groups
    divides(f"--num-attention-heads {heads}", heads % t, tp, f"{why} query heads")
    if k >= t:
        sharing = f"{why} key/value heads, or the same number of ranks shares each of them"
        divides(groups, k % t, tp, sharing)
    else:
        divides(tp, t % k, groups, "each key/value head is shared by the same number of ranks")
        ranks, d = t // k, m.kv_channels
        why_parts = "these ranks hold equal parts of a head"
        divides(f"--kv-channels {d}", d % ranks, f"{tp} / {groups} = {ranks}", why_parts)
    f = m.ffn_hidden_size
    divides(f"--ffn-hidden-size {f}", f % t, tp, f"{why} channels")


def divides(what: str, rest: int, by: str, why: str) -> None:
    """Raise UsageError if `rest`, a remainder, is not 0. what, by: the flags with their values."""
    if rest:
        raise UsageError(f"{what} is not a multiple of {by}: {why}")


def check_micro_batch(config: Config) -> None:
    """Raise UsageError for a micro-batch of more than TOKENS tokens."""
    b, s = config.batch.micro_batch_size, config.model.seq_length
    if b * s > TOKENS:
        raise UsageError(
            f"--micro-batch-size {b} x --seq-length {s} = {b * s} tokens: must be at most {TOKENS}"
        )


def check_batch(config: Config) -> None:
    """Raise UsageError for a batch that does not divide, or has more than PASSES forwards."""
    batch, dp = config.batch, config.parallel.data_parallel_size
    flag = "--global-batch-size"
    if batch.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule's batch of"
    for _, size in batch_size.schedule(config):
        if size % (batch.micro_batch_size * dp):
            raise UsageError(
                f"{flag} {size} is not a multiple of --micro-batch-size {batch.micro_batch_size} "
                f"x {dp} data-parallel ranks = {batch.micro_batch_size * dp}"
            )
        p = config.parallel.pipeline_model_parallel_size * config.parallel.virtual_stages
        if (passes := size // (batch.micro_batch_size * dp) * p) > PASSES:
            raise UsageError(
                f"{flag} {size} is {passes} forwards of pipeline stages in one step, and at most "
                f"{PASSES} can be scheduled: use a larger --micro-batch-size"
            )
    if batch_size.total_iterations(config) < 1:
        raise UsageError(
            f"--train-samples {batch.train_samples} is less than one batch of "
            f"{batch.global_batch_size} samples"
        )
