# SPDX-License-Identifier: Apache-2.0
"""Break what a kernel or a library asks of its callers, one place a mutant, and see who tells.

    python tests/forecast/rehearsal/layout_mutants.py [FIRST LAST]

Layout, dtype and alignment of what is read by address are for the rehearsal to find: a finding
names a line of the mutated file, or one that called it. The environment of a run (ENVIRONMENT) is
for a test to find. A line each: found or NOT FOUND, the file and line of the change, and what the
finding or the test says. The layouts are rehearsed without a mutant first, and have no finding.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.rehearsal_faults import ROOT, copy_to, in_child, prepare

CP = "--context-parallel-size 2 --cp-comm-type "
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
WIDE = (
    "--hidden-size 256 --ffn-hidden-size 512 --kv-channels 128 --seq-length 128 "
    "--max-position-embeddings 128 --fp8-format hybrid --fp8-recipe "
)
HOST = "--device cpu --rehearse-device cpu"
NORM = "mpu/kernels/rms_norm.py"
BLOCKS, FUSED = "mpu/layers/attention/block_attention.py", "mpu/layers/fused.py"
TORCHS = "mpu/torch_private.py"  # calls of torch's own kernels
RECIPE, SCALED = "mpu/layers/float8/recipe.py", "mpu/layers/float8/cuda.py"
# a format is chosen in one file and multiplied in another; calls count as of their callers
NAMED = {RECIPE: SCALED, TORCHS: BLOCKS}
LAST = "{0}.transpose(0, -1).contiguous().transpose(0, -1)"  # another order in memory
MUTANTS = [  # world, flags, file, a text, what takes its place
    (2, CP + "p2p", TORCHS, "lse.contiguous()", "lse"),
    (2, CP + "all_gather", TORCHS, "lse.contiguous()", "lse.contiguous().double()"),
    (2, CP + "a2a", "mpu/kernels/rms_norm.py", "y, inverse = torch.empty_like(x)",
     "y, inverse = x.new_empty(x.shape[::-1]).permute(2, 1, 0)"),
    (1, DOCUMENTS, "mpu/layers/packed_seq_params.py", "dtype=torch.int32", "dtype=torch.int64"),
    (1, DOCUMENTS, BLOCKS, "ends, longest = packed.cu_seqlens",
     "ends, longest = packed.cu_seqlens.repeat_interleave(2)[::2]"),
    (1, DOCUMENTS, BLOCKS, "q, k, v = q[0], k[0], v[0]",
     "q, k, v = q[0].mT.contiguous().mT, k[0], v[0]"),
    (1, "", "mpu/zero/norm.py", "torch.tensor(lengths, dtype=torch.int64, device=home)",
     "torch.tensor(lengths, dtype=torch.int32, device=home)"),
    (1, "", "mpu/kernels/swiglu.py", "width, dx = dy.shape[-1], torch.empty_like(x)",
     "width, dx = dy.shape[-1], x.new_empty(x.shape[::-1]).permute(2, 1, 0)"),
    (1, "", "mpu/kernels/rms_norm.py", "dtype=inverse.dtype", "dtype=h.dtype"),
    (1, "", "mpu/kernels/rope.py", "cos=cos, sin=sin,", "cos=cos, sin=sin.double(),"),
    (1, "", "mpu/kernels/rope.py", "cos=cos, sin=sin,", f"cos=cos, sin={LAST.format('sin')},"),
    (1, "", "mpu/kernels/cross_entropy.py", "(n,), rows, labels, out, n,",
     "(n,), rows, labels.int(), out, n,"),
    (1, WIDE + "blockwise", RECIPE, "return E4M3 if BLOCKS[scaling] else", "return"),
    (1, WIDE + "mxfp8 --rehearse-device b200", RECIPE, "return E4M3 if BLOCKS[scaling] else",
     "return"),
    (1, WIDE + "blockwise", SCALED, "(0, -squares.shape[1] % 4)", "(0, 1)"),
    (1, WIDE + "rowwise", SCALED, "return by_row if of_a", "return by_row.double() if of_a"),
    (1, WIDE + "tensorwise", SCALED, "noted[:1]).view(1)", "noted[:1]).view(1).bfloat16()"),
    (1, HOST, FUSED, "parts = torch.zeros((torch.get_num_threads(), h), dtype=kind,",
     "parts = torch.zeros((torch.get_num_threads(), h), dtype=torch.float64,"),
    (1, HOST, "mpu/layers/attention/core.py", "dtype=sums)", "dtype=q.dtype)"),
    (1, HOST, "mpu/layers/attention/core.py", "dy.contiguous(), dqkv",
     f"{LAST.format('dy')}, dqkv"),
    (1, HOST, FUSED, "grad, size = torch.empty_like(gate_up)",
     "grad, size = gate_up.new_empty(gate_up.shape[::-1]).permute(2, 1, 0)"),
    (1, "", NORM, "h = x if added is None else torch.empty_like(x)",
     "h = x if added is None else torch.empty_like(x, dtype=torch.float32)"),
    (1, "", NORM, "x.new_empty((*x.shape[:-1], 1), dtype=wide)", "x.new_empty((*x.shape[:-1], 1))"),
    (1, "", NORM, "dx, parts = torch.empty_like(h)",
     "dx, parts = h.new_empty(h.shape[::-1]).permute(2, 1, 0)"),
    (1, "", NORM, "inverse=inverse, dy=dy, dh=dh,", "inverse=inverse, dy=dy.float(), dh=dh,"),
    (1, "", NORM, "parts=parts, main=main,",
     "parts=parts.repeat_interleave(2, 1)[:, ::2], main=main,"),
    (1, "", "mpu/kernels/swiglu.py", "y = x.new_empty((*x.shape[:-1], width))",
     "y = x.new_empty((*x.shape[:-1], width), dtype=torch.float32)"),
    (1, "", "mpu/kernels/swiglu.py", "x=x, dy=dy, dx=dx",
     "x=x, dy=dy.repeat_interleave(2, -1)[..., ::2], dx=dx"),
    (1, "", "mpu/kernels/rope.py", "q=q, k=k, v=v, out=out,",
     "q=q, k=k.mT.contiguous().mT, v=v, out=out,"),
    (1, "", "mpu/kernels/rope.py", "cos=cos, sin=sin,", "cos=cos.half(), sin=sin.half(),"),
    (1, "", "mpu/kernels/cross_entropy.py", "BLOCK)), rows, labels, log_sum, weight, width,",
     "BLOCK)), rows, labels, log_sum.double(), weight, width,"),
    (1, DOCUMENTS, BLOCKS, "q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d]",
     "q, k, v = (x.transpose(1, 2) for x in (q, k, v.mT.contiguous().mT))"),
    (1, WIDE + "rowwise", SCALED, "return by_row if of_a else by_row.t()",
     "return by_row[:1] if of_a else by_row.t()"),
    (1, WIDE + "mxfp8 --rehearse-device b200", SCALED,
     "tiles.reshape(-1).view(torch.float8_e8m0fnu)",
     "tiles.reshape(-1).view(torch.float8_e8m0fnu).float()"),
    (1, WIDE + "blockwise", "mpu/kernels/float8.py",
     "*sizes, out, wide, out.shape[1], blocks, FROM_ROWS",
     "*sizes, out, wide if wide is None else wide.contiguous(), out.shape[1], blocks, FROM_ROWS"),
    (1, WIDE + "rowwise", SCALED, "codes(a.rows, block, a.form), codes(b.rows",
     "F.pad(codes(a.rows, block, a.form).view(torch.uint8), (0, 1)).view(torch.float8_e4m3fn)"
     "[:, :-1], codes(b.rows"),
    (1, HOST, "mpu/layers/attention/core.py", "y, lse = q.new_empty(s, b, a * d)",
     "y, lse = q.new_empty(s, b, a * d, dtype=torch.float64)"),
    (1, HOST, FUSED, "y, r = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=kind)",
     "y, r = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=x.dtype)"),
    (1, HOST, FUSED, "y = gate_up.new_empty((*gate_up.shape[:-1], size))",
     "y = gate_up.new_empty((*gate_up.shape[:-1], size), dtype=torch.float64)"),
]  # fmt: skip
LAUNCH = "tests/mpu/test_launch.py"
ENVIRONMENT = [  # the test that is to fail, file, a text, what takes its place
    (LAUNCH, "mpu/launch.py", '"expandable_segments:True"', '"expandable_segments:False"'),
    ("tests/mpu/layers/float8/test_cuda.py", SCALED, "if low <= found <= high",
     "if low <= found"),
    ("tests/mpu/layers/attention/test_backends.py", "mpu/layers/attention/backends.py",
     "return card.cudnn > CUDNN_PREFERRED", "return card.cudnn >= CUDNN_OLDEST"),
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
        return in_child(folder, world, flags, world - 1)


def line_of(file: str, text: str) -> str:
    """Return file:line of a text of the product."""
    before = (ROOT / file).read_text(encoding="utf-8").partition(text)[0]
    return f"{file}:{before.count(chr(10)) + 1}"


def fails(test: str, change: tuple[str, str, str]) -> str:
    """Return what a test says of a mutant where it fails, else ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        mutant(folder, *change)
        words = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
        env = {**os.environ, "PYTHONPATH": name}
        done = subprocess.run([*words, test], cwd=name, env=env, capture_output=True, text=True)
    said = [x for x in done.stdout.splitlines() if ": " in x and name in x]
    return said[0].replace(name, "") if done.returncode == 1 and said else ""


def main(words: list[str]) -> int:
    """Try mutants first to last, those of the environment after the others."""
    first, last = map(int, words or (0, len(MUTANTS) + len(ENVIRONMENT)))
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
        place = line_of(change[0], change[1])
        print(f"{'found' if here else 'NOT FOUND':9} {place} {change[2]!r} | {said[:300]}")
        sys.stdout.flush()
    of_layouts = len(MUTANTS)
    tests = ENVIRONMENT[max(0, first - of_layouts) : max(0, last - of_layouts)]
    for test, file, old, new in tests:
        said = fails(test, (file, old, new))
        lost += not said
        print(f"{'found' if said else 'NOT FOUND':9} {line_of(file, old)} {new!r} | {said[:300]}")
        sys.stdout.flush()
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
