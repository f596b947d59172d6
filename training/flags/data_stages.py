# SPDX-License-Identifier: Apache-2.0
"""Read the file of --data-stages, and apply the settings of a run's current stage.

{"stages": [
    {"name": "web", "start_tokens": 0, "train_data_path": ["0.9", "web", "0.1", "code"]},
    {"name": "long", "start_tokens": "1.2B", "train_data_path": ["books"],
     "seq_length": 32768, "rotary_base": 500000}]}
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from training.checkpoint.find import resumed
from training.data.blend import parse_blend
from training.files.untrusted import read_json
from training.flags.model_sizes import checked
from training.settings import batch_size
from training.settings.arguments import SETTINGS
from training.settings.config import Config, Stage, UsageError
from training.settings.setting import flag_of
from training.settings.stages import LENGTH, ROPE, plan, stage_at

FLAG, DATA = "--data-stages", "train_data_path"
NEEDED = ("name", "start_tokens", DATA)
MOST = 1000  # stages
Flags = dict[str, Any]


def read(path: str, given: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of a file, without first_sample. given: {flag: value} of the run.

    Raises UsageError naming the file, the stage, the value and the rule.
    """
    try:
        found = read_json(path)
    except OSError as error:
        raise UsageError(f"{FLAG} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{FLAG} {error}") from None
    stages = found.get("stages") if isinstance(found, dict) else None
    if not isinstance(stages, list) or not stages or found.keys() != {"stages"}:
        raise _wrong(path, 'it must be an object with one key, "stages", a list of stages')
    if len(stages) > MOST:
        raise _wrong(path, f"it has {len(stages)} stages: must be at most {MOST}")
    made = [_stage(path, i, each, given) for i, each in enumerate(stages)]
    if made[0].start_tokens:
        raise _wrong(path, f"the first stage's start_tokens is {made[0].start_tokens}: must be 0")
    for before, after in zip(made, made[1:], strict=False):
        if after.start_tokens <= before.start_tokens:
            raise _wrong(
                path,
                f"stage {after.name!r} has start_tokens {after.start_tokens:,}: must be above "
                f"that of the stage before, {before.start_tokens:,}",
            )
    names = [stage.name for stage in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _wrong(path, f"two stages have the name {twice!r}: names must be unique")
    return made


def _wrong(path: str, why: str) -> UsageError:
    return UsageError(f"{FLAG} {path}: {why}")


def _stage(path: str, number: int, found: Any, given: Mapping[str, Any]) -> Stage:
    if not isinstance(found, dict):
        raise _wrong(path, f"stage {number + 1} is {found!r}: must be an object")
    if missing := [key for key in NEEDED if key not in found]:
        raise _wrong(path, f"stage {number + 1} lacks {', '.join(missing)}")
    name = found["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]{1,100}", name):
        raise _wrong(
            path,
            f"stage {number + 1} has the name {name!r}: must be of letters, digits, '.', '_', '+' "
            "and '-'",
        )
    where = f"stage {name!r}"
    if unknown := sorted(found.keys() - {*NEEDED, LENGTH, *ROPE}):
        raise _wrong(
            path,
            f"{where} has {unknown[0]!r}: a stage may have {', '.join((*NEEDED, LENGTH, *ROPE))}",
        )
    blend = found[DATA]
    if not isinstance(blend, list) or not all(isinstance(word, str) and word for word in blend):
        must = f"{DATA} must be a list of strings, the words after {flag_of(DATA)}"
        raise _wrong(path, f"{where}: {must}")
    try:
        prefixes, weights = parse_blend(blend, DATA)
    except ValueError as error:
        raise _wrong(path, f"{where}: {error}") from None
    if weights is not None and min(weights) == 0:
        unused = prefixes[weights.index(0)]
        raise _wrong(path, f"{where}: {unused} has weight 0: must be above 0, or be left out")
    settings = []
    for field in (LENGTH, *ROPE):
        value = found.get(field, given.get(flag_of(field), SETTINGS[f"model.{field}"].default))
        if field in found:
            value = _setting(path, where, field, value)
        settings.append((field, value))
    start = _tokens(path, where, found["start_tokens"])
    return Stage(name, start, tuple(blend), tuple(settings))


def _setting(path: str, where: str, field: str, value: Any) -> Any:
    """Return the value of a setting, checked by the rule of its flag."""
    switch = SETTINGS[f"model.{field}"].rule.nargs == 0
    if switch != isinstance(value, bool) or isinstance(value, (list, dict, type(None))):
        what = "true or false" if switch else f"a value of {flag_of(field)}"
        raise _wrong(path, f"{where}: {field} is {value!r}: must be {what}")
    try:
        return value if switch else checked(flag_of(field), value)
    except UsageError as error:
        raise _wrong(path, f"{where}: {error}") from None


def _tokens(path: str, where: str, value: Any) -> int:
    """Parse a count of tokens: a whole number, or a text such as 250B."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
            raise ValueError
        count = batch_size.count(str(value))
        if isinstance(value, int) and value != count or count >= 1 << 62:
            raise ValueError
        return count
    except ValueError:
        raise _wrong(
            path, f"{where}: start_tokens is {value!r}: must be a count such as 0, 300000 or 250B"
        ) from None


def position(given: Mapping[str, Any]) -> int:
    """Return the samples consumed in the newest checkpoint, from which the run starts, or 0."""
    names = ("--load", "--branch-from", "--ckpt-step", "--finetune")
    found = resumed(*map(given.get, names))
    return found.state["consumed_samples"] if found else 0


def choose(stages: Sequence[Stage], samples: int, which: int | None, longest: bool) -> int:
    """Return the index of the stage whose settings this process uses.

    which: the requested stage, if any. longest: use the one with the longest rows, for a dry run.
    """
    if which is not None:
        return which
    if longest:
        return max(range(len(stages)), key=lambda i: stages[i].length)
    return stage_at(stages, samples)


def apply(given: Mapping[str, Any], stage: Stage) -> Flags:
    """Return `given`, {flag: value}, with a stage's settings in place of the flags."""
    out = dict(given)
    for field, value in stage.settings:
        flag = flag_of(field)
        out.pop(flag, None)
        if value is not False and (value != SETTINGS[f"model.{field}"].default or flag in given):
            out[flag] = value
    return out


def notes(config: Config) -> list[str]:
    """Return a line on each stage of a run."""
    end = batch_size.total_samples(config)
    return [
        f"stage {stage.name}: from sample {stage.first_sample:,}, token {stage.first_token:,}, "
        f"on rows of {stage.length:,}: {' '.join(stage.train_data_path)}"
        + f"; the run ends before it, at sample {end:,}"
        * (stage.first_sample >= end)
        for stage in config.stages
    ]


__all__ = ["apply", "choose", "notes", "plan", "position", "read"]
