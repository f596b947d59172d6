# SPDX-License-Identifier: Apache-2.0
"""Read --param-group: parameters selected by patterns of their names, and their properties.

    --param-group PATTERN... PROPERTY...
    PROPERTY   frozen | trained | lr-mult=X | wd-mult=X

A pattern is a shell pattern (fnmatch: *, ?, [abc]), whose * also matches dots. It is compared with
the names of a parameter: the model's own (layers.0.attention.qkv.weight) and those in a checkpoint,
which are Hugging Face's (model.layers.0.self_attn.q_proj.weight, ...). A parameter that fuses
several tensors of a checkpoint is updated as a whole, so the patterns of a flag must match all of
them or none. If several flags give a parameter the same property, the last one counts.

`assign` decides for the whole model, by checkpoint names, and `apply` carries it out on a rank's
part, so that all pipeline ranks and both ends of tied embeddings agree. lr-mult=X multiplies the
learning rate of a group, with --min-lr and the warm-up, as Megatron-LM's lr_mult does; wd-mult=X
multiplies its weight decay.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import product
from typing import NamedTuple

from torch import nn

from mpu.param import decays, factors_of, group_of, times, unique_parameters
from training.settings.setting import Number, Rule

FLAG = "--param-group"
FROZEN, TRAINED, LR, WD = "frozen", "trained", "lr-mult", "wd-mult"
PROPERTIES = f"{FROZEN}, {TRAINED}, {LR}=X, {WD}=X"
FACTOR = Number("X", high=1_000_000, integer=False)


class ParamGroup(NamedTuple):
    """One --param-group. trains, lr_mult, wd_mult: None if the flag does not set it."""

    patterns: tuple[str, ...]
    trains: bool | None = None
    lr_mult: float | None = None
    wd_mult: float | None = None


class Assigned(NamedTuple):
    """The properties of a parameter. trains: None leaves it as the model's file sets it."""

    trains: bool | None = None
    lr_mult: float = 1.0
    wd_mult: float = 1.0


@dataclass(frozen=True)
class GroupRule(Rule):
    """The words of one --param-group; each use of the flag adds one."""

    metavar: str = "WORD"
    nargs: str | int | None = "+"
    repeated = True

    @property
    def what(self) -> str:
        """Return the rule in words."""
        return f"patterns of names, and then {FROZEN}, {TRAINED}, {LR}=X or {WD}=X"

    def read(self, text: str) -> str:
        """Return the words with one space between them. Raises ValueError, as `read` does."""
        words = text.split()
        read(" ".join(words))
        return " ".join(words)


PARAM_GROUP = GroupRule()


def read(text: str) -> ParamGroup:
    """Parse the value of one flag. Raises ValueError, whose text does not name the flag."""
    patterns, found = list[str](), dict[str, bool | float]()
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals and name not in (FROZEN, TRAINED):
            if found:
                raise ValueError(
                    f"{word} comes after {[*found][-1].replace('trains', FROZEN)}: patterns come "
                    f"before properties; give other parameters in another {FLAG}"
                )
            patterns.append(word)
            continue
        key = "trains" if name in (FROZEN, TRAINED) else name
        if (equals and name not in (LR, WD)) or key == "trains" and equals:
            near = difflib.get_close_matches(name.replace("_", "-"), (LR, WD), 1, 0.8)
            meant = f"; did you mean {near[0]}={value}?" if near else ""
            raise ValueError(f"{word} is not a property: these are {PROPERTIES}{meant}")
        if key in found:
            raise ValueError(
                f"{word}: {name if equals else 'frozen or trained'} is given twice"
            )
        try:
            found[key] = FACTOR.read(value) if equals else name == TRAINED
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if not patterns:
        raise ValueError("there is no pattern: give names of parameters first, such as '*norm*'")
    if not found:
        raise ValueError(f"there is no property: end with {PROPERTIES}")
    if found.get("trains") is False and len(found) > 1:
        other = next(key for key in found if key != "trains")
        raise ValueError(f"{other} has no effect on frozen parameters: leave it out")
    return ParamGroup(tuple(patterns), found.get("trains"), found.get(LR), found.get(WD))  # type: ignore[arg-type]


def factors(texts: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Yield each pair (lr_mult, wd_mult) that a parameter may have."""
    groups = [read(text) for text in texts]
    lr = dict.fromkeys([1.0, *(g.lr_mult for g in groups if g.lr_mult is not None)])
    wd = dict.fromkeys([1.0, *(g.wd_mult for g in groups if g.wd_mult is not None)])
    yield from product(lr, wd)


def assign(
    texts: Sequence[str], model: nn.Module, names: Mapping[str, Sequence[str]], weight_decay: float
) -> dict[str, Assigned]:
    """Return {first name in a checkpoint: properties} of each parameter.

    model: the whole model, on one rank. names: {parameter: its names in a checkpoint}. Raises
    ValueError, naming flag and pattern, if a pattern matches nothing or only a part of a parameter,
    if a flag has no effect, or if no parameter would train.
    """
    params = {
        name: (param, tuple(names.get(name) or [name])) for name, param in unique_parameters(model)
    }
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - params.keys()
    found = dict.fromkeys(params, Assigned())
    said: list[dict[str, set[str]]] = []  # per flag: {property: parameters that it sets}
    for text in texts:
        group = read(text)
        fits = _matcher(group.patterns)
        chosen = [n for n, (_, theirs) in params.items() if _named(text, fits, n, theirs)]
        for pattern in group.patterns:
            _check_names(text, pattern, params, tied)
        mine: dict[str, set[str]] = {}
        for key, value in group._asdict().items():
            if key == "patterns" or value is None:
                continue
            for earlier in said:
                earlier.get(key, set()).difference_update(chosen)
            mine[key] = {*chosen}
            for name in chosen:
                found[name] = found[name]._replace(**{key: value})
        said.append(mine)
    frozen = {n for n, (p, _) in params.items() if not _trains(p, found[n])}
    if len(frozen) == len(params):
        raise ValueError(
            f"{FLAG} {texts[-1]}: all {len(params)} parameters of the model are frozen, so nothing "
            "would train"
        )
    for text, mine in zip(texts, said, strict=True):
        for key, own in mine.items():
            _check_effect(text, key, {n: params[n][0] for n in own}, frozen, weight_decay)
    return {theirs[0]: found[name] for name, (_, theirs) in params.items()}


def _named(text: str, fits: Callable[[str], bool], name: str, theirs: Sequence[str]) -> bool:
    """Return whether a flag names a parameter. Raises ValueError if it names only a part of it."""
    parts = [*filter(fits, theirs)]
    if fits(name):
        return True
    if parts and len(parts) < len(theirs):
        other = next(each for each in theirs if each not in parts)
        raise ValueError(
            f"{FLAG} {text}: {parts[0]} is a part of {name}, which also has {other} and is updated "
            f"as a whole: name {name}, or all {len(theirs)} parts"
        )
    return bool(parts)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tests whether a name matches one of the patterns."""
    fits = re.compile("|".join(map(translate, patterns))).match
    return lambda name: fits(name) is not None


def _check_names(
    text: str,
    pattern: str,
    params: Mapping[str, tuple[nn.Parameter, Sequence[str]]],
    tied: Iterable[str],
) -> None:
    """Raise ValueError if a pattern matches no name."""
    every = [each for name, (_, theirs) in params.items() for each in (name, *theirs)]
    fits = _matcher([pattern])
    if any(map(fits, every)):
        return
    if second := [name for name in tied if fits(name)]:
        raise ValueError(
            f"{FLAG} {text}: {second[0]} is tied to another parameter, whose name counts for both; "
            f"the parameters are {_some(params)}"
        )
    starred = _starred(pattern)
    if others := [*filter(_matcher([starred]), every)] if starred != pattern else []:
        there = f"{starred} does, and the last of these is {others[-1]}"
    elif near := difflib.get_close_matches(starred, dict.fromkeys(map(_starred, every)), 3, 0.75):
        there = f"did you mean {' or '.join(near)}?"
    else:
        there = f"the parameters are {_some(params)}"
        there += f"; {other} is tied to one of them" if (other := _some(tied)) else ""
    raise ValueError(f"{FLAG} {text}: {pattern} matches no parameter; {there}")


def _starred(name: str) -> str:
    """Return a name with its numbers replaced by *."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _some(names: Iterable[str]) -> str:
    """Return up to 12 of the names as text, with * for layer numbers."""
    found = [*dict.fromkeys(map(_starred, names))]
    return ", ".join(found[:12]) + ", ..." * (len(found) > 12)


def _trains(param: nn.Parameter, said: Assigned) -> bool:
    return param.requires_grad if said.trains is None else said.trains


def _check_effect(
    text: str,
    key: str,
    chosen: Mapping[str, nn.Parameter],
    frozen: set[str],
    weight_decay: float,
) -> None:
    """Raise ValueError if a property of a flag has no effect.

    chosen: the parameters that have it from this flag, not from a later one.
    """
    word = {"lr_mult": LR, "wd_mult": WD}.get(key, "it")
    if not chosen:
        raise ValueError(
            f"{FLAG} {text}: {word} has no effect: later {FLAG} flags set something else for every "
            "parameter that this one names"
        )
    if key == "trains":
        return
    if chosen.keys() <= frozen:
        raise ValueError(
            f"{FLAG} {text}: {word} has no effect: all parameters that it names are frozen"
        )
    group = read(text)
    if key != "wd_mult" or group.wd_mult == 0 or group.wd_mult == 1:
        return
    if not weight_decay:
        raise ValueError(f"{FLAG} {text}: {word} has no effect: --weight-decay is 0")
    if not any(decays(group_of(p)) for name, p in chosen.items() if name not in frozen):
        raise ValueError(
            f"{FLAG} {text}: {word} has no effect: the parameters that it names have no weight "
            "decay, as vectors such as norms have none"
        )


def apply(
    assigned: Mapping[str, Assigned], model: nn.Module, names: Mapping[str, Sequence[str]]
) -> None:
    """Freeze or unfreeze the parameters of a rank's part of the model, and set their groups.

    assigned: the result of `assign`. names: {parameter: its names in a checkpoint}.
    """
    for name, param in unique_parameters(model):
        said = assigned[(names.get(name) or [name])[0]]
        param.requires_grad_(_trains(param, said))
        param.group = times(group_of(param), said.lr_mult, said.wd_mult)  # type: ignore[attr-defined]


def lines(params: Mapping[str, nn.Parameter]) -> list[str]:
    """Return lines on the frozen parameters and on the factors of a whole model.

    There are none if all parameters train and no factor differs from 1.
    """
    frozen = [name for name, param in params.items() if not param.requires_grad]
    out = []
    if frozen:
        every = sum(param.numel() for param in params.values())
        train = every - sum(params[name].numel() for name in frozen)
        out.append(
            f"{train:,} of {every:,} parameters train; {len(frozen)} of {len(params)} tensors are "
            f"frozen, such as {frozen[0]}"
        )
    groups: dict[tuple[float, float], list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            groups.setdefault(factors_of(group_of(param)), []).append(name)
    for (lr, wd), own in groups.items():
        if (lr, wd) == (1.0, 1.0):
            continue
        said = [f"{LR}={lr:g}"] * (lr != 1) + [f"{WD}={wd:g}"] * (wd != 1)
        count = sum(params[name].numel() for name in own)
        tensors = f"{len(own)} tensor{'s' * (len(own) > 1)}, {count:,} parameters"
        out.append(f"{' '.join(said)}: {tensors}, such as {own[0]}")
    return out
