# SPDX-License-Identifier: Apache-2.0
"""The same Llama in torch's own stack, in the same hour: benchmarks/peers/native.py.

    peer-eager, peer-compiled      one GPU: autocast to bf16, fp32 weights, fused AdamW
    peer-fsdp2, peer-tp            all GPUs: FSDP2; tensor and sequence parallelism; both compiled

The tokens of a step, the sizes and the clipping are those of the rows it is compared with (step-6
and run-bf16; several-zero-3 and several-tp-ring).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.row import ROOT, Row
from tests.gpu.several import count
from tests.gpu.steps import MICRO_BATCHES

SCRIPT = ROOT / "benchmarks" / "peers" / "native.py"
# name: whether it takes all GPUs, and flags; "{n}": the number of them
PEERS = {
    "eager": (False, ""),
    "compiled": (False, "--compile"),
    "fsdp2": (True, "--compile --dp-shard {n}"),
    "tp": (True, "--compile --tp {n}"),
}


def peer(row: Row) -> None:
    """Run the peer; write its tokens a second and its memory."""
    z, (every, words) = row.sizes, PEERS[row.name.removeprefix("peer-")]
    n = count(row) if every else 1
    batches, layers = (16, 8) if every else (MICRO_BATCHES, 6)
    if row.tiny:  # one process compiles; of several that would take a CPU minutes
        batches, layers, words = MICRO_BATCHES, 2, words.replace("--compile ", "")
    given = f"""
        --size tiny --dim {z.hidden} --layers {layers} --heads {z.heads} --kv-heads {z.groups}
        --ffn {z.ffn} --vocab {z.vocab} --seq {z.seq} --micro-batch 1 --microbatches {batches}
        --accum --dtype bf16 --gqa native --clip 1.0 --device {row.device.type}
        --threads {0 if row.cuda else 1} --steps {3 if row.tiny else 14}
        --warmup {1 if row.tiny else 5} {words.format(n=n)}
    """.split()
    command = [sys.executable]
    if n > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        with out.open("w") as file:
            done = subprocess.run(
                [*command, str(SCRIPT), *given], cwd=ROOT, stdout=file, check=False
            )
        text = out.read_text()
        sys.stdout.write(text[-3000:])
        found = [line[5:] for line in text.splitlines() if line.startswith("JSON ")]
    if done.returncode or not found:
        raise RuntimeError(f"the peer ended with {done.returncode}")
    said = json.loads(found[-1])
    row.say(
        "the peer", seconds=said["step_s"], tokens_per_second=said["tok_s"], ranks=n,
        peak_bytes=said["peak_bytes"], loss=said["final_loss"], flags=" ".join(given),
    )  # fmt: skip
