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
from training.flags.derived import assemble
from training.flags.flag_table import Flag, live_flags
from training.flags.help import START, Page, effect, page_of
from training.settings import batch_size
from training.settings.arguments import ModelConfig
from training.settings.config import Config, UsageError

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
    """Return the Config of a run over `world_size` ranks; argv None: sys.argv[1:].

    `extra(parser)` may add a fork's own flags; their values are in `Config.extra`. `of_checkpoint`
    finds a checkpoint's model, for --use-checkpoint-args, which is refused without it. stage: the
    index of the stage of --data-stages whose settings to use; None: that of the checkpoint. Raises
    UsageError naming the flag, its value and the rule; `--help` prints and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    _print_help(argv, extra)
    words = (word.partition("=")[0] for word in argv)
    names = tuple(dict.fromkeys(word for word in words if word.startswith("--")))
    given, notes, values, typed = read(argv, extra)
    try:
        trust_owners(given.get("--trust-owner", ()))  # before a checkpoint is read
    except ValueError as error:
        raise UsageError(str(error)) from None
    if "--use-checkpoint-args" in given:
        if of_checkpoint is None:
            rule = "give the model's sizes: no checkpoint is read here"
            raise UsageError(f"--use-checkpoint-args: {rule}")
        given, values = model_sizes.from_checkpoint(given, of_checkpoint, notes, values, typed)
    own = tuple(sorted(values.items()))
    if "--use-checkpoint-opt-param-scheduler" in given:
        given = saved_schedule.from_checkpoint(given)
    rules.check_given(given)
    made = assemble(given, world_size, notes, own)
    if made.data.data_stages:
        made = _in_stage(given, world_size, notes, own, stage)
    rules.check(made)
    if made.run.skip_train:  # the flags of a run may be given unchanged
        made = replace(made, checkpoint=replace(made.checkpoint, save=None, save_hf=None))
    for word in argv if made.checkpoint.save else ():
        if any("\ud800" <= c <= "\udfff" for c in word):  # Python's form of undecodable bytes
            _refuse_bytes(word)
    lines = [*made.notes, *rules.idle(given, made), *parallel_rules.zero_notes(given, made)]
    lines += [*parallel_rules.context_notes(given, made), *compute_rules.attention_notes(made)]
    lines += [*expert_rules.notes(made), *size_rules.mup_notes(made)]
    notes = list(dict.fromkeys(lines))
    return replace(made, notes=tuple(notes), given=names, command_line=tuple(argv))


def _refuse_bytes(word: str) -> NoReturn:
    """Raise UsageError for a word with bytes that Python cannot decode, and JSON cannot hold."""
    try:
        read = word.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise UsageError(
            f"{word!a} is not UTF-8, which it must be to be saved in checkpoints"
        ) from None
    raise UsageError(
        f"{read!a} is UTF-8, but Python reads it as {sys.getfilesystemencoding()}, so it cannot be "
        "saved in checkpoints: set PYTHONUTF8=1"
    )


class _Parser(argparse.ArgumentParser):
    """Raise UsageError on a mistake instead of printing the usage and exiting."""

    own_names: frozenset[str] = frozenset()  # flags of a fork

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise UsageError(text.replace("ignored explicit argument", "a switch takes no value, not"))


def model_file(argv: Sequence[str] | None) -> str:
    """Return --model-file, before the rest is parsed: the file may define flags."""
    argv = sys.argv[1:] if argv is None else argv
    return foreign.value_of(argv, "--model-file") or ModelConfig.model_file


def build_parser(extra: Extra | None = None, page: Page = START) -> _Parser:
    """Build the argparse parser from the flag table.

    page: the contents of its help, to which a fork's own flags are added. A fork may define flags
    that this program refuses, or accepts without effect.
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
    """Add one flag of the flag table. group: the group of help that shows it, None to hide it."""
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
    """Print the page of --help WORD and exit; return if --help is not given.

    Raises UsageError if there is no such group or flag.
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


def read(
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
    """Parse words of this program with argparse; return the same as `read`, without lines.

    notes: lines on translated names, for error messages. Raises UsageError.
    """
    try:
        found, stray = parser.parse_known_args(_for_argparse(words, parser))
    except argparse.ArgumentError as error:  # a fork's own type may raise it
        raise UsageError(str(error)) from None
    if stray:
        foreign.refuse_strays(stray, foreign.uses_of(words))
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


def _for_argparse(words: Sequence[str], parser: _Parser) -> list[str]:
    """Return the words with `--lr -1e-4` as `--lr=-1e-4`: argparse takes -1e-4 for a flag.

    A flag with any number of values stays as it is, since `=` would give it this value alone.
    """
    out: list[str] = []
    several = {name for name, of in parser._option_string_actions.items() if of.nargs == "*"}
    for word in words:
        if word == "--" or word.endswith("=--"):  # argparse would take it away
            raise UsageError(f"{word}: -- is not a value")
        negative = word.startswith("-") and not word.startswith("--")
        single = out and out[-1].startswith("--") and "=" not in out[-1] and out[-1] not in several
        if negative and single:
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
    config = assemble(given, world_size, [], own)
    text = given.get("--step-batch-size-schedule")
    sizes = batch_size.read_schedule(text) if text else ((0, config.batch.global_batch_size),)
    stages, by_sample = data_stages.plan(path, data_stages.read(path, given), sizes)
    size_rules.check(config)
    for stage in stages:
        try:
            size_rules.check(assemble(data_stages.apply(given, stage), world_size, [], own))
        except UsageError as error:
            raise UsageError(f"--data-stages {path}: stage {stage.name!r}: {error}") from None
    if "--use-checkpoint-args" in given and len({stage.settings for stage in stages}) > 1:
        raise UsageError(
            f"--data-stages {path}: its stages differ in seq_length or rotary positions, which "
            "--use-checkpoint-args would take from the checkpoint: give the sizes as flags"
        )
    dry = config.run.dry_run or config.rehearse.rehearse
    k = data_stages.choose(stages, data_stages.position(given), which, dry)
    made = assemble(data_stages.apply(given, stages[k]), world_size, notes, own)
    if text:
        batch = replace(made.batch, step_batch_size_schedule=by_sample)
        made = replace(made, batch=batch)
    made = replace(made, stages=tuple(stages))
    return replace(made, notes=(*made.notes, *data_stages.notes(made)))
