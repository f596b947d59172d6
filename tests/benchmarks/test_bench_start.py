# SPDX-License-Identifier: Apache-2.0
"""What a rank does at its start: no module that it does not need, its share of the weights."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.bench_start import MODEL, TP, WORLD, corpus, saved, start

ROOT = Path(__file__).resolve().parents[2]
# of torch's compiler, of its exporters, of pictures, texts and other models
HEAVY = """torch._dynamo torch._inductor torch.onnx torch.distributed.fsdp torch.distributed.tensor
    sympy triton matplotlib tensorboard transformers tokenizers sentencepiece tiktoken pyarrow rich
    wandb huggingface_hub""".split()
SCRIPT = """
import sys, pretrain_llama
code = pretrain_llama.main(sys.argv[1:])
print("modules", *sorted(sys.modules))
sys.exit(code)
"""


@pytest.mark.prove
def test_a_run_imports_no_compiler():
    flags = f"{MODEL} --mock-data --global-batch-size 1 --train-iters 1".split()
    words = [sys.executable, "-c", SCRIPT, *flags]  # a new Python
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("modules "))
    assert "torch.nn" in line.split() and not set(HEAVY) & set(line.split())


@pytest.mark.prove
def test_a_data_parallel_group_reads_weights_once():
    """At ZeRO 1 a rank of 512 reads its part, and hands the store a digest; at 0 it reads all."""
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(f"{folder}/corpus")
        saved(ROOT, f"{folder}/saved", data)
        flags = [*MODEL.split(), *data, "--tensor-model-parallel-size", str(TP)]
        flags += ["--global-batch-size", str(WORLD // TP), "--load", f"{folder}/saved"]
        found = [start(ROOT, 9, [*flags, "--zero-stage", zero]) for zero in "01"]
    weights = 4 * (8192 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 640)) / TP
    assert found[0]["loaded"] > 3 * 0.9 * weights  # moments too
    assert 0 < found[1]["loaded"] < 3 * weights / 100  # a part is a multiple of a block
    assert all(each["put"] < 1000 for each in found)
