# SPDX-License-Identifier: Apache-2.0
"""Flags of trees derived from Megatron-LM: other names are obeyed, a tree's own are left out."""

import shlex

import pytest

from training.config import UsageError
from training.flags.parse import parse
from training.flags.table import known_flags
from training.flags.trees import SYNONYMS, TREES, VALUES

BASE = "--hidden-size 64 --num-attention-heads 4 --lr 1e-3 --train-iters 2 --mock-data"
BASE += " --vocab-size 100 --seq-length 64"


def read(more, layers="--num-layers 2"):
    return parse(shlex.split(f"{BASE} {layers} {more}"), 1)


def test_the_tables_are_sound():
    known = known_flags()
    for name, words in SYNONYMS.items():
        assert name not in known and words[0] in known, name
    for (flag, value), here in VALUES.items():
        assert {flag, here} & known.keys() and value == value.lower()
    for tree, flags in TREES.items():
        assert len(flags) > 15 and not flags.keys() & {*known, *SYNONYMS}, tree


SAME = [  # of another program, of this one, what a line says
    ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2",
     "--num-key-value-heads is taken as --group-query-attention --num-query-groups"),
    ("--num_attention_heads_kv=2", "--group-query-attention --num-query-groups 2", "is taken as"),
    ("--rope-theta 5e5", "--rotary-base 5e5", "--rope-theta is taken as --rotary-base"),
    ("--glu_activation swiglu", "--swiglu", "--glu-activation swiglu is taken as --swiglu"),
    ("--glu-activation=swiglu", "--swiglu", "--glu-activation swiglu is taken as --swiglu"),
    ("--optimizer FusedAdamW", "--optimizer adam", "--optimizer FusedAdamW is taken as adam"),
    ("--optimizer=adamw", "--optimizer adam", "--optimizer adamw is taken as adam"),
    ("--no_tie_embed_logits", "--untie-embeddings-and-output-weights", "is taken as --untie-"),
    ("--micro_batch_size 4", "--micro-batch-size 4", "--micro_batch_size is taken as --micro-"),
    ("--checkpoint-activations", "--recompute-granularity full --recompute-method uniform", ""),
    ("--batch-size 4", "--micro-batch-size 4", ""),
]  # fmt: skip


@pytest.mark.parametrize("there, here, says", SAME)
def test_the_same_under_another_name_is_obeyed(there, here, says):
    found, wanted = read(there), read(here)
    assert found.digest() == wanted.digest() and found.flat() == wanted.flat()
    assert any(says in note for note in found.notes) or not says


def test_a_fork_s_own_flag_of_such_a_name_stays_its_own():
    config = parse(
        shlex.split(f"{BASE} --num-layers 2 --rope-theta 3"), 1,
        lambda parser: parser.add_argument("--rope-theta", type=int),
    )  # fmt: skip
    assert dict(config.extra) == {"rope_theta": 3} and config.model.rotary_base == 10000


def test_a_tree_s_own_flags_are_left_out_and_listed():
    config = read("--trigger-path /x --goldfish-loss --goldfish-k 3 --ignore-flags swiss-ai")
    (line,) = [note for note in config.notes if "swiss-ai" in note]
    assert line.endswith("not done here: --trigger-path, --goldfish-loss, --goldfish-k")
    assert config.digest() == read("").digest()
    both = "--trigger-path=/x --ignore-flags pai swiss-ai beta:1 --beta 0.9"
    assert {*read(both).run.ignore_flags} == {"pai", "swiss-ai", "beta:1"}
    assert "--ignore-flags pai: no flag of it is given" in read(both).notes


def test_a_tree_leaves_out_nothing_of_this_program_nor_a_stray_value():
    assert read("--ignore-flags pai --seed 3").run.seed == 3
    with pytest.raises(UsageError, match="7: a value that belongs to no flag"):
        read("--ignore-flags swiss-ai --goldfish-loss 7")
    with pytest.raises(UsageError, match="--job-name is not .*, but of megatron-llama;"):
        read("--ignore-flags swiss-ai --job-name x")
