# SPDX-License-Identifier: Apache-2.0
"""From flags to stages and a schedule: where layers are cut, what is refused, what is printed."""

import shlex
from dataclasses import replace

import pytest

from mpu.pipeline.stage_layout import Stage
from pretrain_llama import model_provider
from training.flags.parse import parse
from training.run import pipeline_stages
from training.run.model_profile import model_profile
from training.run.pipeline_stages import rank_stages, stages_of
from training.settings import pipeline_schedule
from training.settings.config import UsageError
from training.settings.pipeline_schedule import micro_batch_counts, schedule_of

SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 512 --global-batch-size 16"
)
P = "--pipeline-model-parallel-size"
V = "--num-virtual-stages-per-pipeline-rank"


def read(more="", world=2, p=2, base=SMALL):
    return parse(shlex.split(f"{base} {P} {p} {more}"), world)


def layers(config):
    return [len(stage.layers) for stage in stages_of(config, model_provider)]


def test_one_rank_is_one_stage():
    config = read(p=1, world=1)
    assert stages_of(config, model_provider) == (Stage(0, 8, embedding=True, loss=True),)
    assert (config.parallel.virtual_stages, config.parallel.schedule) == (1, "1f1b")
    assert pipeline_stages.lines(config, model_provider) == []


@pytest.mark.parametrize(
    "more,v,schedule,cut",
    [
        ("", 1, "1f1b", [4, 4]),
        (f"{V} 2", 2, "interleaved", [2, 2, 2, 2]),
        ("--num-layers-per-virtual-pipeline-stage 1", 4, "interleaved", [1] * 8),
        ("--pipeline-schedule zb-v", 2, "zb-v", [2, 2, 2, 2]),
        (f"--pipeline-schedule v-half {V} 2", 2, "v-half", [2, 2, 2, 2]),
        ("--pipeline-model-parallel-layout Et*3|t*5L", 1, "1f1b", [3, 5]),
        ("--pipeline-model-parallel-layout Et|(tt|)*3tL", None, None, None),
        ("--pipeline-model-parallel-layout Et|tt|ttt|ttL", 2, "interleaved", [1, 2, 3, 2]),
        (f"--pipeline-model-parallel-layout Ett|tt|ttt|tL {V} 2", 2, "interleaved", [2, 2, 3, 1]),
    ],
)
def test_flags_and_the_cut(more, v, schedule, cut):
    if v is None:
        with pytest.raises(UsageError, match=r"its 5 stages are not a multiple of \S+ 2"):
            read(more)
        return
    config = read(more)
    assert (config.parallel.virtual_stages, config.parallel.schedule) == (v, schedule)
    assert layers(config) == (cut or [1, 2, 4, 1])
    held = [rank_stages(config, model_provider, rank) for rank in range(2)]
    assert sorted((s for r in held for s in r), key=lambda s: s.last) == list(
        stages_of(config, model_provider)
    )
    made = schedule_of(config, 16)
    assert (made.chunks, made.stages, made.micro_batches) == (v, 2 * v, 16)


def test_ends_that_megatron_counts_as_layers_count_for_v():
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    base = SMALL.replace("--num-layers 8", "--num-layers 6")
    each = "--num-layers-per-virtual-pipeline-stage 2"
    config = read(f"{both} {each}", base=base)
    assert (config.parallel.virtual_stages, sum(layers(config))) == (2, 6)
    balanced = read(both + " --decoder-first-pipeline-num-layers 1", base=base)
    assert layers(balanced) == layers(read("", base=base))
    said = [note for note in balanced.notes if "the ranks of a pipeline are balanced by" in note]
    assert len(said) == 3


def test_the_balance_knows_the_head():
    m = model_profile(read(), model_provider)
    assert m.head == 2 * 64 * 512
    assert m.layers == (2 * 64 * (16 * 16 + 3 * 128) + 2 * 32 * 64,) * 8
    # A head of 3/4 of a layer moves none of 8 layers; one of 3 layers moves one away.
    assert layers(read()) == [4, 4]
    large = SMALL.replace("--vocab-size 512", "--vocab-size 2016")
    assert layers(read(base=large)) == [5, 3]
    # In a V rank 0 has both ends.
    assert layers(read("--pipeline-schedule zb-v", base=large)) == [2, 3, 3, 0]
    v_shaped = read("--pipeline-schedule zb-v", base=large)
    assert rank_stages(v_shaped, model_provider, 0) == (
        Stage(0, 2, embedding=True),
        Stage(8, 8, loss=True),
    )


def test_before_the_tokenizer_the_rules_hold_and_the_cut_is_not_known():
    base = SMALL.replace("--vocab-size 512", "").replace(
        "--mock-data", "--dry-run --data-path x --tokenizer-type HuggingFaceTokenizer"
    )
    config = replace(read(), model=replace(read().model, vocab_size=None))
    pipeline_schedule.check(config)
    with pytest.raises(ValueError, match="the vocabulary size is not known"):
        stages_of(config, model_provider)
    assert layers(config.with_vocab(2016)) == [5, 3]
    with pytest.raises(UsageError):
        read("--pipeline-model-parallel-layout Et|L", base=base)


MISTAKES = [
    # more flags, p, what the sentence must hold
    ("--pipeline-schedule 2f2b", 2, "--pipeline-schedule 2f2b: must be one of gpipe, 1f1b, inter"),
    ("--pipeline-schedule interleaved", 2, f"interleaved needs virtual stages: give {V} of"),
    (
        f"--pipeline-schedule zb-h1 {V} 2",
        2,
        f"--pipeline-schedule zb-h1 needs 1 virtual stage on each rank: {V} 2 gives 2",
    ),
    (
        "--pipeline-schedule gpipe --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--pipeline-schedule gpipe needs 1 virtual stage on each rank",
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
        2,
        "--microbatch-group-size-per-virtual-pipeline-stage 2 needs --pipeline-schedule interleav",
    ),
    (
        f"{V} 2 --micro-batch-size 16",
        2,
        "--pipeline-schedule interleaved at --global-batch-size 16 = 1 micro-batches of 16 x 1",
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 3",
        2,
        f"--num-layers-per-virtual-pipeline-stage 3: --num-layers 8 are not a multiple of 3 x {P}",
    ),
    (f"{V} 2 --num-layers-per-virtual-pipeline-stage 2", 2, "exclude each other"),
    (
        "--pipeline-model-parallel-layout Et*4|mt*4L",
        2,
        "--pipeline-model-parallel-layout Et*4|mt*4L: m (multi-token prediction)",
    ),
    (
        f"--pipeline-model-parallel-layout Et*4|t*4L {V} 2",
        2,
        f"{V} 2: --pipeline-model-parallel-layout Et*4|t*4L has 2 stages, 1 a rank",
    ),
]


@pytest.mark.parametrize("more,p,sentence", MISTAKES, ids=[f"{p} {m}" for m, p, _ in MISTAKES])
def test_a_mistake_is_one_sentence(more, p, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, p=p)
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value) and len(str(mistake.value)) < 300


def test_more_ranks_than_things_to_place():
    base = SMALL.replace("--num-layers 8", "--num-layers 1")
    assert layers(read(p=3, world=3, base=base)) == [0, 1, 0]
    with pytest.raises(UsageError, match=f"{P} 4: pipeline rank 1 would have no layers"):
        read(p=4, world=4, base=base)


def test_every_batch_size_of_the_run_is_held_against_the_schedule():
    base = SMALL.replace("--global-batch-size 16", "")
    config = read(f"{V} 2 --step-batch-size-schedule '0:4 3200:8'", base=base)
    assert micro_batch_counts(config) == [4, 8]
    with pytest.raises(UsageError, match="at --global-batch-size 1 = 1 micro-batches"):
        read(f"{V} 2 --step-batch-size-schedule '0:4 3200:1'", base=base)
    groups = f"{V} 2 --microbatch-group-size-per-virtual-pipeline-stage 4"
    with pytest.raises(UsageError, match="at --global-batch-size 5 = 5 micro-batches .* last gr"):
        read(f"{groups} --step-batch-size-schedule '0:4 3200:5'", base=base)


def test_what_is_not_as_megatron_says_is_noted():
    notes = "\n".join(
        read(
            "--no-overlap-p2p-communication "
            "--pipeline-model-parallel-comm-backend nccl --use-ring-exchange-p2p"
        ).notes
    )
    assert "--no-overlap-p2p-communication: pipeline messages always travel while" in notes
    assert "--pipeline-model-parallel-comm-backend: pipeline messages go through --dist" in notes
    assert "--use-ring-exchange-p2p: pipeline messages go from one rank to the other" in notes
    with pytest.raises(UsageError, match="--pipeline-model-parallel-comm-backend ucc: only nccl"):
        read("--pipeline-model-parallel-comm-backend ucc")


def test_costs_are_the_stages_flops_and_recomputation_falls_on_b():
    model = model_profile(read(), model_provider)
    layer, head = model.layers[0], model.head
    plain = pipeline_stages.costs(read(), model_provider)
    assert plain.forward == plain.input_gradient == plain.weight_gradient
    assert plain.forward == [4 * layer, 4 * layer + head]
    for more, again in (
        ("--recompute-granularity full", 4 * layer),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            3 * layer,
        ),
        ("--recompute-activations", 4 * 2 * 32 * 64),
    ):
        costs = pipeline_stages.costs(read(more), model_provider)
        assert costs.forward == costs.weight_gradient == plain.forward
        assert costs.input_gradient == [4 * layer + again, 4 * layer + head + again]


def test_the_lines_said_first():
    base = SMALL.replace("--num-layers 8", "--num-layers 7")
    assert pipeline_stages.lines(read(base=base), model_provider) == [
        "pipeline 1f1b: 2 ranks; the slowest has 3.1 % more work than the mean",
        "pipeline rank 0: embedding + layers 0-3",
        "pipeline rank 1: layers 4-6 + head",
        "16 micro-batches: bubble 5.22 % of a step, 5.88 % if all stages were equal",
    ]
    text = "\n".join(
        pipeline_stages.lines(
            read("--pipeline-model-parallel-layout Et||t*7|L --pipeline-schedule zb-v"),
            model_provider,
        )
    )
    assert "pipeline zb-v: 2 ranks, 2 stages each" in text
    assert f"{100 / (1 + 6 * 16):.2f} % if all stages were equal" in text  # (p-1) F of a chunk
    assert "pipeline rank 0: embedding + layer 0 | head" in text
    assert "pipeline rank 1: nothing | layers 1-7" in text
    two = read(
        "--step-batch-size-schedule '0:4 3200:8'", base=base.replace("--global-batch-size 16", "")
    )
    lines = pipeline_stages.lines(two, model_provider)
    assert ["micro-batches" in line for line in lines].count(True) == 2


@pytest.mark.parametrize(
    "more,p,share",
    [
        ("", 4, 3 / (16 + 3)),
        ("--pipeline-schedule gpipe", 4, 3 / (16 + 3)),
        (f"{V} 2", 4, 3 / (2 * 16 + 3)),
        ("--pipeline-schedule zb-h1", 4, 3 / (3 * 16 + 3)),
    ],
)
def test_the_simulated_bubble_of_equal_stages_is_the_formulas(more, p, share):
    """A head of no cost, F = B = W, messages in no time."""
    base = SMALL.replace("--vocab-size 512", "--vocab-size 1 --make-vocab-size-divisible-by 1")
    config = read(more, p=p, world=p, base=base)
    model = replace(config.model, hidden_size=1 << 20)  # a layer is h^2, the head h
    line = pipeline_stages.lines(replace(config, model=model), model_provider)[-1]
    simulated, ideal = (float(words.split()[-1]) for words in line.split(" %")[:2])
    assert simulated == pytest.approx(100 * share, abs=0.02)
    assert ideal == pytest.approx(100 * share, abs=0.02)
