# SPDX-License-Identifier: Apache-2.0
"""Break the layout, dtype or alignment of what a kernel reads by address, and rehearse each mutant.

    python tests/tools/rehearsal/layout_mutants.py [FIRST LAST]

A line each: found or NOT FOUND, the file, its change, what the rehearsal says. A mutant is found
where a finding names a line of the mutated file, or one that called it. The layouts are rehearsed
without a mutant first, and have no finding.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.rehearsal_mutations import copy_to, in_child, prepare

CP = "--context-parallel-size 2 --cp-comm-type "
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
WIDE = (
    "--hidden-size 256 --ffn-hidden-size 512 --kv-channels 128 --seq-length 128 "
    "--max-position-embeddings 128 --fp8-format hybrid --fp8-recipe "
)
HOST = "--device cpu --rehearse-device cpu"
BLOCKS, FUSED = "mpu/layers/attention/block_attention.py", "mpu/layers/fused.py"
RECIPE, SCALED = "mpu/layers/float8/recipe.py", "mpu/layers/float8/cuda.py"
NAMED = {RECIPE: SCALED}  # a format is chosen in one file and multiplied in another
LAST = "{0}.transpose(0, -1).contiguous().transpose(0, -1)"  # another order in memory
MUTANTS = [  # world, flags, file, a text, what takes its place
    (2, CP + "p2p", BLOCKS, "lse.contiguous()", "lse"),
    (2, CP + "all_gather", BLOCKS, "lse.contiguous()", "lse.contiguous().double()"),
    (2, CP + "a2a", "mpu/kernels/rms_norm.py", "y, inverse = torch.empty_like(x)",
     "y, inverse = x.new_empty(x.shape[::-1]).permute(2, 1, 0)"),
    (1, DOCUMENTS, "mpu/layers/packed_seq_params.py", "dtype=torch.int32", "dtype=torch.int64"),
    (1, DOCUMENTS, BLOCKS, "ends, longest = packed.cu_seqlens",
     "ends, longest = packed.cu_seqlens.repeat_interleave(2)[::2]"),
    (1, DOCUMENTS, BLOCKS, "q, k, v = q[0], k[0], v[0]",
     "q, k, v = q[0].mT.contiguous().mT, k[0], v[0]"),
    (1, "", "mpu/zero/norm.py", "torch.tensor(lengths, device=device)",
     "torch.tensor(lengths, device=device, dtype=torch.int32)"),
    (1, "", "mpu/kernels/swiglu.py", "width, dx = dy.shape[-1], torch.empty_like(x)",
     "width, dx = dy.shape[-1], x.new_empty(x.shape[::-1]).permute(2, 1, 0)"),
    (1, "", "mpu/kernels/rms_norm.py", "dtype=inverse.dtype", "dtype=h.dtype"),
    (1, "", "mpu/kernels/rope.py", "cos=cos, sin=sin,", "cos=cos, sin=sin.double(),"),
    (1, "", "mpu/kernels/rope.py", "cos=cos, sin=sin,", f"cos=cos, sin={LAST.format('sin')},"),
    (1, "", "mpu/kernels/cross_entropy.py", "        rows, labels, out, n,",
     "        rows, labels.int(), out, n,"),
    (1, WIDE + "blockwise", RECIPE, "return E4M3 if BLOCKS[scaling] else", "return"),
    (1, WIDE + "mxfp8 --rehearse-device b200", RECIPE, "return E4M3 if BLOCKS[scaling] else",
     "return"),
    (1, WIDE + "blockwise", SCALED, "(0, -squares.shape[1] % 4)", "(0, 1)"),
    (1, WIDE + "rowwise", SCALED, "return by_row if of_a", "return by_row.double() if of_a"),
    (1, WIDE + "tensorwise", SCALED, "return scale_in_row(rows)",
     "return scale_in_row(rows).bfloat16()"),
    (1, HOST, FUSED, "parts = torch.zeros((torch.get_num_threads(), h), dtype=kind)",
     "parts = torch.zeros((torch.get_num_threads(), h), dtype=torch.float64)"),
    (1, HOST, "mpu/layers/attention/core.py", "dtype=sums)", "dtype=q.dtype)"),
    (1, HOST, "mpu/layers/attention/core.py", "dy.contiguous(), dqkv",
     f"{LAST.format('dy')}, dqkv"),
    (1, HOST, FUSED, "grad, size = torch.empty_like(gate_up)",
     "grad, size = gate_up.new_empty(gate_up.shape[::-1]).permute(2, 1, 0)"),
]  # fmt: skip


def mutant(folder: Path, file: str, old: str, new: str) -> None:
    """Change one text of a copy."""
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, (file, old, text.count(old))
    (folder / file).write_text(text.replace(old, new))


def rehearse(world: int, flags: str, change: tuple[str, str, str] | None) -> object:
    """Return the findings of the last rank, or of what ended the rehearsal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        if change:
            mutant(folder, *change)
        return in_child(folder, world, flags, world - 1, False)[0]


def main(words: list[str]) -> int:
    """Try mutants first to last."""
    first, last = map(int, words or (0, len(MUTANTS)))
    prepare()
    some, lost = MUTANTS[first:last], 0
    for world, flags in dict.fromkeys((world, flags) for world, flags, *_ in some):
        found = rehearse(world, flags, None)
        lost += found != []
        print(f"layout {world} {flags}: {found}", flush=True)
    for world, flags, *change in some:
        found = rehearse(world, flags, (change[0], change[1], change[2]))
        every = found if isinstance(found, list) else []
        near = NAMED.get(change[0], change[0])
        here = [f for f in every if near in str([f["place"], f["also"], f["through"]])]
        lost += not here
        said = f"{here[0]['place']}: {here[0]['what']}" if here else str(found)
        print(f"{'found' if here else 'NOT FOUND':9} {change[0]} {change[2]!r} | {said[:300]}")
        sys.stdout.flush()
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
