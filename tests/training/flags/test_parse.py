# SPDX-License-Identifier: Apache-2.0
"""The command line: a Megatron-LM script parses as it stands; a mistake is one sentence."""

import os
import shlex

import pytest
import torch

import pretrain_llama
from training.data.build import validation_sets
from training.flags.parse import UsageError, parse
from training.run.step import CONTINUE, Step
from training.run.watch.intervals import Intervals
from training.settings.pipeline_schedule import schedule_of

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100"
)

# The flags of Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh, mock data, in bf16: without
# its three --fp8 flags. Quotes around 99,1,0 arrive with them, as that script's arrays pass them.
LLAMA3_8B = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1
--sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
--data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save CKPT --load CKPT --tensorboard-dir TB
"""


def read(more="", world=1, base=SMALL, **options):
    return parse(shlex.split(base) + shlex.split(more), world, **options)


def test_a_megatron_launch_script_parses_as_it_stands(tmp_path):
    line = LLAMA3_8B.replace("'99,1,0'", "\"'99,1,0'\"")
    for name in ("CACHE", "CKPT", "TB"):
        line = line.replace(name, str(tmp_path / name))
    config = read(base=line, world=8)
    assert (config.model.num_query_groups, config.model.rotary_base) == (8, 1e6)
    assert config.data.split == "99,1,0"
    assert (config.parallel.data_parallel_size, config.batch.global_batch_size) == (8, 128)
    assert config.optimizer.decoupled_lr == 5e-4
    assert config.run.dtype is torch.bfloat16
    assert config.parallel.sequence_parallel is False
    said = "\n".join(config.notes)
    assert config.parallel.use_distributed_optimizer and config.parallel.overlap_param_gather
    assert config.parallel.grad_reduce_in_bf16 and config.parallel.zero == 1
    for flag in (
        "--sequence-parallel",
        "--apply-layernorm-1p",
        "--no-mmap-bin-files",
        "--ckpt-format",
    ):
        assert flag in said
    assert not os.listdir(tmp_path)  # checking writes nothing


def test_older_and_common_spellings(tmp_path):
    config = read(
        "--no-async-tensor-model-parallel-allreduce --no-masked-softmax-fusion --use-flash-attn "
        "--attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --transformer-impl local "
        "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --initial-loss-scale 65536 "
        "--tp-comm-overlap --recompute-activations --no-load-rng --no-save-rng --hidden-dropout 0 "
        f"--persistent-save-interval 5 --save {tmp_path} --expert-model-parallel-size 1 "
        "--pipeline-model-parallel-size 1 --override-opt_param-scheduler --bf16"
    )
    assert config.parallel.recompute_granularity == "selective"
    assert config.checkpoint.save_interval == 5


def test_defaults_are_megatrons():
    config = read("--micro-batch-size 2", world=4)
    assert config.batch.global_batch_size == 8
    assert config.model.ffn_hidden_size == 128
    assert (config.model.num_query_groups, config.model.kv_channels) == (4, 16)
    assert config.model.untie_embeddings_and_output_weights is False
    assert (config.run.seed, config.run.eval_iters, config.run.dtype) == (1234, 100, torch.float32)
    assert config.optimizer.lr_decay_style == "linear"
    assert read("--group-query-attention").model.num_query_groups == 1


def test_sequence_parallel_at_one_rank_is_off_and_said_once():
    config = read("--sequence-parallel --sequence-parallel", world=2)
    assert config.parallel.sequence_parallel is False
    assert sum("--sequence-parallel" in note for note in config.notes) == 1
    assert read("--sequence-parallel --tensor-model-parallel-size 2", 2).parallel.sequence_parallel


def test_the_loss_is_fused_as_megatron_asks_for_it():
    fusion = "--cross-entropy-loss-fusion"
    for flags, fused in (
        (fusion, False),
        (f"{fusion} --cross-entropy-fusion-impl te", False),
        (f"{fusion} --cross-entropy-fusion-impl linear", True),
        ("--fused-linear-cross-entropy", True),
        ("--fused-linear-cross-entropy --cross-entropy-fusion-impl native", True),
    ):
        assert read(flags).parallel.fused_linear_cross_entropy is fused


def test_full_recomputation_alone_is_uniform_by_one():
    p = read("--recompute-granularity full").parallel
    assert (p.recompute_method, p.recompute_num_layers) == ("uniform", 1)
    p = read("--recompute-granularity full --recompute-method block --recompute-num-layers 3")
    assert (p.parallel.recompute_method, p.parallel.recompute_num_layers) == ("block", 3)
    p = read("--recompute-granularity full --recompute-method block --recompute-num-layers 0")
    assert p.parallel.recompute_granularity is None  # the first 0 layers


def test_batch_size_schedule():
    config = read("--step-batch-size-schedule '0:4 3200:8'", world=2)
    assert config.batch.step_batch_size_schedule == ((0, 4), (100, 8))
    assert config.batch.global_batch_size == 4


def test_a_fork_adds_its_own_flags():
    def extra(parser):
        parser.add_argument("--window", type=int, default=7)

    assert dict(read("--window 9", extra=extra).extra) == {"window": 9}
    assert dict(read(extra=extra).extra) == {"window": 7}
    with pytest.raises(UsageError, match="--window 9|--window: invalid int"):
        read("--window x", extra=extra)
    with pytest.raises(UsageError, match="--window is not a flag"):
        read("--window 9")


def test_flags_of_another_program_are_left_out_and_told():
    config = read(
        "--trigger-path /x --bf16 --use-mpi --beta=0.5 --data-weights 1 2 --seed 3 "
        "--ignore-flags trigger-path:1 --use-mpi:0 beta:1 data-weights:2"
    )
    assert (config.run.dtype, config.run.seed) == (torch.bfloat16, 3)
    assert config.run.ignore_flags == ("trigger-path:1", "use-mpi:0", "beta:1", "data-weights:2")
    for name in ("trigger-path", "use-mpi", "beta", "data-weights"):
        assert f"--ignore-flags: --{name} is ignored" in "\n".join(config.notes)


@pytest.mark.parametrize(
    "more,stage",
    [
        ("--use-megatron-fsdp", 0),
        ("--use-megatron-fsdp --use-distributed-optimizer", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-torch-fsdp2", 3),
    ],
)
def test_sharding_under_megatrons_names(more, stage):
    config = read(more, world=2)
    assert config.parallel.zero == stage


def test_off_values_of_megatron():
    config = read("--eval-iters -1 --eval-interval 5 --exit-interval 0 --exit-duration-in-mins 0")
    assert config.run.eval_iters == -1
    never = Intervals(read("--save-interval 0 --eval-interval 0 --split 1,0,0"), 10)
    assert never.after_step(Step(4, 0, 8, 1e-3, None)) == CONTINUE
    notes = "\n".join(read("--save-interval 5 --start-eval-at-iter 50").notes)
    assert "--save-interval has no effect without --save" in notes
    assert "--start-eval-at-iter has no effect without --eval-interval" in notes


def test_flags_in_quotes_are_one_word():
    """TOKENIZER="--tokenizer-type ..." and "$TOKENIZER" came as an unknown flag."""
    quoted = "--tokenizer-type SentencePieceTokenizer --tokenizer-model data/mine.model"
    with pytest.raises(
        UsageError, match=r"Tokenizer --tokeniz.* \.\.\.' came as one word: remove"
    ):
        parse([*SMALL.split(), quoted], 1)


def test_deferring_the_output_layer_needs_a_pipeline_whose_schedule_does_not():
    flags = "--defer-embedding-wgrad-compute --global-batch-size 8"
    with pytest.raises(UsageError, match="it needs --pipeline-model-parallel-size of at least 2"):
        read(flags)
    two = flags + " --pipeline-model-parallel-size 2"
    plain, split = (read(two + more, world=2) for more in ("", " --pipeline-schedule zb-h1"))
    assert [schedule_of(each, 8).deferred for each in (plain, split)] == [True, False]
    note = "--defer-embedding-wgrad-compute has no effect: zb-h1 defers every"
    assert [any(n.startswith(note) for n in c.notes) for c in (plain, split)] == [False, True]


def test_gpt2s_tokenizer_reads_its_own_two_flags(tmp_path):
    for name in ("v.json", "m.txt"):
        (tmp_path / name).touch()
    files = f"--vocab-file {tmp_path}/v.json --merge-file {tmp_path}/m.txt"
    data = read(f"--tokenizer-type GPT2BPETokenizer --tokenizer-model unread {files}").data
    assert (data.tokenizer_model, data.merge_file) == (f"{tmp_path}/v.json", f"{tmp_path}/m.txt")
    assert "--vocab-file has no effect without" in "\n".join(read(files).notes)
    # as in Megatron-LM's pretrain_gpt.py, where a text's tokenizer is GPT-2's by default
    text = SMALL.replace("--mock-data", f"--dry-run --data-path x {files}")
    config = parse(text.split(), 1)
    for name in ("tokenizer_type", "tokenizer_model", "merge_file"):
        assert getattr(config.data, name) == getattr(data, name)
    assert "--vocab-file has no effect" not in "\n".join(config.notes)


def test_a_fork_may_have_a_flag_that_is_refused_without_it():
    def extra(parser):
        parser.add_argument("--window-size", type=int)

    assert dict(read("--window-size 9", extra=extra).extra) == {"window_size": 9}
    with pytest.raises(UsageError, match="--window-size is refused: another architecture"):
        read("--window-size 9")


def test_nan_is_stopped_on_unless_told():
    assert read().run.on_nan == "stop"
    assert read("--on-nan stop").run.on_nan == "stop"
    for more in ("--on-nan skip", "--no-check-for-nan-in-loss-and-grad"):
        assert read(more).run.on_nan == "skip"
    assert read("--on-nan skip --no-check-for-nan-in-loss-and-grad").run.on_nan == "skip"


def test_a_flag_without_effect_is_said():
    notes = "\n".join(read("--profile-step-end 9 --lr-wsd-decay-style linear --finetune").notes)
    assert "--profile-step-end has no effect without --profile" in notes
    assert "--lr-wsd-decay-style has no effect without --lr-decay-style WSD" in notes
    assert "--finetune has no effect without --load" in notes
    wanted, without = "--rehearse-json x.json", "--rehearse-json has no effect without --rehearse"
    assert without in read(wanted).notes and without not in read(f"{wanted} --rehearse").notes


def test_what_does_nothing_in_megatron_lm_does_nothing_here():
    config = read("--recompute-method uniform --recompute-num-layers 9")
    assert config.parallel.recompute_method is config.parallel.recompute_num_layers is None
    assert any(line.startswith("--recompute-method has no effect") for line in config.notes)
    config = read("--eval-interval 5 --split 1,0,0")
    assert config.run.eval_interval is None
    assert any("has nothing to evaluate on, so there is no eval" in line for line in config.notes)
    assert read("--eval-interval 5").run.eval_interval == 5


def test_a_tokenizer_may_be_that_of_the_hugging_face_folder_that_is_loaded():
    given = "--tokenizer-type HuggingFaceTokenizer --load"
    assert read(f"{given} /x/llama --dry-run").data.tokenizer_model == "/x/llama"
    assert read(f"{given} /x --tokenizer-model /y --dry-run").data.tokenizer_model == "/y"


FP16 = "--fp16 is refused: fp16 with its loss scaling is not available here; use --bf16"
MISTAKES = [
    # more flags, world size, what the sentence must hold
    ("--lr -0.1", 1, "--lr -0.1: must be a number >= 0"),
    ("--valid-data-path p", 1, "--mock-data and --valid-data-path exclude each other"),
    ("--lr", 1, "--lr: expected one argument"),
    ("--lr 1 -lr 1", 1, "-lr: a value that belongs to no flag; flags begin with --"),
    ("--bf16 stray", 1, "--bf16: a switch takes no value, not 'stray'"),
    ("--train-data-path -1e-4 a", 1, "--train-data-path -1e-4: a value of this flag cannot begin"),
    ("--data-path=1 a", 1, "--data-path=1 a: give several values after a space, not after ="),
    ("--bf16=maybe", 1, "--bf16: a switch takes no value, not 'maybe'"),
    ("--fp16", 1, FP16),
    ("--moe-layer-freq [1+1]", 1, "--moe-layer-freq [1+1]: must be a whole number >= 1, or a"),
    ("--moe-use-upcycling", 1, "is refused: this part of a mixture of experts is not available"),
    ("--checksum-messages", 1, "--checksum-messages was removed: TCP checks what it carries"),
    (
        "--universal-checkpoint",
        1,
        "--universal-checkpoint is not a flag of this program nor of Megatron-LM; --help",
    ),
    (  # a script of another program: all of its flags at once, with what leaves them out
        "--use-mpi --use-z-loss 0.1 --label=a",
        1,
        "3 flags are not flags of this program nor of Megatron-LM; --help all lists the flags, and "
        "this ignores them: --ignore-flags use-mpi:0 use-z-loss:1 label:1",
    ),
    ("--use-mpi", 1, "lists the flags, --ignore-flags use-mpi:0 ignores it"),
    ("--context-parallel-algo ring", 1, "give --cp-comm-type, as in Megatron-LM"),
    ("--trigger-path /x --job-name y", 1, "this ignores them: --ignore-flags trigger-path:1 j"),
    (
        "--fp16 --data-parallel-random-init --otel-enabled",
        1,
        f"{FP16} (refused too: --data-parallel-random-init, --otel-enabled)",
    ),
    (
        "--tokenizer-type Llama3Tokenizer",
        1,
        "for the tokenizer of a Hugging Face folder give HuggingFaceTokenizer and --tokenizer-m",
    ),
    (
        "--hidden-dropout 0.1",
        1,
        "--hidden-dropout 0.1: only 0.0 is accepted; a Llama has no dropout",
    ),
    (
        "--position-embedding-type yarn --yarn-beta-fast 0.5",
        1,
        "--yarn-beta-fast 0.5 must be at least --yarn-beta-slow 1",
    ),
    ("--position-embedding-type yarn --rotary-base 1", 1, "--rotary-base 1 must be above 1"),
    (
        "--rotary-seq-len-interpolation-factor 4 --use-rope-scaling", 1,
        "--rotary-seq-len-interpolation-factor 4 and --use-rope-scaling exclude each other",
    ),
    ("--position-embedding-type yarn --rotary-scaling-factor 0.5", 1, "must be a number >= 1"),
    ("--tensor-model-parallel-size 3", 3, "--num-attention-heads 4 is not a multiple of --tensor"),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 1 "
        "--kv-channels 6",
        4,
        "--kv-channels 6 is not a multiple of --tensor-model-parallel-size 4 / --num-query-groups 1"
        " = 4: these ranks hold equal parts of a head",
    ),
    ("--num-query-groups 2", 1, "--num-query-groups 2 needs --group-query-attention"),
    (
        "--hidden-size 66",
        1,
        "--hidden-size 66 is not a multiple of --num-attention-heads 4: choose a multiple, or",
    ),
    ("--hidden-size 8", 1, "--ffn-hidden-size is missing"),
    ("--max-position-embeddings 31", 1, "--seq-length 32 is longer than --max-position"),
    ("--bf16 --fp64", 1, "--bf16 and --fp64 exclude each other"),
    ("--global-batch-size 6 --micro-batch-size 2", 2, "--global-batch-size 6 is not a multiple of"),
    ("--step-batch-size-schedule '0:4 1K:7'", 2, "--step-batch-size-schedule's batch of 7 is not"),
    ("--step-batch-size-schedule 0:4 --global-batch-size 4", 1, "exclude each other"),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 must be less than the decay's length"),
    ("--min-lr 0.01", 1, "--min-lr 0.01 is more than --lr 0.001"),
    ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters is missing"),
    (
        "--recompute-granularity selective --recompute-method uniform",
        1,
        "--recompute-method uniform needs --recompute-granularity full",
    ),
    ("--recompute-granularity full --recompute-num-layers 5", 1, "is more than --num-layers 4"),
    (
        "--distributed-backend nccl --device cpu",
        1,
        "--distributed-backend nccl needs --device cuda",
    ),
    ("--split a,b", 1, "--split a,b: give up to three numbers"),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file README.md --merge-file none",
        1,
        "--merge-file none: no such file (nothing is downloaded)",
    ),
    (
        "--tokenizer-type TikTokenizer --tokenizer-model meta-llama/Llama-3",
        1,
        "--tokenizer-model meta-llama/Llama-3: no such file (nothing is downloaded; if ",
    ),
    ("--ckpt-step 5", 1, "--ckpt-step 5 needs --load"),
    ("--profile --profile-step-start 9 --profile-step-end 9", 1, "must be more than"),
    ("--on-nan stop --no-check-for-nan-in-loss-and-grad", 1, "as both set --on-nan: give one of"),
    (
        "--data-parallel-sharding-strategy optim --zero-stage 3",
        1,
        "--data-parallel-sharding-strategy optim and --zero-stage 3 contradict each other",
    ),
    ("--ignore-flags use-mpi", 1, "--ignore-flags use-mpi: give NAME:COUNT, where COUNT is"),
    ("--ignore-flags lr:1", 1, "--ignore-flags lr: --lr is known here, so it cannot be ignored"),
    ("--ignore-flags num-layer:1", 1, "as --num-layer may be a typing mistake for --num-layers"),
    ("--trigger-path /x /y --ignore-flags trigger-path:1", 1, "has more values here: /y"),
    ("--trigger-path=/x --ignore-flags trigger-path:0", 1, "--trigger-path=/x has more values"),
]


def test_yarn_takes_any_base_above_1():
    assert read("--position-embedding-type yarn --rotary-base 2").model.rotary_base == 2


@pytest.mark.parametrize("more,world,sentence", MISTAKES, ids=[m[0] or "none" for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value) and len(str(mistake.value)) < 300


@pytest.mark.parametrize(
    "gone,sentence",
    [
        ("--num-layers 4", "--num-layers is missing"),
        ("--lr 1e-3", "^--lr is missing: it has no default$"),
        ("--seq-length 32 --lr 1e-3", "^--seq-length, --lr are missing: they have no default$"),
        ("--train-iters 10", "--train-iters or --train-samples is missing"),
        ("--mock-data", "no data: give --data-path, --train-data-path or --mock-data"),
        ("--vocab-size 100", "--vocab-size is missing: NullTokenizer"),
    ],
)
def test_what_is_missing_is_named(gone, sentence):
    assert gone in SMALL
    with pytest.raises(UsageError, match=sentence):
        read(base=SMALL.replace(gone, ""))


def test_less_data_than_one_batch():
    base = SMALL.replace("--train-iters 10", "--train-samples 3")
    with pytest.raises(UsageError, match="--train-samples 3 is less than one batch of 4"):
        read("--global-batch-size 4", base=base)


def real(tmp_path, data):
    base = SMALL.replace("--mock-data", f"--data-path {data} --tokenizer-type NullTokenizer")
    return read(base=base)


def test_data_files_must_stand(tmp_path):
    prefix = tmp_path / "corpus"
    with pytest.raises(UsageError, match=r"--data-path .*corpus: there is no file .*corpus\.bin"):
        real(tmp_path, prefix)
    longer = tmp_path / "corpus_text_document.bin"  # what --output-prefix corpus made
    longer.touch()
    with pytest.raises(UsageError, match=r"\(did you mean .*/corpus_text_document\?\)$"):
        real(tmp_path, prefix)
    longer.unlink()
    (tmp_path / "corpus.bin").touch()
    with pytest.raises(UsageError, match=r"there is no file .*corpus\.idx"):
        real(tmp_path, prefix)
    (tmp_path / "corpus.idx").touch()
    assert real(tmp_path, prefix).data.split == "969,30,1"
    assert real(tmp_path, f"0.3 {prefix} 0.7 {prefix}").data.data_path[0] == "0.3"
    with pytest.raises(UsageError, match="give the prefix, without .bin"):
        real(tmp_path, f"{prefix}.bin")
    with pytest.raises(UsageError, match="either prefixes alone or pairs of weight and prefix"):
        real(tmp_path, f"0.3 {prefix} {prefix}")


def test_places_to_write_must_be_writable(tmp_path):
    (tmp_path / "file").touch()
    for flag in ("--save", "--tensorboard-dir", "--data-cache-path", "--log-json"):
        with pytest.raises(UsageError, match=f"{flag} .*file is not a directory"):
            read(f"{flag} {tmp_path}/file/below")
    with pytest.raises(UsageError, match="--log-json .* is a directory: give a file"):
        read(f"--log-json {tmp_path}")
    read(f"--save {tmp_path}/new/below")
    assert os.listdir(tmp_path) == ["file"]


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=f"--save {tmp_path}.* is not writable by this user"):
        read(f"--save {tmp_path}/out")
    with pytest.raises(UsageError, match=f"--log-json {tmp_path}/a.jsonl: {tmp_path} is not writ"):
        read(f"--log-json {tmp_path}/a.jsonl")
    read(f"--data-cache-path {tmp_path}")  # of a user who filled it


def test_a_dry_run_opens_no_file():
    config = read(
        "--dry-run --data-path /cluster/corpus --tokenizer-type TikTokenizer --save /cluster/out "
        "--tokenizer-model /cluster/tokenizer.model --tensor-model-parallel-size 4 --device cuda",
        world=512,
        base=SMALL.replace("--mock-data", ""),
    )
    assert config.parallel.data_parallel_size == 128


def test_a_command_line_without_a_flag_is_told_what_is_missing():
    with pytest.raises(UsageError, match="^--num-layers"):
        parse([], 1)


SETS = "--valid-data-path a_text_document b/c --eval-interval 5"


@pytest.mark.parametrize(
    "more, why",
    [
        ("--multiple-validation-sets --data-path a", "needs --valid-data-path, whose prefixes"),
        ("--valid-data-path 1 a 2 b --multiple-validation-sets", "takes no weights"),
        ("--data-path 1 a 2 b --full-validation", "--full-validation takes no weights"),
        ("--mock-data --full-validation", "--mock-data has none"),
    ],
)
def test_what_a_validation_set_must_be(more, why):
    data = "" if "data-path a" in more or "mock" in more else "--train-data-path t"
    if "--data-path 1" in more:
        data = ""
    with pytest.raises(UsageError, match=why):
        read(f"--dry-run {data} {more}", base=SMALL.replace("--mock-data", ""))


def test_the_names_of_validation_sets():
    base = f"--dry-run --train-data-path t {SETS} --multiple-validation-sets"
    config = read(base, base=SMALL.replace("--mock-data", ""))
    assert validation_sets(config.data.valid_data_path) == {"a": "a_text_document", "c": "b/c"}
    assert validation_sets(("x/a", "y/a")) == {"0": "x/a", "1": "y/a"}
    config = read(
        f"--dry-run --train-data-path t {SETS} --eval-iters 0 --full-validation",
        base=SMALL.replace("--mock-data", ""),
    )
    assert config.run.eval_interval == 5


@pytest.mark.parametrize(
    "word, says",
    [
        ("caf\udce9", r"'caf\\udce9' is not UTF-8, which it must be to be saved in checkpoints$"),
        ("caf\udcc3\udca9", r"'caf\\xe9' is UTF-8, .* Python reads it as .*: set PYTHONUTF8=1$"),
    ],
)
def test_a_folder_whose_name_a_checkpoint_cannot_keep(word, says):
    """As Python spells bytes of the command line that are not of its encoding, LC_ALL=C's ASCII."""
    with pytest.raises(UsageError, match=says):
        read(f"--save {word}")


def test_a_flag_behind_those_to_ignore_is_read():
    more = "--ignore-flags foo:1 --step-batch-size-schedule=0:8 --foo x"
    other = "--foo x --step-batch-size-schedule=0:8 --ignore-flags foo:1"
    assert read(more).batch == read(other).batch


def test_the_best_of_no_evaluation_names_what_is_missing():
    with pytest.raises(UsageError, match="--keep-best has nothing to evaluate on: .* --split"):
        parse(shlex.split(
            SMALL.replace("--mock-data", "--data-path web --tokenizer-type NullTokenizer")
            + " --save saved --eval-interval 5 --keep-best --split 100,0,0 --dry-run"
        ), 1)  # fmt: skip


@pytest.mark.parametrize("switch, on", [("", True), ("=true", True), ("=no", False)])
def test_a_rehearsal_by_any_form_of_its_switch(monkeypatch, switch, on):
    called = []
    monkeypatch.setattr(pretrain_llama.subprocess, "call", lambda words: called.append(words) or 0)
    words = [*SMALL.split(), f"--rehearse{switch}", "--train-iters", "0"]
    assert pretrain_llama.main(words) == (0 if on else 2) and bool(called) == on
