# SPDX-License-Identifier: Apache-2.0
"""Whoever comes from another trainer gets this program's flag: obeyed, or named in the message."""

import re
import shlex

import pytest

from training.flags.megatron import known_flags, vocabulary
from training.flags.parse import parse
from training.settings.config import UsageError

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--train-iters 2 --mock-data --vocab-size 100"
)
NANOGPT = (  # its README, for a laptop, without the file of settings
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
OWN = {  # flags of tools and launchers, which a message names too
    "--input", "--output-prefix", "--loss-on", "--nproc-per-node",
}  # fmt: skip


def test_no_name_is_in_two_tables_and_each_names_a_flag():
    known, tables = known_flags(), vocabulary()
    assert not tables.instead.keys() & {*tables.same, *known}
    for name, text in tables.instead.items():
        assert name == name.lower() and "_" not in name and text[-1] not in ".; ", name
        named = {*re.findall(r"--[a-z][\w-]*\w", text)}
        assert all(word in known and known[word].usable for word in named - OWN), (name, named)


SAME = [  # what is typed, what it is here
    ("--n_layer 3 --n_head=2", "--num-layers 3 --num-attention-heads 2"),
    ("--block-size 32 --max_iters 7", "--seq-length 32 --train-iters 7"),
    ("--bf16 True", "--bf16"),
    ("--bf16 1 --tf32 0 --gradient_checkpointing no", "--bf16"),
    ("--gradient_checkpointing True", "--recompute-granularity full"),
    ("--lr_scheduler_type constant_with_warmup", "--lr-decay-style constant"),
    ("--optim adamw_torch", "--optimizer adam"),
    ("--training.steps 7 --training.seq_len 32", "--train-iters 7 --seq-length 32"),
    ("--tie_word_embeddings false", "--untie-embeddings-and-output-weights"),
    ("--warmup-updates 1 --total-num-update 2", "--lr-warmup-iters 1 --lr-decay-iters 2"),
]


def read(words, without=""):
    """Parse BASE with `words` after it, which replace what BASE says of the same flags."""
    base = BASE
    for flag in without.split():
        base = re.sub(rf"{flag} \S+ ?", "", base)
    return parse(shlex.split(f"{base} {words}"), 1)


@pytest.mark.parametrize("there, here", SAME)
def test_a_name_of_another_trainer_is_obeyed(there, here):
    flags = " ".join(re.findall(r"--[a-z-]+", here))
    found, wanted = read(there, flags), read(here, flags)
    assert found.digest() == wanted.digest() and found.flat() == wanted.flat()
    assert any(re.search("is taken as|changes nothing here", note) for note in found.notes)


def test_nanogpt_s_own_command_line_needs_data_and_a_learning_rate_alone():
    config = parse(shlex.split(f"{NANOGPT} --mock-data --vocab-size 65 --learning_rate=1e-3"), 1)
    assert config.model.num_layers == 4 and config.batch.train_iters == 2000
    assert "--compile False changes nothing here" in config.notes


TYPED = [  # what is typed, what the sentence holds
    ("--gradient_accumulation_steps=8", "--global-batch-size: 8 x --micro-batch-size x the number"),
    ("--num_train_epochs 3", "--train-samples, 3 x the samples"),
    ("--train-tokens 1000000", "--train-samples: 1000000 / --seq-length"),
    ("--compile", "nothing is compiled here"),
    ("--lora-rank 8", "Weft has no LoRA: to train a part of the weights, freeze the others"),
    ("--freeze-embeddings", "--param-group 'PATTERN' frozen"),
    ("--load_best_model_at_end", "--keep-best"),
    ("--train_on_inputs False", "tools/preprocess_data.py --loss-on"),
    ("--model_name_or_path gpt2", "--pretrained-checkpoint DIRECTORY --use-checkpoint-args"),
    ("--deepspeed ds.json", "DeepSpeed is not used and its file is not read"),
    ("--resume_from_checkpoint x", "--load DIRECTORY"),
    ("--nproc_per_node 2", "torchrun --nproc-per-node N pretrain_llama.py"),
    ("--optimizer.lr 1e-3", "did you mean --lr?"),
    ("config/train_gpt2.py", "a configuration file is not read: give its settings as flags"),
    ("trainer.max_steps=9 model.micro_batch_size=2", "--: --train-iters 9 --micro-batch-size 2"),
    ("-n_layer 3", "flags begin with --: --num-layers"),
    # in no table: by the words that a name shares with a flag
    ("--num-transformer-layers 2", "did you mean --num-layers?"),
    ("--learning-rate-decay-steps 9", "did you mean --lr-decay-iters"),
    ("--optimizer.name AdamW", "give --optimizer adam or muon"),
    ("--lr_scheduler.min_lr_factor 0.1", "give --min-lr: 0.1 x --lr"),
    ("--optimizer.accumulate_gradient_steps=4", "--global-batch-size: 4 x --micro-batch-size"),
    ("--mesh_dim=1,-1,1 --load_llama_config=7b", "the sizes of tp, cp and pp give the layout"),
    ("--max_duration=2e12T", "--train-iters, in steps, or --train-samples"),
    ("-b 4 -h 1", "-h 1: -h is --help here"),
    ("--fp16_full_eval", "fp16 is not available here: give --bf16"),
]


@pytest.mark.parametrize("typed, says", TYPED, ids=[typed for typed, _ in TYPED])
def test_the_message_names_what_there_is_instead(typed, says):
    with pytest.raises(UsageError) as mistake:
        read(typed)
    said = str(mistake.value)
    assert says in said and "\n" not in said and "--ignore-flags" not in said


def test_all_flags_of_another_trainer_are_answered_at_once():
    typed = "--model_name_or_path gpt2 --do_train --per_device_eval_batch_size 8 --num-layer 3"
    with pytest.raises(UsageError) as mistake:
        read(typed)
    parts = str(mistake.value).split("; ")
    for name in ("--model_name_or_path", "--do_train", "--per_device_eval", "--num-layer is not"):
        assert any(part.startswith(name) for part in parts), name


TWO = [  # two names of one flag with different values: before, the last one counted
    ("--max-steps 3", "--train-iters 2 and --max-steps 3 contradict"),
    ("--learning_rate 1e-2", "--lr 1e-3 and --learning_rate 1e-2 contradict"),
    ("--n-kv-heads 2 --group-query-attention --num-query-groups 4", "--n-kv-heads 2 and --num-q"),
    ("--gradient_checkpointing --recompute-granularity selective", "--gradient_checkpointing and"),
    ("--bf16 --dtype float32", "--bf16 and --dtype float32 contradict"),
    ("--recompute-granularity full --gradient_checkpointing False", "full and --gradient_checkp"),
    ("--warmup_ratio 0.1 --warmup_steps 1", "--lr-warmup-fraction and --lr-warmup-iters exclude"),
    ("--on-nan rewind --save a --no-check-for-nan-in-loss-and-grad", "--on-nan rewind and --no-ch"),
]


@pytest.mark.parametrize(
    "typed, says",
    [
        ("--swiglu False", "--swiglu False: leave it out: a Llama's feed-forward is SwiGLU"),
        ("--disable_bias_linear=False", "--disable_bias_linear False: leave it out: a Llama's lin"),
        ("--use-rms-norm False", "--use-rms-norm False: leave it out: a Llama's norm is RMSNorm"),
    ],
)
def test_what_is_always_on_cannot_be_turned_off(typed, says):
    """Before, a line said that it is so here."""
    with pytest.raises(UsageError, match=re.escape(says)):
        read(typed)
    assert read("--no-save-optim False").notes  # one that is right to be left out


def test_a_wrong_value_is_reported_with_the_name_that_was_typed():
    said = "--train-iters 1e3: must be a whole number >= 1 (--max_steps is taken as --train-iters)"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        read("--max_steps=1e3", "--train-iters")


@pytest.mark.parametrize("typed, says", TWO, ids=[typed for typed, _ in TWO])
def test_two_names_of_one_flag_with_different_values_are_a_mistake(typed, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        read(typed)


def test_a_value_that_a_number_had_once_says_what_to_do():
    said = (
        "--ddp-bucket-size auto: must be a whole number >= 1; sizes are no longer measured: leave "
        "the flag out"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        read("--ddp-bucket-size auto")


def test_two_names_of_one_flag_with_the_same_value_and_one_name_twice_are_none():
    assert read("--max_iters=2 --learning_rate 0.001").batch.train_iters == 2
    assert read("--train-iters 7").batch.train_iters == 7
