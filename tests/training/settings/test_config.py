# SPDX-License-Identifier: Apache-2.0
"""The config: derived sizes, and which fields change its digests."""

import json
from dataclasses import fields, replace

import pytest
import torch

from training.run.same_settings import differing
from training.settings.arguments import (
    BatchConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from training.settings.config import Config, UsageError

MODEL = ModelConfig(num_layers=2, hidden_size=96, num_attention_heads=6, seq_length=32)
CONFIG = Config(MODEL)


def test_sizes_that_follow():
    assert (MODEL.ffn_hidden_size, MODEL.num_query_groups, MODEL.kv_channels) == (256, 6, 16)
    assert MODEL.max_position_embeddings == 32
    # Megatron's size for a gated unit
    assert ModelConfig(1, 4096, 32, 8).ffn_hidden_size == 10880


@pytest.mark.parametrize("vocab,tp,padded", [(1000, 1, 1024), (128256, 8, 129024), (256, 2, 256)])
def test_padded_vocabulary(vocab, tp, padded):
    assert replace(MODEL, vocab_size=vocab).padded_vocab_size(tp) == padded


def test_layout_counts():
    layout = ParallelConfig(world_size=16, tensor_model_parallel_size=4)
    assert (layout.model_parallel_size, layout.data_parallel_size) == (4, 4)


@pytest.mark.parametrize(
    "settings,level,shares",
    [
        ({}, 0, 1),
        ({"use_distributed_optimizer": True}, 1, 8),
        ({"zero_stage": 3}, 3, 8),
        ({"zero_stage": 2, "use_distributed_optimizer": True}, 2, 8),
        ({"zero_stage": 0}, 0, 1),
        ({"zero_stage": 1, "num_distributed_optimizer_instances": 4}, 1, 2),
    ],
)
def test_the_zero_level_and_who_shares(settings, level, shares):
    layout = ParallelConfig(world_size=16, tensor_model_parallel_size=2, **settings)
    assert (layout.zero, layout.shard_size) == (level, shares)


def test_digest_sees_what_changes_the_numbers():
    changed = [
        replace(CONFIG, model=replace(MODEL, norm_epsilon=1e-6)),
        replace(CONFIG, batch=BatchConfig(global_batch_size=2)),
        replace(CONFIG, data=DataConfig(split="9,1,0")),
        replace(CONFIG, run=RunConfig(seed=1)),
        replace(CONFIG, run=RunConfig(dtype=torch.bfloat16)),
    ]
    assert len({c.digest() for c in [CONFIG, *changed]}) == len(changed) + 1


def test_digest_does_not_see_layout_log_and_loader():
    same = [
        replace(CONFIG, parallel=ParallelConfig(world_size=4, tensor_model_parallel_size=2)),
        replace(CONFIG, batch=BatchConfig(micro_batch_size=4)),
        replace(CONFIG, data=DataConfig(num_workers=0, data_cache_path="/tmp/x")),
        replace(CONFIG, log=LogConfig(log_interval=1)),
        replace(CONFIG, notes=("said",)),
    ]
    assert {c.digest() for c in same} == {CONFIG.digest()}


def test_all_ranks_compare_everything_but_local_places():
    other = replace(
        CONFIG,
        log=LogConfig(log_interval=1, tensorboard_dir="/node7"),
        optimizer=replace(CONFIG.optimizer, lr=1e-4),
    )
    assert other.canonical_json() != CONFIG.canonical_json()
    mine, theirs = (json.loads(c.canonical_json()) for c in (CONFIG, other))
    assert differing(mine, theirs) == {
        "log.log_interval": (10, 1),
        "optimizer.lr": (3e-4, 1e-4),
    }
    local = replace(CONFIG, log=LogConfig(tensorboard_dir="/node7", log_json="a"))
    assert local.canonical_json() == CONFIG.canonical_json()


def test_flat_names_every_field_of_every_part():
    others = ("extra", "stages", "notes", "given", "command_line")
    parts = [f.name for f in fields(Config) if f.name not in others]
    expected = {f"{p}.{f.name}" for p in parts for f in fields(getattr(CONFIG, p))}
    later = {"fp8_amax_history_len", "fp8_amax_compute_algo"}  # at their defaults
    left_out = {"optimizer.optimizer", "data.data_order", *(f"float8.{name}" for name in later)}
    yarn = "position_embedding_type rotary_scaling_factor mscale mscale_all_dim"
    yarn += " rotary_seq_len_interpolation_factor"
    yarn += " no_yarn_correction_range_round_to_int yarn_original_max_position_embeddings"
    left_out |= {f"model.{name}" for name in f"{yarn} yarn_beta_fast yarn_beta_slow".split()}
    left_out |= {f"moe.{f.name}" for f in fields(CONFIG.moe)}  # of a dense model
    muon = (f.name for f in fields(CONFIG.optimizer) if f.name.startswith("muon_"))
    left_out |= {f"optimizer.{name}" for name in muon}  # at their defaults
    clips = ("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "output_z_loss_coeff")
    left_out |= {f"optimizer.{name}" for name in (*clips, "param_group")}
    left_out |= {f"model.{f.name}" for f in fields(CONFIG.model) if "mup" in f.name}
    assert set(CONFIG.flat()) == expected - left_out
    other = replace(CONFIG, optimizer=replace(CONFIG.optimizer, optimizer="other"))
    assert set(other.flat()) == expected - left_out | {"optimizer.optimizer"}
    assert other.digest() != CONFIG.digest()
    longer = replace(CONFIG, float8=replace(CONFIG.float8, fp8_amax_history_len=2))
    assert longer.flat()["float8.fp8_amax_history_len"] == 2
    assert replace(CONFIG, extra=(("my_flag", 3),)).flat()["extra.my_flag"] == 3


def test_vocabulary_comes_from_the_tokenizer_unless_stated_larger():
    assert CONFIG.with_vocab(1000).model.vocab_size == 1000
    stated = replace(CONFIG, model=replace(MODEL, vocab_size=1024))
    assert stated.with_vocab(1000).model.vocab_size == 1024
    with pytest.raises(UsageError, match="--vocab-size 1024 is smaller than the tokenizer.*1025"):
        stated.with_vocab(1025)
