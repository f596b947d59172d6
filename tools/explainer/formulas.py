# SPDX-License-Identifier: Apache-2.0
"""Read the formulas of docs/parallelism.md and evaluate them for a run, for tools/explain.py.

The formulas are in the document only. They are plain arithmetic, read by a small evaluator that
knows nothing else: no eval().
"""

import ast
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from estimate import buffers, rank_memory
from estimate.context_parallel import comm_type_of
from estimate.model_profile import rank_parameters
from estimate.stages import rank_stages
from mpu.layers.float8.rows import BLOCKS, RECIPES, row_bytes
from mpu.pipeline.layout import Stage
from mpu.zero.layout import block_of
from pretrain_llama import model_provider
from training import batch_size
from training.config import Config
from training.float8 import layers_in_bf16
from training.schedule import recomputed_layers, schedule_of

LETTERS = {"p2p": "r", "all_gather": "g", "a2a": "h", "a2a+p2p": "m"}  # round, gather, heads, mixed
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"


class Formula(NamedTuple):
    """One row of the table: under `condition`, `count` collectives send `bytes` in all."""

    what: str
    condition: str
    axis: str
    verb: str
    count: str  # type: ignore[assignment]  # a column's name; hides tuple.count
    bytes: str


def read_formulas(path: Path = DOCUMENT) -> list[Formula]:
    """Return the rows of the document's one table with the columns of Formula.

    Raises ValueError naming the document if it has no such table.
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
    """Return a formula's value: whole numbers, names, + - * //, a > b, not, and. Nothing else.

    Raises ValueError naming the formula and the part that is not allowed.
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
    """A row whose condition holds in a run, evaluated for it; sent: bytes."""

    row: Formula
    count: int  # type: ignore[assignment]  # as in Formula
    sent: int


Totals = dict[tuple[str, str], tuple[int, int]]  # (axis, verb) -> collectives, bytes sent


def apply(config: Config, formulas: list[Formula], pp_rank: int = 0) -> list[Applied]:
    """Evaluate the formulas for a pipeline rank of a run; leave out those whose count is 0."""
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
    """Return the values of the document's letters on a pipeline rank of this run."""
    m, p, batch = config.model, config.parallel, config.batch
    t, dp, pp = (
        p.tensor_model_parallel_size,
        p.gradient_ranks,
        p.pipeline_model_parallel_size,
    )
    stages = rank_stages(config, model_provider, pp_rank)
    schedule = schedule_of(config, batch_size.micro_batches(config, 0))
    own = [schedule.stage(pp_rank, chunk) for chunk in range(schedule.chunks)]
    held = rank_memory.parameters(config, model_provider, pp_rank)
    held = {name: param for name, param in held.items() if param.entry.cut == "tp"}
    every = [Stage(0, config.model.num_layers, embedding=True, loss=True)]
    parameters = rank_parameters(config, model_provider, every, 0)
    sp = int(p.sequence_parallel and t > 1)
    f = config.float8
    left_out = layers_in_bf16(config) if f.fp8_format else range(m.num_layers)
    again = [stage.layers[: recomputed_layers(config, stage)] for stage in stages]
    waits = schedule.micro_batches if schedule.split else schedule.deferred
    return {
        "s": m.seq_length // p.context_parallel_size,
        "b": batch.micro_batch_size,
        "h": m.hidden_size,
        "L": sum(len(stage.layers) for stage in stages),
        "R": sum(recomputed_layers(config, stage) for stage in stages),
        "E": int(any(stage.embedding for stage in stages)),
        "H": int(any(stage.loss for stage in stages)),
        "W": int(schedule.split),
        "u": waits * p.fused_linear_cross_entropy,
        "t": t,
        "D": dp,
        "p": pp,
        "m": schedule.micro_batches,
        "A": sum(stage < schedule.stages - 1 and stage + 1 not in own for stage in own),
        "C": sum(stage > 0 and stage - 1 not in own for stage in own),
        "sp": sp,
        "c": t if sp else 1,
        "ff": m.ffn_hidden_size // t,
        "d": m.kv_channels,
        "n": max(1, t // m.num_query_groups),
        "V": sum(i not in left_out for stage in stages for i in stage.layers),
        "a": sum(i not in left_out for layers in again for i in layers),
        "r": row_bytes(m.hidden_size, BLOCKS[RECIPES[f.fp8_recipe]]) if f.fp8_recipe else 0,
        "y": int(f.fp8_wgrad_bf16),
        "j": int(f.fp8_recipe == "tensorwise"),
        "k": int(f.fp8_recipe == "rowwise"),
        "dl": int(f.fp8_recipe == "delayed"),
        "e": config.run.dtype.itemsize,
        "g": rank_memory.accumulate_bytes(config),
        "q": rank_memory.gradient_bytes(config),
        "P": len(held.keys() & parameters.keys()),
        "Q": len(parameters),
        **_context_letters(config, stages),
        **_buckets(config, pp_rank),
    }


def _context_letters(config: Config, stages: Sequence[Stage]) -> dict[str, int]:
    """Return the letters for what context-parallel ranks send, of a rank that has these stages.

    Forwards of a layer's attention count twice where backward runs it again.
    """
    m, p = config.model, config.parallel
    cp, (near, far) = p.context_parallel_size, p.hierarchical_context_parallel_sizes or (1, 1)
    heads = m.num_attention_heads // p.tensor_model_parallel_size
    groups = max(1, m.num_query_groups // p.tensor_model_parallel_size)
    out = {
        "cp": cp,
        "near": near,
        "far": far,
        "kv": 2 * groups * m.kv_channels,
        "kvm": 2 * max(1, groups // near) * m.kv_channels,
        "qo": heads * m.kv_channels,
        "kvh": 2 * max(groups, cp) * m.kv_channels,
        "kvn": 2 * max(groups, near) * m.kv_channels,
    }
    for letter in LETTERS.values():
        out |= {f"{letter}F": 0, f"{letter}B": 0}
    for stage in stages:
        full = stage.layers[: recomputed_layers(config, stage)]
        for layer in stage.layers if cp > 1 else ():
            letter = LETTERS[comm_type_of(config, layer)]
            again = layer in full or p.recompute_granularity == "selective"
            out[f"{letter}F"] += 1 + again
            out[f"{letter}B"] += 1
    return out


def _buckets(config: Config, pp_rank: int) -> dict[str, int]:
    """Return the letters for buckets, and for how the data-parallel ranks share them."""
    p, t = config.parallel, config.parallel.tensor_model_parallel_size
    copies = p.num_distributed_optimizer_instances
    ranks = p.gradient_ranks // copies
    level = p.zero if ranks > 1 else 0
    flats = rank_memory.flats(config, model_provider, pp_rank)
    flats = [flat for flat in flats if flat.sharing.cut == "tp"]  # a Llama has no others
    apart = {flat.axes[0]: flat.length for flat in flats if flat.axes}
    whole = [flat.length for flat in flats if flat.whole]
    tied = buffers.both_ends(config, model_provider, pp_rank)
    shared = [
        (flat.length, {name for name, *_ in flat.params})
        for flat in flats
        if not flat.axes and not flat.whole
    ]
    layers = [n for n, names in shared if any(map(block_of, names))]
    again = [n for n, names in shared if names & {*tied}]
    others = [n for n, names in shared if not any(map(block_of, names)) and not names & {*tied}]
    alone, ahead = others if again else [], int(p.overlap_param_gather)
    group = p.recompute_num_layers if p.recompute_method == "uniform" else 1
    full, rest = divmod(len(layers), group or 1)
    groups = [group or 1] * full + [rest] * (rest > 0)
    several = [n for n in groups if n > 1]
    blocks = len(flats) - len(apart) - len(whole)
    return {
        "Z": level,
        "S": ranks,
        "i": copies,
        "w": 2 if p.grad_reduce_in_bf16 else rank_memory.gradient_bytes(config),
        "M": batch_size.micro_batches(config, 0) if p.zero_reduce_each_microbatch else 1,
        "B": len(flats),
        "G": sum(flat.length for flat in flats),
        "x": len(apart),
        "f": len(whole),
        "l": sum(whole),
        "z": int(any(flat.scales for flat in flats)),
        "v": sum(flat.length for flat in flats if flat.scales),
        "o": sum(flat.scales for flat in flats),
        "K": sum(apart.values()),
        "N": -(-apart.get("tp", 0) // t) * t,
        "T": apart.get("embd", 0),
        "O": ahead,
        "F": int(p.pipeline_model_parallel_size > 1 or (ahead and blocks == 2)),
        "J": layers[0] if layers else 0,
        "I": sum(again),
        "Y": sum(alone),
        "X": sum(several) - len(several),
        "U": len(several) + (groups[-1:] == [1] and not alone),
    }
