# SPDX-License-Identifier: Apache-2.0
"""Read the formulas of docs/parallelism.md and work them out for a run, for tools/explain.py.

The document is the only place where they stand. They are plain arithmetic, read by a small
evaluator that knows nothing else: no eval().
"""

import ast
import operator
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mpu.pipeline.layout import Stage
from mpu.zero.buckets import BLOCK
from training import batch_schedule, estimate, pipeline
from training.config import Config

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "parallelism.md"


class Formula(NamedTuple):
    """One row of the table: under `condition`, `count` collectives that send `bytes` in all."""

    what: str
    condition: str
    axis: str
    verb: str
    count: str
    bytes: str


def read_formulas(path: Path = DOCUMENT) -> list[Formula]:
    """Return the rows of the document's one table that has these columns.

    Raises ValueError naming the document where it has no such table.
    """
    rows, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip().strip("|").split("|")]
        inside = line.startswith("|") and (inside or tuple(cells) == Formula._fields)
        if inside and tuple(cells) != Formula._fields and set(line) - set("|-: "):
            rows.append(Formula(*cells))
    if not rows:
        columns = " | ".join(Formula._fields)
        raise ValueError(f"{path}: there is no table with the columns {columns}")
    return rows


_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Gt: operator.gt,
}


def evaluate(text: str, names: dict[str, int]) -> int:
    """Work out a formula: whole numbers, names, + - * //, a > b, not, and. Nothing else.

    Raises ValueError naming the formula and the part that is none of these.
    """

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=a, op=op, right=b) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(a), value(b))
            case ast.UnaryOp(op=op, operand=a) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(a))
            case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(a), value(b))
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(value(part) for part in parts)
        raise ValueError(f"the formula {text!r}: {ast.unparse(node)!r} is not allowed in one")

    return value(ast.parse(text, mode="eval"))


class Applied(NamedTuple):
    """A row that holds in a run, worked out for it."""

    row: Formula
    count: int
    sent: int


Totals = dict[tuple[str, str], tuple[int, int]]  # (axis, verb) -> collectives, bytes sent


def apply(config: Config, formulas: list[Formula], pp_rank: int = 0) -> list[Applied]:
    """Work out, for a pipeline rank of a run, the formulas that hold and come to anything."""
    names, out = symbols(config, pp_rank), []
    for row in formulas:
        count = evaluate(row.count, names) if evaluate(row.condition, names) else 0
        if count:
            out.append(Applied(row, count, evaluate(row.bytes, names | {"count": count})))
    return out


def add_up(parts: list[tuple[str, str, int, int]]) -> Totals:
    """Add (axis, verb, collectives, bytes) by axis and verb."""
    totals: Totals = {}
    for axis, verb, count, sent in parts:
        before = totals.get((axis, verb), (0, 0))
        totals[axis, verb] = (before[0] + count, before[1] + sent)
    return totals


def symbols(config: Config, pp_rank: int = 0) -> dict[str, int]:
    """Return what the letters of the document stand for on a pipeline rank of this run."""
    m, p, batch = config.model, config.parallel, config.batch
    t, dp, pp = (
        p.tensor_model_parallel_size,
        p.data_parallel_size,
        p.pipeline_model_parallel_size,
    )
    stages = pipeline.rank_stages(config, pp_rank)
    schedule = pipeline.schedule_of(config, batch_schedule.micro_batches(config, 0))
    own = [schedule.stage(pp_rank, chunk) for chunk in range(schedule.chunks)]
    buckets = bucket_lengths(config, pp_rank)
    shapes, whole = estimate.shapes(config, stages=stages), estimate.shapes(config)
    sp = int(p.sequence_parallel and t > 1)
    return {
        "s": m.seq_length,
        "b": batch.micro_batch_size,
        "h": m.hidden_size,
        "L": sum(len(stage.layers) for stage in stages),
        "R": sum(pipeline.recomputed_layers(config, stage) for stage in stages),
        "E": int(any(stage.embedding for stage in stages)),
        "H": int(any(stage.loss for stage in stages)),
        "W": int(schedule.split),
        "t": t,
        "D": dp,
        "p": pp,
        "m": schedule.micro_batches,
        "A": sum(stage < schedule.stages - 1 and stage + 1 not in own for stage in own),
        "C": sum(stage > 0 and stage - 1 not in own for stage in own),
        "sp": sp,
        "c": t if sp else 1,
        "e": config.run.dtype.itemsize,
        "g": estimate.accumulate_bytes(config),
        "B": sum(map(len, buckets.values())),
        "G": sum(sum(lengths) for lengths in buckets.values()),
        "N": -(-sum(buckets["tp"]) // t) * t,
        "T": sum(buckets["ends"]),
        "P": len(shapes.keys() & whole.keys()),
        "Q": len(whole),
    }


def bucket_lengths(config: Config, pp_rank: int = 0) -> dict[str, list[int]]:
    """Return the numbers in each gradient bucket of a pipeline rank.

    Under "" those that leave on their own; under the name of an axis the one that is first summed
    over it: tp, the norms under SP; ends, tied embeddings.
    """
    p, stages = config.parallel, pipeline.rank_stages(config, pp_rank)
    shapes = estimate.shapes(config, stages=stages)
    ends = {"embedding.weight", "head.weight"} & shapes.keys()
    tied = not config.model.untie_embeddings_and_output_weights
    apart = tied and any(s.embedding for s in stages) != any(s.loss for s in stages)
    partial = p.sequence_parallel and p.tensor_model_parallel_size > 1  # gradients of the norms
    size = p.ddp_bucket_size or max(1 << 20, min(40_000_000, estimate.count(shapes) // 8))
    lengths: dict[str, list[int]] = {"": [], "tp": [], "ends": []}
    room, before = 0, -1
    for name in sorted(list(shapes)[::-1], key=lambda name: -chunk_of(name, stages)):
        shape, chunk = shapes[name], chunk_of(name, stages)
        padded = -(-prod(shape) // BLOCK) * BLOCK
        if partial and len(shape) == 1:
            lengths["tp"] = [sum(lengths["tp"]) + padded]
        elif apart and name in ends:
            lengths["ends"] = [padded]
        else:
            if room <= 0 or chunk != before:
                lengths[""].append(0)
                room, before = size, chunk
            lengths[""][-1] += padded
            room -= prod(shape)
    grain = BLOCK * p.data_parallel_size
    return {axis: [-(-n // grain) * grain for n in found] for axis, found in lengths.items()}


def chunk_of(name: str, stages: Sequence[Stage]) -> int:
    """Return the chunk, among a rank's stages, that a parameter belongs to."""
    part, *rest = name.split(".")
    for chunk, stage in enumerate(stages):
        layer = part == "layers" and int(rest[0]) in stage.layers
        if {"embedding": stage.embedding, "layers": layer}.get(part, stage.loss):
            return chunk
    raise ValueError(f"no stage of this rank holds {name}")
