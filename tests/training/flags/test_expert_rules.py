# SPDX-License-Identifier: Apache-2.0
"""The flags of experts: which model they make, what they refuse, what they change."""

import re
import shlex
from pathlib import Path

import pytest

from tests.training.flags.public_scripts import LIST, Script, read_flags, refusal, scripts
from training.flags.parse import parse
from training.settings.config import Config, UsageError
from training.settings.expert_options import expert_options, own_sizes

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
    --train-iters 1 --vocab-size 100 --mock-data"""
# the model, router and layout of NVIDIA's example of Mixtral 8x7B (Megatron-LM, moe/README.md)
NVIDIA = """--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-param-gather --overlap-grad-reduce
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 500 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
    --mock-data --vocab-size 32000"""


def read(more: str, world: int = 1, base: str = BASE) -> Config:
    return parse(shlex.split(f"{base} {more}"), world)


def test_num_experts_makes_the_model() -> None:
    assert read("--num-experts 4").model.model_file == "model/moe.py"
    normalised = read("--num-experts 4 --qk-layernorm")
    assert normalised.model.model_file == "model/moe.py" and own_sizes(normalised)["qk_layernorm"]
    assert read("--num-experts 4 --model-file mine.py").model.model_file == "mine.py"
    assert read("--qk-layernorm").model.model_file == "model/qwen3.py"
    for dense in ("", "--num-experts 1", "--moe-router-topk 4 --moe-aux-loss-coeff 1"):
        assert read(dense).model.model_file == "model/llama.py" and not own_sizes(read(dense))
        assert read(dense).digest() == read("").digest() and read(dense).flat() == read("").flat()
        assert read(dense).expert_model_parallel_size == 0  # no axis


def test_the_example_of_nvidia_parses() -> None:
    config = read("", 128, NVIDIA)
    assert config.expert_model_parallel_size == 8 and config.parallel.data_parallel_size == 32
    options = expert_options(config)
    assert options.balance == (("aux_loss", 1e-2),) and options.dispatcher == "alltoall"


def test_a_loss_that_depends_on_the_micro_batch_is_said() -> None:
    assert read("--num-experts 4 --rank-order tp-cp-ep-dp-pp").parallel.rank_order == "tp-cp-dp-pp"
    for more, said in (
        ("--moe-aux-loss-coeff 1", 1),
        ("", 0),
        ("--moe-aux-loss-coeff 1 --moe-router-load-balancing-type seq_aux_loss", 0),
    ):
        notes = [n for n in read(f"--num-experts 4 {more}").notes if "depends on --micro" in n]
        assert len(notes) == said


def test_what_changes_nothing_or_depends_on_the_layout_is_said() -> None:
    more = "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax"
    assert any("has no effect, also in Megatron-LM, with" in note for note in read(more).notes)
    more = "--num-experts 4 --moe-expert-capacity-factor 1.25"
    assert any("which tokens are dropped depends" in note for note in read(more).notes)
    assert not [note for note in read("--num-experts 4").notes if "moe" in note]
    late = read(f"{BESIDE} {EP2} --delay-wgrad-compute", 2)
    assert any("--delay-wgrad-compute" in note for note in late.notes)
    for size, said in ((2, True), (4, False)):
        notes = read(f"{BESIDE} {EP2} --global-batch-size {size}", 2).notes
        assert any("no forward overlaps a backward" in note for note in notes) == said
    frozen = read(
        "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--moe-router-bias-update-rate 0"
    )
    assert expert_options(frozen).bias_update_rate == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("[1,0,1,1]", (1, 0, 1, 1)), ("([0]*1+[1]*3)", (0, 1, 1, 1)),
     ("[0,1]*2", (0, 1, 0, 1))],
)  # fmt: skip
def test_layers_with_experts(text: str, value: object) -> None:
    assert read(f"--num-experts 4 --moe-layer-freq '{text}'").moe.moe_layer_freq == value


@pytest.mark.parametrize("text", ["0", "[]", "[2]", "[1,[0]]", "__import__('os')", "[1]*-1", "("])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--moe-layer-freq .*: must be a whole number >= 1, or a"):
        read(f'--num-experts 4 --moe-layer-freq "{text}"')


# what a refusal of a public script of experts names: what is not here, or not so here
PUBLIC = scripts(LIST.with_name("public_moe_scripts.txt"))
LACKING = {
    "multi-latent attention": r"--multi-latent-attention is refused: another attention",
    "linear attention": r"--(linear-attention-type|attention-output-gate)",
    "half of each head rotated": r"--rotary-percent [\d.]+: only 1.0 is accepted",
    "a tolerant read of checkpoints": r"--dist-ckpt-strictness log_all: only",
    "a flag of ROCm's tree": r"--moe-use-legacy-grouped-gemm is not a flag",
}


@pytest.mark.parametrize("script", PUBLIC, ids=lambda s: f"{Path(s.path).stem} {s.edit}")
def test_a_public_script_parses_or_is_refused_by_what_is_missing(script: Script) -> None:
    """What some refusals name is left out, one after the other, and then it parses."""
    flags, seen = list(script.flags), []
    while why := refusal(flags, script.world):
        named = [name for name, words in LACKING.items() if re.search(words, why)]
        assert named and "\n" not in why, why
        if named[0] in ("multi-latent attention", "linear attention"):
            return  # another model
        assert named[0] not in seen, why
        seen.append(named[0])
        flag = re.search(r"--[\w-]+", why)[0]
        at = flags.index(flag)
        del flags[at : at + 1 + (at + 1 < len(flags) and not flags[at + 1].startswith("--"))]
    assert read_flags(flags, script.world).moe.experts


BESIDE = "--num-experts 8 --overlap-moe-expert-parallel-comm"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
MISTAKES = [
    ("--expert-model-parallel-size 2", 2, "needs --num-experts"),
    ("--num-experts 6 --expert-model-parallel-size 4", 4, "is not a multiple of --expert-model"),
    ("--num-experts 8 --expert-model-parallel-size 4", 2, "does not divide the 2 ranks of a pipe"),
    ("--num-experts 8 --expert-model-parallel-size 2 --zero-stage 1 "
     "--num-distributed-optimizer-instances 2", 2,
     "--num-distributed-optimizer-instances 2 does not divide the 1 ranks that hold the same exp"),
    ("--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel", 2,
     "--expert-tensor-parallel-size 2 (the default, --tensor-model-parallel-size)"),
    ("--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 2,
     "--num-experts 8 at --tensor-model-parallel-size 2 needs --sequence-parallel"),
    ("--num-experts 2 --moe-router-topk 3", 1, "--moe-router-topk 3 is more than --num-experts 2"),
    ("--num-experts 8 --moe-router-topk 1", 1, "1 needs --moe-router-pre-softmax"),
    ("--num-experts 8 --moe-layer-freq [1]", 1, "lists 1 layers, and --num-layers is 4"),
    ("--num-experts 8 --moe-aux-loss-coeff 1 2", 1, "--moe-aux-loss-coeff has 2 values and"),
    ("--num-experts 8 --moe-router-enable-expert-bias", 1, "needs --moe-router-score-function sig"),
    ("--num-experts 8 --moe-router-num-groups 4", 1, "--moe-router-group-topk left out: must be"),
    ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3", 1,
     "1 groups of 2 experts are fewer experts than --moe-router-topk 3"),
    ("--num-experts 8 --fp8-format e4m3 --bf16 --fp8-recipe tensorwise", 1, "--fp8-format is not"),
    (f"{BESIDE} --expert-model-parallel-size 2", 2, "alltoall, not allgather: only its exchanges"),
    (f"{BESIDE} {EP2} --zero-stage 3", 2, "is not available at --zero-stage 3 without a pipeline"),
    (f"{BESIDE} {EP2} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4,
     "needs --pipeline-schedule 1f1b or interleaved, not zb-h1"),
    ("--num-experts 8 --rank-order tp-cp-dp-ep-pp", 1, "so ep must stand before dp"),
    ("--num-experts 8 --expert-model-parallel-size 2 --rehearse-expert-skew 2.5 --dry-run", 2,
     "--rehearse-expert-skew 2.5 must be from 1 to 2: a token goes to an expert once"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "world", "sentence"), MISTAKES)
def test_a_mistake_is_one_sentence(more: str, world: int, sentence: str) -> None:
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value) and "\n" not in str(mistake.value)
