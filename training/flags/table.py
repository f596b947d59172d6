# SPDX-License-Identifier: Apache-2.0
"""Classify every flag: live (it does something), checked (accepted as it is), refused or removed.

A live flag is a field of training/config.py, which says its rule, unit, help and default.
OTHER_NAMES has the few that set a field of another name. A test freezes the list of live flags.
Megatron-LM's other flags are in `training.flags.megatron`, so that none is silently ignored.
`training.flags.parse` builds argparse from all of them.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from training.config import SECTIONS, SETTINGS, UsageError
from training.data.tokenizer import OTHER_TYPE
from training.flags.megatron import ACCEPTED, REFUSED
from training.setting import FILE, SWITCH, TEXT, TEXTS, Rule, Setting, one_of

# Live flags that set a field of another name: parse._assemble says which.
OTHER_NAMES = {
    "parallel.cross_entropy_fusion_impl": Setting(
        "linear is --fused-linear-cross-entropy; native and te are the same hand-written loss",
        "default: native; with --cross-entropy-loss-fusion",
        one_of("native", "te", "linear"),
    ),
    "parallel.use_megatron_fsdp": Setting(
        "let --data-parallel-sharding-strategy give the --zero-stage",
        "off: left out",
        SWITCH,
    ),
    "parallel.data_parallel_sharding_strategy": Setting(
        "another name of --zero-stage 0, 1, 2, 3",
        "default: no_shard; with --use-megatron-fsdp only",
        one_of("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    "data.data_args_path": Setting(
        "file that holds what --data-path would: a shard list, by lines or spaces, # begins a "
        "remark",
        "file; off: left out",
        FILE,
    ),
    "data.vocab_file": Setting(
        "vocab.json: ids by token",
        "file; off: left out, with GPT2BPETokenizer only",
        FILE,
    ),
    "run.bf16": Setting(
        "weights and activations in bfloat16, fp32 masters and gradients",
        "off: left out, fp32",
        SWITCH,
    ),
    "run.fp64": Setting(
        "everything in double precision, for tests of exactness (ours, not Megatron's)",
        "off: left out, fp32",
        SWITCH,
    ),
    "run.no_check_for_nan_in_loss_and_grad": Setting(
        "the same as --on-nan skip",
        "off: left out, stop",
        SWITCH,
    ),
}
OTHERS = {  # what to write for a value that other programs have
    "--tokenizer-type": OTHER_TYPE,
}
REMOVED = {  # flags that this program had, and what to do instead
    "--checksum-messages": "TCP checks what it carries, and --check-replicas compares the results; "
    "leave it out",
    "--tp-comm-overlap-cache": "a checkpoint records what --tp-comm-overlap auto chose; leave it "
    "out, or name a method for the same bits in every run",
    "--fp8-auto": "--fp8-format puts every projection in float8; leave it out, or leave layers in "
    "bf16 by --first-last-layers-bf16",
}
LIVE_KIND, CHECKED_KIND, REFUSED_KIND, REMOVED_KIND = "live", "checked", "refused", "removed"


@dataclass(frozen=True)
class Flag:
    """One flag; a live one has a `group`, its section of Config, a checked one `allowed` values."""

    name: str
    kind: str
    text: str  # what it does, if live; else why it is accepted, or is not
    rule: Rule = SWITCH
    group: str = ""
    unit: str = ""
    allowed: tuple[str, ...] = ()  # empty: any
    printed: str = ""  # checked: print `text` with this value, or with any ("*")

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def usable(self) -> bool:
        """Return whether a command line may have the flag."""
        return self.kind in (LIVE_KIND, CHECKED_KIND)

    @property
    def stands_for(self) -> list[str]:
        """Return the live flag that this one is another name of, and its value if it has none."""
        return self.text.removeprefix("= ").split() if self.text.startswith("= ") else []

    def read(self, given: Any) -> Any:
        """Return the value of a text, or of several. Raises UsageError: flag, text and rule."""
        if self.rule.nargs == 0:
            return True
        return tuple(map(self._read, given)) if self.rule.nargs == "*" else self._read(given)

    def _read(self, text: str) -> Any:
        if type(self.rule) is Rule and self.rule.nargs is None and not text.strip():
            raise UsageError(f"{self.name} is empty: leave the flag out instead")
        try:
            return self.rule.read(text)
        except ValueError as error:
            other = f"; {OTHERS[self.name]}" if self.name in OTHERS else ""
            raise UsageError(f"{self.name} {text}: {error}{other}") from None


@cache
def known_flags() -> dict[str, Flag]:
    """Return every known flag by its name."""
    flags = list[Flag]()
    settings = (SETTINGS | OTHER_NAMES).items()
    for group in SECTIONS:
        for dotted, s in settings:
            if dotted.startswith(f"{group}."):
                name = "--" + dotted.removeprefix(f"{group}.").replace("_", "-")
                flags.append(Flag(name, LIVE_KIND, s.help, s.rule, group, s.unit))
    rules = {"switch": SWITCH, "value": TEXT, "values": TEXTS}
    for names, rule, allowed, text in ACCEPTED:
        values = () if allowed == "any" else tuple(allowed.split(","))
        printed = ""
        if text.startswith("!"):
            mark, _, text = text.partition(" ")
            printed = mark[1:] or "*"
        for name in names.split():
            flag = Flag(name, CHECKED_KIND, text, rules[rule], allowed=values, printed=printed)
            flags.append(flag)
    flags += [Flag(name, REFUSED_KIND, why) for name, why in REFUSED.items()]
    flags += [Flag(name, REMOVED_KIND, why) for name, why in REMOVED.items()]
    out = {flag.name: flag for flag in flags}
    assert len(out) == len(flags), "a flag is twice in the table"
    return out


def live() -> list[Flag]:
    """Return the flags that do something."""
    return [flag for flag in known_flags().values() if flag.kind == LIVE_KIND]
