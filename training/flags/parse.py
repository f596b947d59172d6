# SPDX-License-Identifier: Apache-2.0
"""Turn the command line into one checked, frozen Config; report a mistake in one sentence.

The flags are Megatron-LM's, classified in `training.flags.flag_table`; `training.flags.rules` holds
the rules between flags. Parsing happens before the first collective and writes no file.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import torch

from training.data.split import DEFAULT_SPLIT
from training.files.untrusted import trust_owners
from training.flags import (
    compute_rules,
    data_stages,
    expert_rules,
    foreign,
    model_sizes,
    parallel_rules,
    rules,
    saved_schedule,
    size_rules,
)
from training.flags.flag_table import Flag, live_flags
from training.flags.help import START, Page, effect, page_of
from training.flags.run_rules import has_validation, shard_list
from training.settings import batch_size
from training.settings.arguments import ModelConfig, ParallelConfig
from training.settings.config import SECTIONS, Config, UsageError
from training.settings.pipeline_schedule import virtual_stages

__all__ = ["UsageError", "build_parser", "parse"]

USAGE = """
  pretrain_llama.py FLAGS                                      one process
  torchrun --nproc-per-node N pretrain_llama.py FLAGS          N ranks on this host
  WORLD_SIZE=N pretrain_llama.py --dry-run FLAGS               says what N ranks would do
  pretrain_llama.py --help [GROUP or FLAG]                     explains the flags
  python tools/checkpoint.py --help, tools/generate.py --help  what to do with the result"""
Extra = Callable[[argparse.ArgumentParser], None]


def parse(
    argv: Sequence[str] | None,
    world_size: int,
    extra: Extra | None = None,
    of_checkpoint: model_sizes.OfCheckpoint | None = None,
    stage: int | None = None,
) -> Config:
    """Return the Config of a run over `world_size` ranks; argv None is this program's own.

    `extra(parser)` may add a fork's own flags; their values arrive in `Config.extra`.
    `of_checkpoint` finds a checkpoint's model, for --use-checkpoint-args. stage: the number of the
    one of --data-stages whose settings are asked for; left out, where the checkpoint is. Raises
    UsageError naming the flag, its value and the rule; `--help` prints and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    _print_help(argv, extra)
    words = (word.partition("=")[0] for word in argv)
    names = tuple(dict.fromkeys(word for word in words if word.startswith("--")))
    given, notes, values, typed = _read(argv, extra)
    try:
        trust_owners(given.get("--trust-owner", ()))  # before a checkpoint is read
    except ValueError as error:
        raise UsageError(str(error)) from None
    if "--use-checkpoint-args" in given:
        assert of_checkpoint is not None
        given, values = model_sizes.from_checkpoint(given, of_checkpoint, notes, values, typed)
    own = tuple(sorted(values.items()))
    if "--use-checkpoint-opt-param-scheduler" in given:
        given = saved_schedule.from_checkpoint(given)
    rules.check_given(given)
    made = _assemble(given, world_size, notes, own)
    if made.data.data_stages:
        made = _in_stage(given, world_size, notes, own, stage)
    rules.check(made)
    if made.run.skip_train:  # the flags of a run may be given as they are
        made = replace(made, checkpoint=replace(made.checkpoint, save=None, save_hf=None))
    for word in argv if made.checkpoint.save else ():
        if any("\ud800" <= c <= "\udfff" for c in word):  # as Python spells other bytes
            raise UsageError(f"{word!a} is not UTF-8, in which a checkpoint keeps the command line")
    lines = [*made.notes, *rules.idle(given, made), *parallel_rules.zero_notes(given, made)]
    lines += [*parallel_rules.context_notes(given, made), *compute_rules.attention_notes(made)]
    lines += [*expert_rules.notes(made), *size_rules.mup_notes(made)]
    notes = list(dict.fromkeys(lines))
    return replace(made, notes=tuple(notes), given=names, command_line=tuple(argv))


class _Parser(argparse.ArgumentParser):
    """Raise UsageError on a mistake instead of printing the usage and exiting."""

    own_names: frozenset[str] = frozenset()  # flags of a fork

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise UsageError(text.replace("ignored explicit argument", "a switch takes no value, not"))


def model_file(argv: Sequence[str] | None) -> str:
    """Return --model-file, before the rest is parsed: the file may bring flags."""
    argv = sys.argv[1:] if argv is None else argv
    return foreign.value_of(argv, "--model-file") or ModelConfig.model_file


def build_parser(extra: Extra | None = None, page: Page = START) -> _Parser:
    """Build argparse from the flag_table. page: what its help shows; a fork's own flags always are.

    A fork may have flags of its own that this program refuses, or accepts without an effect.
    """
    parser = _Parser(
        prog="pretrain_llama.py",
        usage=USAGE if page.text else argparse.SUPPRESS,
        description=page.text,
        epilog=page.below,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    groups = {text: parser.add_argument_group(text) for text in page.flags.values()}
    for flag in live_flags().values():
        _add(parser, flag, groups.get(page.flags.get(flag.name, "")))
    before = {*parser._option_string_actions}
    if extra is not None:
        extra(parser)
    parser.own_names = frozenset(parser._option_string_actions.keys() - before)
    return parser


@cache
def _plain_parser() -> _Parser:
    """Return the parser without a fork's flags: building it takes ten times as long as a parse."""
    return build_parser()


def _add(parser: _Parser, flag: Flag, group: "argparse._ArgumentGroup | None") -> None:
    """Add one flag of the flag_table. group: where help shows it."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": flag.name}
    if flag.rule.nargs == 0:
        options["action"] = "store_true"
    else:
        options |= {"nargs": flag.rule.nargs, "metavar": flag.rule.metavar}
        options |= {} if flag.rule.bare is None else {"const": flag.rule.bare}
        options |= {"action": "append"} if flag.rule.repeated else {}
    help_text = argparse.SUPPRESS if group is None else effect(flag).replace("%", "%%")
    (parser if group is None else group).add_argument(flag.name, help=help_text, **options)


def _print_help(argv: Sequence[str], extra: Extra | None) -> None:
    """Print what --help WORD asks for, and exit; where it is not given, return.

    Raises UsageError where there is no such group or flag.
    """
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            asked = value if equals else after
            if name == "-h" and asked.isdecimal():
                raise UsageError(f"-h {asked}: -h is --help here, and takes a group or a flag")
            found = page_of(asked, build_parser(extra).own_names)
            parser = build_parser(extra, found)
            parser.print_help()
            parser.exit()


def _read(
    argv: Sequence[str], extra: Extra | None
) -> tuple[dict[str, Any], list[str], dict[str, Any], dict[str, str]]:
    """Return ({flag: value}, lines to print, a fork's own {name: value}, and {name: flag} of those
    that are in `argv`). Raises UsageError.
    """
    parser = build_parser(extra) if extra else _plain_parser()
    try:
        if "--ignore-flags" not in argv:
            given, own, typed = _read_ours(argv, parser)
            return given, [], own, typed
    except UsageError:
        pass  # a flag, or a value, that is not of this program
    there = foreign.in_our_words(argv, parser.own_names)
    given, own, typed = _read_ours(there.words, parser, there.notes)
    foreign.accept(there)
    given |= {use.name: True for use in there.accepted}
    if there.ignored:
        given["--ignore-flags"] = there.ignored
    return given, there.notes, own, typed


def _read_ours(
    words: Sequence[str], parser: _Parser, notes: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return what argparse finds in the words of this program: as `_read`, without lines.

    notes: what names of other programs were taken as. Raises UsageError.
    """
    try:
        found, stray = parser.parse_known_args(_for_argparse(words))
    except argparse.ArgumentError as error:  # a fork's own type may raise it
        raise UsageError(str(error)) from None
    if stray:
        foreign.refuse_strays(stray)
    given, own = dict[str, Any](), dict[str, Any]()
    for name, text in vars(found).items():
        flag = live_flags().get(name)
        if flag is None:
            own[name] = tuple(text) if isinstance(text, list) else text
            if type(own[name]).__hash__ is None:
                raise UsageError(
                    f"a flag of --model-file gives {name} a {type(text).__name__}: it must give a "
                    "number, a string or a tuple of these"
                )
            continue
        try:
            given[name] = flag.read(text)
        except UsageError as error:
            meant = [f" ({note})" for note in notes if note.endswith(f" is taken as {name}")]
            raise UsageError(f"{error}{meant[0] if meant else ''}") from None
    options, names = parser._option_string_actions, [word.partition("=")[0] for word in words]
    return given, own, {options[name].dest: name for name in names if name in parser.own_names}


def _for_argparse(words: Sequence[str]) -> list[str]:
    """Return the words with `--lr -1e-4` as `--lr=-1e-4`: argparse takes -1e-4 for a flag."""
    out: list[str] = []
    for word in words:
        if word == "--" or word.endswith("=--"):  # argparse would take it away
            raise UsageError(f"{word}: -- is not a value")
        negative = word.startswith("-") and not word.startswith("--")
        if negative and out and out[-1].startswith("--") and "=" not in out[-1]:
            out[-1] = f"{out[-1]}={word}"
        else:
            out.append(word)
    return out


def _in_stage(
    given: dict[str, Any],
    world_size: int,
    notes: list[str],
    own: tuple[tuple[str, Any], ...],
    which: int | None,
) -> Config:
    """Return the config with the settings of the stage that the run begins in."""
    path = given["--data-stages"]
    config = _assemble(given, world_size, [], own)
    text = given.get("--step-batch-size-schedule")
    sizes = batch_size.read_schedule(text) if text else ((0, config.batch.global_batch_size),)
    stages, by_sample = data_stages.plan(path, data_stages.read(path, given), sizes)
    size_rules.check(config)
    for stage in stages:
        try:
            size_rules.check(_assemble(data_stages.apply(given, stage), world_size, [], own))
        except UsageError as error:
            raise UsageError(f"--data-stages {path}: stage {stage.name!r}: {error}") from None
    if "--use-checkpoint-args" in given and len({stage.settings for stage in stages}) > 1:
        raise UsageError(
            f"--data-stages {path}: its stages differ in seq_length or rotary positions, which "
            "--use-checkpoint-args would take from the checkpoint: give the sizes as flags"
        )
    dry = config.run.dry_run or config.rehearse.rehearse
    k = data_stages.choose(stages, data_stages.position(given), which, dry)
    made = _assemble(data_stages.apply(given, stages[k]), world_size, notes, own)
    if text:
        batch = replace(made.batch, step_batch_size_schedule=by_sample)
        made = replace(made, batch=batch)
    made = replace(made, stages=tuple(stages))
    return replace(made, notes=(*made.notes, *data_stages.notes(made)))


def _assemble(
    given: dict[str, Any], world_size: int, notes: list[str], own: tuple[tuple[str, Any], ...]
) -> Config:
    """Sort the values into the dataclasses and fill in what depends on several flags."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in given.items():
        if flag := live_flags().get(name):
            parts[flag.section][flag.dest] = value
    model, parallel, batch, run = (parts[k] for k in ("model", "parallel", "batch", "run"))

    if "--group-query-attention" in given and "--num-query-groups" not in given:
        model["num_query_groups"] = 1
    parallel["world_size"] = world_size
    if "rank_order" in parallel:
        parallel["rank_order"] = parallel_rules.rank_order(parallel["rank_order"])
    tp = parallel.get("tensor_model_parallel_size", 1)
    if parallel.get("sequence_parallel") and tp == 1:
        parallel["sequence_parallel"] = False
        notes.append(
            "--sequence-parallel is off: at --tensor-model-parallel-size 1 there is nothing to "
            "split"
        )
    if parallel.get("tp_comm_overlap", "none") != "none" and tp == 1:
        notes.append(
            f"--tp-comm-overlap {parallel['tp_comm_overlap']} is off: at "
            "--tensor-model-parallel-size 1 nothing is sent"
        )
        parallel["tp_comm_overlap"] = "none"
    if parallel.get("tp_comm_overlap") == "auto" and "deterministic_mode" in run:
        notes.append(
            "--deterministic-mode: --tp-comm-overlap auto may choose differently in another run, "
            "which changes bits; name a method"
        )
    if parallel.get("recompute_method") == "block" and parallel.get("recompute_num_layers") == 0:
        for name in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            parallel.pop(name, None)  # the first 0 layers: none
    if "recompute_granularity" not in parallel:  # nothing is recomputed, as in Megatron-LM
        for name in ("recompute_method", "recompute_num_layers"):
            parallel.pop(name, None)
    if parallel.get("recompute_granularity") == "full":
        parallel.setdefault("recompute_method", "uniform")
        parallel.setdefault("recompute_num_layers", 1)
    virtual = virtual_stages(given, model["num_layers"])
    parallel.pop("num_layers_per_virtual_pipeline_stage", None)
    if virtual is not None:
        parallel["num_virtual_stages_per_pipeline_rank"] = virtual
    if layers := parts["gpu"].get("cpu_offloading_num_layers"):
        parts["gpu"].setdefault("cpu_offload_activations", True)
    elif layers == 0:
        parts["gpu"]["cpu_offload_activations"] = False
    layout = ParallelConfig(**parallel)
    parallel_rules.check_world(layout)
    if "step_batch_size_schedule" in batch:
        text = batch["step_batch_size_schedule"]
        steps = batch_size.parse_schedule(text, model["seq_length"])
        batch |= {"step_batch_size_schedule": steps, "global_batch_size": steps[0][1]}
    one = batch.setdefault("micro_batch_size", 1) * layout.data_parallel_size
    batch.setdefault("global_batch_size", one)

    low = parts["float8"]
    if low.get("fp8_format") and "fp8_recipe" not in low:
        low["fp8_recipe"] = "delayed"
        notes.append(
            "no --fp8-recipe: delayed, as in Megatron-LM; tensorwise needs no history and "
            "clamps nothing (docs/float8.md)"
        )
    bf16, fp64 = run.pop("bf16", False), run.pop("fp64", False)
    run["dtype"] = torch.float64 if fp64 else torch.bfloat16 if bf16 else torch.float32
    data = parts["data"]
    vocab_file = data.pop("vocab_file", None)
    if data.get("tokenizer_type") == "GPT2BPETokenizer":
        data["tokenizer_model"] = vocab_file  # as there, --tokenizer-model is not read
    if listed := data.pop("data_args_path", None):
        data["data_path"] = shard_list(listed, run.get("dry_run", False))
    if data.get("split"):
        data["split"] = data["split"].strip(" '\"")
    if data.get("data_path"):
        data.setdefault("split", DEFAULT_SPLIT)
    train = data.get("train_data_path") or data.get("data_stages")
    paths = (bool(train), bool(data.get("valid_data_path")))
    evaluates = run.get("eval_iters", 1) > 0 or data.get("full_validation")
    evaluates = run.get("eval_interval") and evaluates
    if evaluates and not has_validation(data.get("split"), *paths):
        notes.append(
            f"--eval-interval {run.pop('eval_interval')} has nothing to evaluate on, so there is "
            "no evaluation: give the second number of --split a share, or --valid-data-path"
        )
    alone = run.get("skip_train") and not run.get("eval_interval")
    if alone and data.get("data_order") == "megatron":
        notes.append(
            "--skip-train without --eval-interval: --data-order megatron draws the samples of one "
            "evaluation, which are others than those of a run with more of them"
        )
    if data.get("mock_data"):
        data.setdefault("tokenizer_type", "NullTokenizer")
    load = parts["checkpoint"].get("load")
    if data.get("tokenizer_type") == "HuggingFaceTokenizer" and load:
        if "--use-checkpoint-args" not in given:  # it takes the checkpoint's tokenizer
            data.setdefault("tokenizer_model", load)
    parts["moe"] = expert_rules.choose_file(parts["moe"], model)
    built = {section: cls(**parts[section]) for section, cls in SECTIONS.items()}
    return Config(**built, extra=own, notes=tuple(notes))
