# SPDX-License-Identifier: Apache-2.0
"""Report which settings of a resumed run differ from those of the run that saved the checkpoint.

training/run/same_run.py refuses changes that would repeat samples or leave some out. The settings
reported here may change, and the change affects training: they are those that their row of
settings/arguments.py marks with `reported`, itself or by its section, and a fork's own. A line has
a flag with its old and its new value; another one has the learning rates before and after, and the
ends of both curves.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from training.checkpoint import Checkpoint
from training.settings.arguments import SETTINGS
from training.settings.batch_size import samples_after, schedule, steps_of, total_iterations
from training.settings.config import Config
from training.settings.expert_options import expert_options
from training.settings.learning_rate import at, curve_of, decoupled_curve_of
from training.settings.setting import flag_of

SECTIONS = ("batch", "optimizer", "moe", "float8", "extra")  # reported unless a row overrides it
PATHS = ("data.valid_data_path", "data.test_data_path")  # no digest shows whether these only moved
# errors that the values of a foreign or an edited checkpoint may cause
ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AssertionError)
KEYS = {flag_of(key): key for key in SETTINGS}


def difference(key: str, there: Any, here: Any) -> str:
    """Return a difference of a setting as the predicate of a sentence about the checkpoint."""
    flag = flag_of(key)
    none: tuple[Any, ...] = (None, [])
    if there in none:
        return f"was made without {flag} and this run has {flag} {here!r}"
    return (
        f"was made with {flag} {there!r} and this run has {'none' if here in none else repr(here)}"
    )


def lines(found: Checkpoint, config: Config, compared: set[str]) -> Iterator[str]:
    """Yield a line for each setting that differs, one for those that the checkpoint does not
    record, and one for each curve of the learning rate that differs.

    compared: settings that `same_run.changes` reports.
    """
    saved, here = found.state.get("config", {}), config.flat()
    if not saved:
        yield (
            f"{found.directory} does not record the flags of its run: the learning rate, the "
            "optimizer, the batch and the losses may have been computed in another way"
        )
        return
    unknown = []
    for key in [*SETTINGS, *(key for key in here if key not in SETTINGS)]:
        if key in compared or not _reported(key, config):
            continue
        now, known = _value(key, here), _recorded(key, saved)
        if not known:
            unknown += [flag_of(key)] if now != _default(key) else []
        elif saved.get(key) is here.get(key) is None and key in saved:
            continue  # both follow another flag
        elif (was := _value(key, saved)) != now and (_acts(key, saved) or _acts(key, here)):
            if key not in PATHS or _names(was) != _names(now):
                yield f"{found.directory} {difference(key, was, now)}"
    for key, then in saved.items():
        section, _, name = key.partition(".")
        if key not in SETTINGS and section in SECTIONS[:-1] and then and name.isidentifier():
            was = f"{flag_of(key)} {repr(then)[:99]}"
            yield f"{found.directory} was made with {was}, a flag that has since been removed"
    if unknown:
        yield f"{found.directory} does not record {', '.join(unknown)}: the value may have changed"
    yield from rates(found, config)


def rates(found: Checkpoint, config: Config) -> Iterator[str]:
    """Yield a line for each curve of the learning rate that differs from the checkpoint's: its
    values at the checkpoint's last step, at the next step, and at the last step of the run.
    """
    was, state = before(found, config), found.state
    if was is None or "iteration" not in state or "consumed_samples" not in state:
        return
    done = _Progress(state["iteration"], state["consumed_samples"])
    curves: dict[str, Callable[[Config], Any]] = {
        "the learning rate": curve_of,
        "the learning rate of --decoupled-lr": decoupled_curve_of,
    }
    for name, curve in curves.items():
        if name != "the learning rate" and not any(c.optimizer.decoupled_lr for c in (was, config)):
            continue
        try:
            old, new = curve(was), curve(config)
            if old == new:
                continue
            (old_total, old_end), (total, end) = done.last(was), done.last(config)
            if total <= done.iteration:
                continue  # no step is left
            last = f"was {at(old, done.before(was)):.6g} at iteration {done.iteration}, the last "
            last += f"of {found.directory}, and "
            then = f"that run would have had {at(old, done.consumed):.6g}, and "
            then += f"{at(old, old_end):.6g} at iteration {old_total}"
            if old_total <= done.iteration:
                then = f"that run ended at iteration {old_total}"
            yield (
                f"{name} {last if done.iteration else ''}is {at(new, done.consumed):.6g} at "
                f"iteration {done.iteration + 1}; it ends at {at(new, end):.6g} at iteration "
                f"{total} ({then})"
            )
        except ODD:
            return


@dataclass(frozen=True)
class _Progress:
    """The progress of a checkpoint: its iteration, and the samples consumed."""

    iteration: int
    consumed: int

    def before(self, was: Config) -> int:
        """Return the samples consumed before the last step."""
        steps = steps_of(schedule(was), self.consumed)
        return self.consumed - (steps[-1][1] if steps else 0)

    def last(self, config: Config) -> tuple[int, int]:
        """Return the last iteration of a run that continues from here with a config, and the
        samples consumed before it."""
        total = total_iterations(config, self.iteration, self.consumed)
        steps = samples_after(config, max(0, total - 1)) - samples_after(config, self.iteration)
        return total, self.consumed + max(0, steps)


def before(found: Checkpoint, config: Config) -> Config | None:
    """Return this run's config with the batch and the optimizer of the run that saved a checkpoint,
    None if it does not record them."""
    saved = found.state.get("config", {})
    if "optimizer.lr" not in saved:
        return None
    parts: dict[str, Any] = {}
    for name, now in (("batch", config.batch), ("optimizer", config.optimizer)):
        keys = {field.name: f"{name}.{field.name}" for field in fields(now)}
        values = {field: _value(key, saved) for field, key in keys.items()}
        parts[name] = replace(now, **values)
    return replace(config, **parts)


def _reported(key: str, config: Config) -> bool:
    """Return whether a difference of a setting is reported."""
    if key == "batch.micro_batch_size":  # part of the layout, unless a loss depends on it
        experts = expert_options(config)
        by_micro_batch = "aux_loss" in dict(experts.balance) or experts.capacity_factor
        return bool(config.moe.experts and by_micro_batch)
    row = SETTINGS.get(key)
    if row is None or row.reported is None:
        return key.partition(".")[0] in SECTIONS
    return row.reported


def _recorded(key: str, saved: Mapping[str, Any]) -> bool:
    row = SETTINGS.get(key)
    return key in saved or (row is not None and row.added)


def _default(key: str) -> Any:
    value = SETTINGS[key].default if key in SETTINGS else None
    return list(value) if isinstance(value, tuple) else value


def _value(key: str, flat: Mapping[str, Any]) -> Any:
    """Return a setting's value: where it is missing in an older checkpoint or not set, its default
    or the value of the flag that it follows."""
    row, value = SETTINGS.get(key), flat.get(key)
    if row is None:
        return value
    if key not in flat and row.added:
        value = row.default
    if value is None and row.derived in KEYS:
        return _value(KEYS[row.derived], flat)
    value = _default(key) if value is None else value
    return list(value) if isinstance(value, tuple) else value


def _acts(key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether a setting has an effect: a flag that it needs is set to a suitable value."""
    row = SETTINGS.get(key)
    needed = [KEYS[flag] for flag in row.needs if flag in KEYS] if row is not None else []
    if row is None or not needed:
        return True
    if row.needs_value:
        return bool(_value(needed[0], flat) == row.needs_value) and _acts(needed[0], flat)
    return any(_value(each, flat) and _acts(each, flat) for each in needed)


def _names(blend: Any) -> list[str]:
    """Return the words of a blend without the directories of its files."""
    return [PurePath(str(word)).name for word in blend]
