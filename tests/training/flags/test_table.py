# SPDX-License-Identifier: Apache-2.0
"""The table of flags: each of Megatron-LM's has a class, and the live ones are listed here."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from training import config
from training.flags.foreign import like, suggest
from training.flags.megatron import ACCEPTED, DIFFERENCES
from training.flags.parse import build_parser
from training.flags.table import REMOVED, UsageError, known_flags, live

# Frozen on purpose: a new live flag is added here together with the reason in its commit.
LIVE = """
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --adam-beta1
--adam-beta2 --adam-eps --allow-change --async-save --bf16 --ckpt-step --clip-grad
--cpu-offload-activations --cpu-offloading-num-layers --offload-modules --min-offloaded-tensor-size
--cuda-graph --cuda-graph-warmup-steps
--context-parallel-size --cp-comm-type --cross-entropy-fusion-impl
--data-args-path --data-local-copy
--data-cache-path --data-parallel-sharding-strategy --data-path --data-timeout --ddp-bucket-size
--decoder-first-pipeline-num-layers
--decoder-last-pipeline-num-layers --decoupled-lr --decoupled-min-lr
--defer-embedding-wgrad-compute --deterministic-mode --device
--distributed-backend --distributed-timeout-minutes --dry-run --empty-unused-memory-level
--eod-mask-loss --eval-interval
--eval-iters --exit-duration-in-mins --exit-interval --exit-on-missing-checkpoint
--fused-linear-cross-entropy
--ffn-hidden-size --finetune --first-last-layers-bf16 --fp64 --fp8-format
--fp8-amax-compute-algo --fp8-amax-history-len --fp8-margin
--fp8-param-gather --fp8-recipe --fp8-wgrad-bf16 --num-layers-at-end-in-bf16
--num-layers-at-start-in-bf16
--global-batch-size --grad-reduce-in-bf16 --hidden-size
--hang-timeout --hierarchical-context-parallel-sizes
--rank-order
--ignore-flags --init-method-std --keep-last-k --kv-channels --load --log-interval
--log-json --log-params-norm --sample-interval --sample-prompt
--record-memory-history --memory-snapshot-path
--lr --lr-decay-iters --lr-decay-samples --lr-decay-style --lr-warmup-fraction --lr-warmup-init
--lr-warmup-iters --lr-warmup-samples --lr-wsd-decay-iters --lr-wsd-decay-samples
--lr-wsd-decay-style --main-grads-dtype --make-vocab-size-divisible-by --manual-gc
--manual-gc-interval --max-position-embeddings --merge-file --micro-batch-size --model-file
--microbatch-group-size-per-virtual-pipeline-stage --min-lr --mock-data
--nccl-communicator-config-path
--no-check-for-nan-in-loss-and-grad --no-load-optim --no-shared-memory --norm-epsilon
--norm-backend --attention-backend --flash-attention-version
--peer-checkpoint
--peer-timeout --check-replicas --on-replica-mismatch --on-spike
--spike-z-score --iterations-to-skip --rerun-mode
--rehearse --rehearse-rank --rehearse-all-ranks --rehearse-device --rehearse-steps
--rehearse-full --rehearse-json --rehearse-trace
--num-attention-heads --num-distributed-optimizer-instances --num-layers
--num-layers-per-virtual-pipeline-stage --num-query-groups --num-virtual-stages-per-pipeline-rank
--num-workers --on-nan --on-save-failure --optimizer --optimizer-backend --optimizer-cpu-offload
--overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-layout
--pipeline-model-parallel-size --pipeline-schedule --pretrained-checkpoint --profile
--profile-ranks --profile-step-end --profile-step-start --recompute-granularity --recompute-method
--recompute-num-layers --reset-attention-mask --reset-position-ids --rope-scaling-factor
--rotary-base --save --save-interval --save-retain-interval --seed --seq-length
--sequence-parallel --split --step-batch-size-schedule --tensor-model-parallel-size
--tensorboard-dir --test-data-path --tokenizer-model --tokenizer-type --tp-comm-overlap
--train-data-path --train-iters --train-samples
--untie-embeddings-and-output-weights --use-checkpoint-args --use-checkpoint-opt-param-scheduler
--use-distributed-optimizer --use-megatron-fsdp
--use-rope-scaling --valid-data-path --vocab-file --vocab-size --wandb-exp-name --wandb-project
--weight-decay --wgrad-deferral-limit
--zero-reduce-each-microbatch --zero-stage
""".split()
OURS = set(
    "--fused-linear-cross-entropy --norm-backend --core-attention-backend "
    "--cpu-offload-activations --cuda-graph "
    "--check-replicas --hang-timeout --on-replica-mismatch --on-spike "
    "--spike-z-score --rehearse --rehearse-rank --rehearse-all-ranks --rehearse-device "
    "--rehearse-steps --rehearse-full --rehearse-json --rehearse-trace "
    "--rank-order --allow-change --data-timeout --device --dry-run --fp64 --ignore-flags "
    "--keep-last-k "
    "--data-local-copy --log-json --model-file --sample-interval --sample-prompt "
    "--no-shared-memory --on-nan --on-save-failure --optimizer-backend --peer-checkpoint "
    "--peer-timeout --pipeline-schedule --zero-reduce-each-microbatch "
    "--zero-stage --fp8-wgrad-bf16".split()
)
# Of older Megatron-LM, still in launch scripts.
OLDER = """
--activations-checkpoint-method --activations-checkpoint-num-layers --checkpoint-num-layers
--delay-param-gather --distribute-checkpointed-activations --fp8-e4m3 --fp8-hybrid
--layernorm-epsilon --local_rank --mmap-warmup --no-contiguous-buffers-in-local-ddp
--no-delay-grad-reduce --no-scatter-gather-tensors-in-pipeline --override-lr-scheduler
--use-checkpoint-lr-scheduler --use-contiguous-buffers-in-ddp --use-custom-fsdp --use-legacy-models
--DDP-impl --async-tensor-model-parallel-allreduce --data-impl --log-batch-size-to-tensorboard
--log-learning-rate-to-tensorboard --no-async-tensor-model-parallel-allreduce
--no-log-learnig-rate-to-tensorboard --no-query-key-layer-scaling --use-flash-attn-v2
""".split()


def test_the_list_of_live_flags_is_frozen():
    assert sorted(flag.name for flag in live()) == sorted(LIVE)


def test_every_spelling_of_megatron_lm_0_20_has_a_class():
    assert len(set(known_flags()) - OURS - set(OLDER) - set(REMOVED)) == 876


@pytest.mark.parametrize(
    "name,kind",
    [
        ("--swiglu", "checked"),
        ("--use-distributed-optimizer", "live"),
        ("--num-experts", "checked"),
        ("--moe-router-topk", "checked"),
        ("--moe-use-upcycling", "refused"),
        ("--use-torch-fsdp2", "checked"),
        ("--use-megatron-fsdp", "live"),
        ("--enable-full-sharding-in-hsdp", "refused"),
        ("--num-distributed-optimizer-instances", "live"),
        ("--grad-reduce-in-bf16", "live"),
        ("--main-grads-dtype", "live"),
        ("--optimizer-cpu-offload", "live"),
        ("--optimizer-offload-fraction", "checked"),
        ("--fine-grained-activation-offloading", "checked"),
        ("--rampup-batch-size", "refused"),
        ("--fp16", "refused"),
        ("--trust-remote-code", "checked"),
        ("--lr", "live"),
        ("--tp-comm-overlap", "live"),
        ("--tp-comm-overlap-cfg", "checked"),
    ],
)
def test_classes(name, kind):
    assert known_flags()[name].kind == kind


def test_every_flag_says_why_in_a_sentence():
    for flag in known_flags().values():
        assert len(flag.text) > 3 and not flag.text.endswith("."), flag.name


def test_live_flags_and_config_fields_are_the_same_list():
    """A live flag nobody can read, or a field nobody can set, is a mistake of ours."""
    sections = {
        f.name: {g.name for g in fields(getattr(config, f.type.__name__))}
        for f in fields(config.Config)
        if inspect.isclass(f.type) and f.type.__module__.startswith("training.")
    }
    assert set(sections) == set(config.HEADINGS)
    named = {"bf16": "dtype", "fp64": "dtype", "no_check_for_nan_in_loss_and_grad": "on_nan"}
    named |= {"use_megatron_fsdp": "zero_stage", "data_parallel_sharding_strategy": "zero_stage"}
    named |= {"vocab_file": "tokenizer_model", "data_args_path": "data_path"}
    named |= {"cross_entropy_fusion_impl": "fused_linear_cross_entropy"}
    held = {section: set() for section in sections}
    for flag in live():
        held[flag.group].add(named.get(flag.dest, flag.dest))
    # Sizes of axes that are not cut in this version, and the world, have no live flag.
    held["parallel"] |= {"world_size", "context_parallel_size"}
    assert held == sections


def test_every_setting_is_read_by_the_run():
    """A flag that is parsed, checked and printed but steers nothing would be silently ignored."""
    root = Path(__file__).parents[3]
    asking = (
        "activations arguments buffers config dry_run estimate flags megatron_flags meta "
        "model_profile places rank_profile rules size_rules parallel_rules compute_rules run_rules "
        "traffic"
    ).split()
    files = [root / "pretrain_llama.py", *(root / "training").rglob("*.py")]
    files += (root / "estimate").glob("*.py")
    files += (root / "tools/rehearsal").glob("*.py")
    nodes = [
        node
        for file in files
        if file.stem not in asking
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:  # a list of names in a string that is split, for getattr
        if isinstance(node, ast.Attribute) and node.attr == "split":
            if isinstance(node.value, ast.Constant):
                read |= set(node.value.value.split())
    through = {  # properties of the config; --rehearse starts another program
        "rehearse": "rehearse_rank",
        "pipeline_schedule": "schedule",
        "num_virtual_stages_per_pipeline_rank": "virtual_stages",
        "use_distributed_optimizer": "zero",
        "zero_stage": "zero",
    }
    names = config.Config(config.ModelConfig(2, 64, 4, 32)).flat()
    fields_of = {name: name.split(".")[1] for name in names}
    unread = {name for name, field in fields_of.items() if through.get(field, field) not in read}
    parsed = {"checkpoint.use_checkpoint_args", "checkpoint.use_checkpoint_opt_param_scheduler"}
    assert unread == parsed | {"run.ignore_flags"}  # parse() acts on them


def test_help_gives_every_live_flag_with_unit_and_off_value(capsys):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for heading in config.HEADINGS.values():
        assert heading + ":" in text
    for flag in live():
        start = text.index(f"{flag.name} ")
        while text[start - 1] not in " ":  # a longer flag of the same ending
            start = text.index(f"{flag.name} ", start + 1)
        line = text[text.index(flag.text[:20].replace("%%", "%"), start) :]
        tail = line[line.index("[") + 1 : line.index("]", line.index("["))]
        assert tail.startswith(flag.unit.partition(";")[0][:20]), flag.name
        assert any(word in tail for word in ("default", "off", "required", "with", "this or")), tail


def test_an_unknown_flag_gets_close_ones():
    assert suggest("--num-layer").startswith("; did you mean --num-layers")
    assert not suggest("--xyzzy")
    assert suggest("--micro_batch_size") == "; did you mean --micro-batch-size?"


def slips(name):
    """Yield `name` with one letter left out, doubled, changed or swapped with the next."""
    for i in range(2, len(name)):
        before, letter, after = name[:i], name[i], name[i + 1 :]
        yield before + after
        yield before + 2 * letter + after
        yield before + ("x" if letter != "x" else "y") + after
        if after:
            yield before + after[0] + letter + after[1:]


def close_to(typed, names):
    return [name.replace("_", "-") for name in like(typed, names)]


def test_a_slip_of_the_pen_suggests_the_flag_that_was_meant():
    known = known_flags()
    usable = [name for name, flag in known.items() if flag.usable]
    wrong = [
        (typed, name)
        for i, name in enumerate(usable)
        for typed in list(slips(name))[i % 61 :: 61]
        if typed not in known and name.replace("_", "-") not in close_to(typed, usable)
    ]
    assert not wrong


# Flags of Megatron-DeepSpeed, Pai-Megatron-Patch, llm-jp, MindSpeed-LLM, torchtitan, NeMo and
# Hugging Face's Trainer that are like none of ours.
ELSEWHERE = """
--deepspeed --deepspeed_config --deepspeed-activation-checkpointing --ds-sequence-parallel-size
--num-key-value-heads --no-pipeline-parallel --cpu-optimizer --remote-device --universal-checkpoint
--extra-vocab-size --patch-tokenizer-type --max-padding-length --dataset --use-mpi --use-z-loss
--wandb-name --trigger-path --tokenizer-name-or-path --use-fused-rmsnorm --use-fused-swiglu
--use-fused-rotary-pos-emb --handler-name --enable-hf2mg-convert --reuse-fp32-param
--job.config_file --model.flavor --training.steps --optimizer.name
--parallelism.tensor_parallel_degree
--activation_checkpoint.mode --metrics.log_freq --trainer.devices --exp_manager.name
--output_dir --per_device_train_batch_size --gradient_accumulation_steps --learning_rate
--num_train_epochs --max_steps --warmup_steps --warmup_ratio --lr_scheduler_type --logging_steps
--save_steps --save_total_limit --eval_steps --evaluation_strategy --report_to --push_to_hub
--gradient_checkpointing --max_grad_norm --dataloader_num_workers --fsdp --tf32 --torch_compile
--overwrite_output_dir --do_train --do_eval --label_names --group_by_length --ddp_timeout
""".split()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_flag_of_another_program_is_not_taken_for_one_of_ours(name):
    assert not suggest(name)


@pytest.mark.parametrize(
    "name,text,value",
    [
        ("--lr", "1e-3", 1e-3),
        ("--num-layers", "3", 3),
        ("--rotary-base", "500000", 500000.0),
        ("--adam-beta2", "0", 0.0),
        ("--profile-ranks", ["0", "3"], (0, 3)),
        ("--data-path", ["0.3", "a"], ("0.3", "a")),
        ("--lr-decay-style", "WSD", "WSD"),
        ("--zero-stage", "3", 3),
        ("--save", "out", "out"),
    ],
)
def test_values(name, text, value):
    assert known_flags()[name].read(text) == value


@pytest.mark.parametrize(
    "name,text,rule",
    [
        ("--lr", "-0.1", "a number >= 0"),
        ("--lr", "nan", "a number >= 0"),
        ("--lr", "inf", "a number >= 0"),
        ("--lr", "fast", "a number >= 0"),
        ("--norm-epsilon", "0", "a number > 0"),
        ("--num-layers", "0", "a whole number >= 1"),
        ("--num-layers", "2.5", "a whole number >= 1"),
        ("--seed", "-1", "a whole number >= 0"),
        ("--adam-beta1", "1", "a number from 0 to below 1"),
        ("--lr-decay-style", "wsd", "one of constant, linear, cosine, inverse-square-root, WSD"),
        ("--save", " ", "leave the flag out instead"),
        ("--zero-stage", "4", "one of 0, 1, 2, 3"),
        ("--tp-comm-overlap", "yes", "one of none, auto, ring, symmetric"),
        ("--zero-stage", "full", "one of 0, 1, 2, 3"),
        ("--main-grads-dtype", "fp16", "one of fp32, bf16"),
        ("--optimizer-backend", "fused", "one of torch, triton, apex, te"),
        ("--on-nan", "ignore", "one of stop, skip, rewind"),
        ("--num-distributed-optimizer-instances", "0", "a whole number >= 1"),
    ],
)
def test_a_wrong_value_names_flag_value_and_rule(name, text, rule):
    with pytest.raises(UsageError) as mistake:
        known_flags()[name].read(text)
    assert str(mistake.value).startswith(name) and rule in str(mistake.value)
    assert text.strip() in str(mistake.value)


def test_checked_lines_and_differences_are_whole():
    assert all(len(row) == 4 and all(row) for row in ACCEPTED)
    assert all(len(row) == 3 and all(row) for row in DIFFERENCES)
    for flags, _, _ in DIFFERENCES:
        names = [
            word.strip(",") for word in flags.split() if word.startswith("--") and "*" not in word
        ]
        assert names and set(names) <= set(known_flags()), flags
