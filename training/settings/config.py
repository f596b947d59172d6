# SPDX-License-Identifier: Apache-2.0
"""Define Config, which holds the settings of a run: parsed once, then read-only.

Its sections and their fields are the table of arguments.py. `training.flags.parse.parse` makes a
`Config` from a command line and checks it. Nothing here uses argparse, files or ranks.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from training.settings.arguments import (
    SETTINGS,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    Float8Config,
    GpuConfig,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    RehearseConfig,
    RunConfig,
)


class UsageError(ValueError):
    """A mistake in the command line; the message names the flag, its value and the rule."""


# Sections and settings that determine a run's results, except those with `changes_numbers=False`.
# Layout, output paths and logging do not.
_MATHEMATICS = ("model", "moe", "batch", "optimizer", "data", "run.seed", "run.dtype")


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own training data (--data-stages).

    settings: (field of ModelConfig, value) for each field that a stage may set. first_sample,
    first_token: the samples and tokens consumed before it begins. It begins with the first step
    before which start_tokens are consumed.
    """

    name: str
    start_tokens: int
    train_data_path: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]
    first_sample: int = 0
    first_token: int = 0

    @property
    def length(self) -> int:
        """Return its sequence length."""
        return int(dict(self.settings)["seq_length"])


@dataclass(frozen=True)
class Config:
    """Every setting of a run.

    extra: a fork's own settings. stages: those of --data-stages. notes: lines to print. given: the
    names of the flags on the command line. command_line: its words.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    rehearse: RehearseConfig = field(default_factory=RehearseConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    extra: tuple[tuple[str, Any], ...] = ()
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    given: tuple[str, ...] = field(default=(), compare=False)
    command_line: tuple[str, ...] = field(default=(), compare=False)

    @property
    def expert_model_parallel_size(self) -> int:
        """Return the number of ranks of the axis ep, 0 for a model without experts.

        A fork's own flag of this name may set it (docs/forking.md).
        """
        own = self.parallel.expert_model_parallel_size if self.moe.experts else 0
        return int(dict(self.extra).get("expert_model_parallel_size", own))

    def flat(self) -> dict[str, Any]:
        """Return {dotted name ("model.hidden_size"): value} of the settings, in JSON's types.

        Settings that older checkpoints lack are left out at their defaults.
        """
        out: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "extra":
                out |= {f"extra.{k}": v for k, v in value}
            elif part.name == "stages":
                out |= {"data.stages": [asdict(each) for each in value]} if value else {}
            elif part.name not in ("notes", "given", "command_line"):
                out |= {f"{part.name}.{k}": v for k, v in asdict(value).items()}
        older = {name: row.default for name, row in SETTINGS.items() if row.added}
        return {k: _plain(v) for k, v in out.items() if k not in older or v != older[k]}

    def digest(self) -> str:
        """Return the SHA-256 of the settings that determine the run's results, in hex."""
        starts = tuple(m if "." in m else f"{m}." for m in _MATHEMATICS)
        flat = self.flat()
        without = {name for name, row in SETTINGS.items() if not row.changes_numbers}
        without |= {name for name, row in SETTINGS.items() if _idle(row, flat)}
        taken = {k: v for k, v in flat.items() if k.startswith(starts) and k not in without}
        return hashlib.sha256(_json(taken).encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return every setting that all ranks of a run must share, as JSON with sorted keys."""
        local = {name for name, row in SETTINGS.items() if row.local}
        return _json({k: v for k, v in self.flat().items() if k not in local})

    def with_vocab(self, tokenizer_vocab: int) -> "Config":
        """Return the config for a tokenizer of that many entries; a larger --vocab-size is kept.

        Raises UsageError if the tokenizer has more entries than --vocab-size allows.
        """
        stated = self.model.vocab_size or tokenizer_vocab
        if stated < tokenizer_vocab:
            raise UsageError(
                f"--vocab-size {stated} is smaller than the tokenizer, which has {tokenizer_vocab} "
                "entries: give at least that many, or leave --vocab-size out"
            )
        return replace(self, model=replace(self.model, vocab_size=stated))


# {section: its dataclass}
SECTIONS: dict[str, Any] = {p.name: p.type for p in fields(Config) if is_dataclass(p.type)}


def _idle(row: Any, flat: dict[str, Any]) -> bool:
    """Return whether a setting that older checkpoints lack has no effect."""
    if not row.added or not row.needs_value:
        return False
    field = row.needs[0].removeprefix("--").replace("-", "_")
    return all(v != row.needs_value for k, v in flat.items() if k.rpartition(".")[2] == field)


def _plain(value: Any) -> Any:
    """Return dtypes as names and tuples as lists, so that JSON keeps the value unchanged."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
