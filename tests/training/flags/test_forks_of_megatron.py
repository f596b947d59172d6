# SPDX-License-Identifier: Apache-2.0
"""Flags of forks of Megatron-LM: other names are obeyed, and a fork's own can be left out."""

import shlex

import pytest

from training.flags import megatron
from training.flags.flag_table import live_flags
from training.flags.megatron import known_flags, vocabulary
from training.flags.parse import model_file, parse
from training.settings.config import UsageError

BASE = "--hidden-size 64 --num-attention-heads 4 --lr 1e-3 --train-iters 2 --mock-data"
BASE += " --vocab-size 100 --seq-length 64"


def read(more, layers="--num-layers 2", base=BASE):
    return parse(shlex.split(f"{base} {layers} {more}"), 1)


def test_the_tables_are_sound():
    known, tables = known_flags(), vocabulary()
    for name, words in tables.same.items():
        assert name not in live_flags() and words[0] in known, name
    for (flag, value), here in tables.values.items():
        assert {word for word in here if word[:2] == "--"} <= {*known}, (flag, value)
        assert flag not in tables.same and value == value.lower(), (flag, value)


SAME = [  # of another program, of this one, what a line says
    ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2",
     "--num-key-value-heads is taken as --group-query-attention --num-query-groups"),
    ("--glu_activation swiglu", "--swiglu", "swiglu is taken as --swiglu"),
    ("--optimizer=adamw", "--optimizer adam", "--optimizer adamw is taken as --optimizer adam"),
    ("--rotary-position-embeddings-theta 5e5", "--rotary-base 5e5", "is taken as --rotary-base"),
    ("--context-parallel-algo=megatron_cp_algo", "--cp-comm-type p2p", "as --cp-comm-type p2p"),
    ("--batch-size 4", "--micro-batch-size 4", ""),
]  # fmt: skip


@pytest.mark.parametrize("there, here, says", SAME)
def test_the_same_under_another_name_is_obeyed(there, here, says):
    found, wanted = read(there), read(here)
    assert found.digest() == wanted.digest() and found.flat() == wanted.flat()
    assert any(says in note for note in found.notes) or not says


OLDER = """--moe-use-legacy-grouped-gemm --align-param-gather --overlap-p2p-communication
    --encoder-tensor-model-parallel-size 0 --hybrid-attention-ratio 0.0 --retro-workdir x
    --legacy-tokenizer --fp32-allreduce --offload-optimizer-states --moe-extended-tp"""


def test_a_flag_of_an_older_megatron_is_not_of_a_tree():
    """The trees have them because Megatron-LM had."""
    assert read(OLDER).digest() == read("").digest()
    with pytest.raises(UsageError, match="--retro-add-retriever is refused: retrieval"):
        read("--retro-add-retriever")
    with pytest.raises(UsageError, match="--moe-extended-tp.*--expert-tensor-parallel-size"):
        read("--num-experts 4 --moe-extended-tp")


IDLE = [  # of a feature that is not available here, which they do not switch on
    "--moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 1e-3 --optimizer adam",
    "--muon-momentum 0.95 --muon-use-syrk --lion-beta1 0.9 --sgd-momentum 0.9",
    "--kv-lora-rank 32 --window-attn-skip-freq 2 --mup-width-mult 2 --fim-rate 0.5 --mask-prob 0.1",
]


@pytest.mark.parametrize("words", IDLE)
def test_a_flag_that_changes_nothing_there_changes_nothing_here(words):
    assert read(words).digest() == read("").digest()


@pytest.mark.parametrize("words", ["--mtp-num-layers 1", "--optimizer lion"])
def test_what_would_switch_it_on_is_refused(words):
    with pytest.raises(UsageError, match=words.split()[0]):
        read(f"--moe-router-topk 2 --muon-momentum 0.95 --mup-width-mult 2 {words}")


def test_the_size_of_the_model_s_vocabulary_is_megatron_s():
    config = read("--padded-vocab-size 128", base=BASE.replace("--vocab-size 100", ""))
    assert config.model.vocab_size == 128


def test_a_fork_may_have_a_flag_that_changes_nothing_here():
    def extra(parser):
        parser.add_argument("--moe-input-jitter-eps", type=int)

    config = parse(shlex.split(f"{BASE} --num-layers 2 --moe-input-jitter-eps 3"), 1, extra)
    assert dict(config.extra) == {"moe_input_jitter_eps": 3}


def test_a_fork_s_own_flag_of_such_a_name_stays_its_own():
    config = parse(
        shlex.split(f"{BASE} --num-layers 2 --rope-theta 3"), 1,
        lambda parser: parser.add_argument("--rope-theta", type=int),
    )  # fmt: skip
    assert dict(config.extra) == {"rope_theta": 3} and config.model.rotary_base == 10000


def test_flags_of_another_program_s_words_are_all_named_for_ignore_flags():
    """Each is like one of this program, and together they are of another."""
    with pytest.raises(UsageError, match="ignores them: --ignore-flags max-padding-length:1 extra"):
        read("--max-padding-length 5 --extra-vocab-size 0")


def test_a_word_more_is_no_slip_of_the_pen():
    """Before, it could not be ignored: the names are alike letter by letter."""
    name = "original-max-position-embeddings"
    assert read(f"--{name} 8192 --ignore-flags {name}:1").digest() == read("").digest()


def test_a_run_with_flags_of_this_program_alone_never_opens_the_vocabulary(monkeypatch):
    monkeypatch.setattr(megatron, "FILE", None)
    vocabulary.cache_clear()
    known_flags.cache_clear()
    assert model_file(shlex.split(BASE)) == "model/llama.py"
    assert read("--bf16 --zero-stage 2 --clip-grad=0.5").model.num_layers == 2
    with pytest.raises(AttributeError, match="read_text"):
        read("--swiglu")
