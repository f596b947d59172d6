# SPDX-License-Identifier: Apache-2.0
"""The table of flags: each of Megatron-LM's has a class, and docs/flags.md lists them all."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from tests.training.flags import flags_page
from training.flags.flag_table import REMOVED, UsageError, live_flags
from training.flags.foreign import like, suggest
from training.flags.megatron import known_flags, vocabulary
from training.settings import arguments, config
from training.settings.config import SECTIONS

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
--muon-use-nesterov
""".split()


def test_the_list_of_flags_is_frozen():
    """A new flag is a decision: its row is in the page's diff, `python -m` FLAGS_PAGE writes it."""
    assert flags_page.PAGE.read_text() == flags_page.page(), f"python -m {flags_page.__name__}"


def test_every_spelling_of_megatron_lm_has_a_class():
    """876 in release 0.20, and 70 that only the releases before it have."""
    ours = {flag.name for flag in live_flags().values() if flag.row.ours}
    ours |= {"--core-attention-backend", *REMOVED}
    ours -= {"--hierarchical-context-parallel-sizes"}  # which is Megatron-LM's too
    assert len(set(known_flags()) - ours - set(OLDER)) == 876 + 70


@pytest.mark.parametrize(
    "name,kind",
    [
        ("--swiglu", "accepted"),
        ("--use-distributed-optimizer", "live"),
        ("--num-experts", "live"),
        ("--moe-router-topk", "live"),
        ("--moe-router-fusion", "accepted"),
        ("--moe-use-upcycling", "refused"),
        ("--use-torch-fsdp2", "accepted"),
        ("--use-megatron-fsdp", "accepted"),
        ("--enable-full-sharding-in-hsdp", "refused"),
        ("--num-distributed-optimizer-instances", "live"),
        ("--grad-reduce-in-bf16", "live"),
        ("--main-grads-dtype", "live"),
        ("--optimizer-cpu-offload", "live"),
        ("--optimizer-offload-fraction", "accepted"),
        ("--fine-grained-activation-offloading", "accepted"),
        ("--rampup-batch-size", "refused"),
        ("--fp16", "refused"),
        ("--trust-remote-code", "accepted"),
        ("--lr", "live"),
        ("--tp-comm-overlap", "live"),
        ("--tp-comm-overlap-cfg", "accepted"),
    ],
)
def test_classes(name, kind):
    assert known_flags()[name].kind == kind


def test_every_flag_says_why_in_a_sentence():
    for flag in known_flags().values():
        assert len(flag.text) > 3 and not flag.text.endswith("."), flag.name


def test_live_flags_and_config_fields_are_the_same_list():
    """A live flag nobody can read, or a field nobody can set, is a mistake of ours."""
    named = {"bf16": "dtype", "fp64": "dtype"}
    named |= {"vocab_file": "tokenizer_model", "data_args_path": "data_path"}
    per_stage = "num_layers_per_virtual_pipeline_stage"
    named |= {per_stage: "num_virtual_stages_per_pipeline_rank"}
    assert named.keys() == {name for rows in arguments.OTHER_FLAGS.values() for name in rows}
    set_by = {section: set() for section in config.SECTIONS}
    for flag in live_flags().values():
        set_by[flag.section].add(named.get(flag.dest, flag.dest))
    set_by["parallel"].add("world_size")  # the launcher's
    fields_of = {section: {f.name for f in fields(kind)} for section, kind in SECTIONS.items()}
    assert set_by == fields_of


def test_every_default_keeps_its_rule():
    """The rule reads what --help shows as the default, and gives the default back."""
    for flag in live_flags().values():
        default, rule = flag.row.default, flag.rule
        if default not in (None, ()) and default is not False and not flag.row.derived:
            given = list(map(str, default)) if rule.nargs == "*" else str(default)
            assert flag.read(given) == default, flag.name


def test_what_a_flag_needs_is_a_flag():
    for flag in live_flags().values():
        assert set(flag.row.needs) <= known_flags().keys(), flag.name
        if value := flag.row.needs_value:
            assert known_flags()[flag.row.needs[0]].read(value) == value, flag.name


def test_a_rule_between_flags_names_flags_and_values_that_there_are():
    """And it stands next to a setting that it is about."""
    rows = [(flag, stop) for flag in live_flags().values() for stop in flag.row.stops]
    assert len(rows) > 20
    for flag, stop in rows:
        conditions = [*stop.when.split(" & "), *filter(None, stop.unless.split(" or "))]
        assert conditions[0].split()[0] == flag.name and flag.name in stop.sentence, flag.name
        for condition in conditions:
            name, _, values = condition.partition(" ")
            rule = live_flags()[name].rule
            assert all(str(rule.read(value)) == value for value in values.split("|") if value), name
    for flag in live_flags().values():
        assert set(flag.row.excludes) <= known_flags().keys() - {flag.name}, flag.name


def test_every_setting_is_read_by_the_run():
    """A flag that is parsed, checked and printed but steers nothing would be silently ignored."""
    root = Path(__file__).parents[3]
    asking = (
        "arguments config context_parallel dry_run flags matrices megatron_flags model_profile "
        "obeyed_flags pipeline_stages places rules size_rules parallel_rules compute_rules "
        "run_rules recording fit traffic"
    ).split()
    files = [root / "pretrain_llama.py", *(root / "training").rglob("*.py")]
    files += (root / "forecast/rehearsal").glob("*.py")
    files += (root / "forecast").glob("*.py")
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
    names = config.Config(arguments.ModelConfig(2, 64, 4, 32)).flat()
    fields_of = {name: name.split(".")[1] for name in names}
    unread = {name for name, field in fields_of.items() if through.get(field, field) not in read}
    parsed = {"checkpoint.use_checkpoint_args", "checkpoint.use_checkpoint_opt_param_scheduler"}
    parsed |= {"run.ignore_flags", "checkpoint.trust_owner"}  # parse() acts on them
    assert unread == parsed | {"parallel.rank_order"}  # make_grid reads it


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
        for typed in list(slips(name))[i % 181 :: 181]
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
        ("--save", " ", "omit the flag instead"),
        ("--zero-stage", "4", "one of 0, 1, 2, 3"),
        ("--tp-comm-overlap", "yes", "one of none, auto, ring, symmetric"),
        ("--zero-stage", "full", "one of 0, 1, 2, 3"),
        ("--main-grads-dtype", "fp16", "one of fp32, bf16"),
        ("--optimizer-backend", "fused", "one of torch, apex, te"),
        ("--on-nan", "ignore", "one of stop, skip, rewind"),
        ("--num-distributed-optimizer-instances", "0", "a whole number >= 1"),
    ],
)
def test_a_wrong_value_names_flag_value_and_rule(name, text, rule):
    with pytest.raises(UsageError) as mistake:
        known_flags()[name].read(text)
    assert str(mistake.value).startswith(name) and rule in str(mistake.value)
    assert text.strip() in str(mistake.value)


def test_differences_name_flags_that_are_known():
    for row in vocabulary().differences:
        assert set(row.flags.split()) <= known_flags().keys() and row.there and row.here, row


def test_what_another_name_stands_for_is_a_live_flag():
    for flag in known_flags().values():
        for word in flag.alias_of:
            assert not word.startswith("--") or known_flags()[word].kind == "live", flag.name


def test_no_table_is_text_that_the_program_parses():
    assert not list((Path(__file__).parents[3] / "training").rglob("*.txt"))
