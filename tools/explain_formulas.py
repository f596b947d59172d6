# SPDX-License-Identifier: Apache-2.0
"""Read the formulas of docs/parallelism.md and work them out for a run, for tools/explain.py.

The document is the only place where they stand. They are plain arithmetic, read by a small
evaluator that knows nothing else: no eval().
"""

import ast
import operator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mpu.zero.buckets import BLOCK
from training import estimate
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


def apply(config: Config, formulas: list[Formula]) -> list[Applied]:
    """Work out, for a run, the formulas whose condition holds."""
    names, out = symbols(config), []
    for row in formulas:
        if evaluate(row.condition, names):
            count = evaluate(row.count, names)
            out.append(Applied(row, count, evaluate(row.bytes, names | {"count": count})))
    return out


def add_up(parts: list[tuple[str, str, int, int]]) -> Totals:
    """Add (axis, verb, collectives, bytes) by axis and verb."""
    totals: Totals = {}
    for axis, verb, count, sent in parts:
        before = totals.get((axis, verb), (0, 0))
        totals[axis, verb] = (before[0] + count, before[1] + sent)
    return totals


def symbols(config: Config) -> dict[str, int]:
    """Return what the letters of the document stand for in this run."""
    m, p, batch = config.model, config.parallel, config.batch
    t, dp = p.tensor_model_parallel_size, p.data_parallel_size
    again = {None: 0, "uniform": m.num_layers, "block": p.recompute_num_layers}
    buckets, norms = bucket_lengths(config)
    return {
        "s": m.seq_length,
        "b": batch.micro_batch_size,
        "h": m.hidden_size,
        "L": m.num_layers,
        "R": again[p.recompute_method] or 0,
        "t": t,
        "D": dp,
        "m": batch.global_batch_size // (batch.micro_batch_size * dp),
        "sp": int(p.sequence_parallel and t > 1),
        "e": config.run.dtype.itemsize,
        "g": estimate.accumulate_bytes(config),
        "B": len(buckets) + bool(norms),
        "G": sum(buckets) + norms,
        "N": -(-norms // t) * t,
    }


def bucket_lengths(config: Config) -> tuple[list[int], int]:
    """Return the elements of each gradient bucket and of that of the norms (0: it has none)."""
    p, shapes = config.parallel, estimate.shapes(config)
    total = estimate.count(shapes)
    size = p.ddp_bucket_size or max(1 << 20, min(40_000_000, total // 8))
    partial = p.sequence_parallel and p.tensor_model_parallel_size > 1  # gradients of the norms
    lengths, norms, room = [], 0, 0
    for shape in reversed(shapes.values()):
        padded = -(-prod(shape) // BLOCK) * BLOCK
        if partial and len(shape) == 1:
            norms += padded
            continue
        if room <= 0:
            lengths.append(0)
            room = size
        lengths[-1] += padded
        room -= prod(shape)
    grain = BLOCK * p.data_parallel_size
    return [-(-n // grain) * grain for n in lengths], -(-norms // grain) * grain
