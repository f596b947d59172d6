# SPDX-License-Identifier: Apache-2.0
"""The dry run: what it prints, and what it advises."""

import base64
import re

import pytest

import pretrain_llama
from forecast import dry_run
from forecast.fit import fit_lines
from forecast.planner.cluster import read_cluster
from forecast.planner.layout import Layout
from forecast.planner.model import read_model
from forecast.planner.search import evaluate
from tests.training.small_llama import PIPELINE, SMALL, read
from training.flags.megatron import vocabulary
from training.run.text import in_units
from training.settings.config import UsageError

UNTIED = "--untie-embeddings-and-output-weights"


def report(config):
    return dry_run.report(config, pretrain_llama)


@pytest.mark.prove
def test_the_groups_follow_the_order_of_the_ranks():
    config = read(f"{PIPELINE} 16 --tensor-model-parallel-size 2 --rank-order pp-dp-tp-cp", 16)
    text = report(config)
    for line in (
        "rank numbers go along the axes pp-dp-tp-cp, the first one fastest\n",
        "tensor-parallel group of rank 0: 0, 8\n",
        "data-parallel group of rank 0: 0, 4\n",
        "pipeline group of rank 0: 0, 1, 2, 3\n",
    ):
        assert line in text
    assert "rank numbers go along" not in report(read(f"{PIPELINE} 32", 8))
    alias = read(f"{PIPELINE} 32 --use-tp-pp-dp-mapping", 8)
    assert alias.parallel.rank_order == "tp-cp-pp-dp"
    megatrons = read(f"{PIPELINE} 32 --rank-order tp-cp-ep-dp-pp", 8)
    assert megatrons.parallel.rank_order == "tp-cp-dp-pp"
    with pytest.raises(UsageError, match="--rank-order tp-dp-pp: must name each of tp, cp, dp, pp"):
        read(f"{PIPELINE} 32 --rank-order tp-dp-pp", 8)
    alone = read("--rank-order dp-tp-cp-pp", 4)
    assert "--rank-order has no effect: there is only one axis of ranks" in alone.notes
    two = read(f"{PIPELINE} 32".replace("size 4", "size 2"), 4)
    assert "pipeline group of rank 0: 0, 2\n" in report(two) and "pipeline g" not in report(alone)
    both = read("--context-parallel-size 2 --rank-order dp-cp-tp-pp", 4)
    assert any(
        "the bits differ from those of an order with cp before dp" in note for note in both.notes
    )


def test_a_dry_run_on_the_cpu_does_not_speak_of_gpus():
    text = report(read("--device cpu --tensor-model-parallel-size 2", 4))
    assert not re.search("nccl|cuda|gpu", text, re.IGNORECASE)
    assert "what Python and torch need comes on top" in text
    assert "CUDA, NCCL and allocator overhead come on top" in report(read("", 4))


@pytest.mark.prove
def test_the_report_of_a_pipeline():
    config = read(f"{PIPELINE} 32 --num-virtual-stages-per-pipeline-rank 2 --bf16", 8)
    text = report(config)
    for line in (
        "TP 1 x CP 1 x DP 2 x PP 4 = 8 ranks",
        "data-parallel group of rank 0: 0, 1\n",
        "pipeline group of rank 0: 0, 2, 4, 6\n",
        "pipeline interleaved: 4 ranks, 2 stages each",
        "pipeline rank 0: embedding + layer 0 | layer 4\n",
        "pipeline rank 3: layer 3 | layer 7 + head\n",
        "8 micro-batches: bubble ",
        "% if all stages were equal",
        "rank  parameters ",
        "Parameters of pipeline rank 0, the fullest",
        "Memory of pipeline rank 0, the fullest",
        "all that interleaved has in flight",
        "Traffic of one step, pipeline rank 0, the fullest",
        "pp        send                24 of  8.192 kB",
    ):
        assert line in text, line
    table = text.split("Memory of each pipeline rank\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 5 and len({len(row) for row in table}) == 1
    totals = [sum(kinds.values()) for kinds in dry_run.memory_of_ranks(config, pretrain_llama)]
    (total,) = [line.split()[1:3] for line in text.splitlines() if line.startswith("  total ")]
    assert max(totals) == totals[0] and total == [f"{totals[0] / 1e6:.4g}", "MB"]
    assert table[1].endswith(" ".join(total))
    assert "Pipeline\n" not in report(read())


@pytest.mark.prove
def test_the_report_of_a_large_run():
    text = report(
        read(
            "--tensor-model-parallel-size 8 --sequence-parallel --bf16 --vocab-size 128256 "
            "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
            "--num-query-groups 8 --untie-embeddings-and-output-weights --global-batch-size 1024 "
            "--seq-length 8192 --micro-batch-size 1 --tp-comm-overlap",
            512,
        )
    )
    for line in (
        "= 512 ranks; sequence parallelism on, overlap auto, measured at start-up\n",
        "layers.*.attention.qkv.weight      [1280, 8192]       x 80",
        "70,553,706,496 in all",
        "global batch 1,024 = micro-batch 1 x 16 micro-batches x 64 data-parallel ranks",
        "= 8,388,608 tokens a step",
        "10 steps, 10,240 samples",
        "does NOT fit a GPU of 80 GB",
    ):
        assert line in text
    assert "fits a GPU of 80 GB (73.7 GB available), with 73.63 GB to spare" in report(read())
    assert "fits a GPU" not in report(read("--device cpu"))
    assert "none: one rank" in report(read())


def test_without_a_vocabulary_it_says_what_is_not_known():
    """Rules, layout, batch and notes need no vocabulary, so a run is checked without one."""
    base = SMALL.replace("--vocab-size 300", "").replace("--mock-data", "")
    text = report(read("", 1, base))
    assert "Layout" in text and "Batch" in text and "Differs from Megatron-LM" in text
    assert "GPU of" not in text
    assert "Not known\n  parameters, memory" in text and "give --vocab-size" in text
    assert "Memory of" not in text
    with pytest.raises(UsageError, match="--global-batch-size 3 is not a multiple"):
        read("--global-batch-size 3", 2, base)


def test_the_vocabulary_is_read_where_the_tokenizer_is_here(tmp_path):
    byte = "".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
    (tmp_path / "tokenizer.model").write_text(byte)
    base = SMALL.replace("--vocab-size 300", "").replace("--mock-data", "")
    tokenizer = f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path}/tokenizer.model"
    assert "vocabulary 512," in report(read(tokenizer, 1, base))


def test_a_run_fits_where_the_planner_says_so():
    """Both take a share of the device file's memory, less what context and libraries need."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 500"
    layout = Layout(tp=1, pp=1, virtual=1, dp=8, micro_batch=1, micro_batches=1, zero=1,
                    recompute="none")  # fmt: skip
    plans = evaluate(read_model(flags, 64), read_cluster("h100_8_nodes").of(1), [layout])
    for total in (plans.limit - 1e6, plans.limit + 1e6):
        first = fit_lines(read(), total, lambda config: plans.limit, in_units)[0]
        assert first.startswith("fits") == (total <= plans.limit)
        assert first.startswith("does NOT fit") == (total > plans.limit)


LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--vocab-size 128256 --bf16 --untie-embeddings-and-output-weights "
    "--recompute-granularity full --overlap-grad-reduce --overlap-param-gather"
)


def advice(more, world):
    """Return what --dry-run says of the fit of a Llama 3 8B: its first line, {measure: rest}."""
    lines = report(read(f"{LLAMA_8B} {more}", world)).splitlines()
    at = next(i for i, line in enumerate(lines) if "fit a GPU" in line or "fits a GPU" in line)
    rows = [re.split("  +", line.strip(), maxsplit=1) for line in lines[at + 1 :]]
    return lines[at].strip(), dict(row for row in rows[: rows.index([""])] if len(row) == 2)


@pytest.mark.prove
def test_what_does_not_fit_gets_the_measures_that_do_alone():
    # 18 bytes x 8.03e9 = 144.5 GB at stage 0; at stage 1 over 8 ranks 6 + 12/8 bytes = 60.2 GB
    first, found = advice("", 8)
    assert first.startswith("does NOT fit a GPU of 80 GB (73.7 GB available): ")
    assert first.endswith(" by itself:")
    of_zero = {name: text for name, text in found.items() if "--zero" in name}
    assert list(of_zero) == [f"--zero-stage {s} (over 8 data-parallel ranks)" for s in (1, 2, 3)]
    assert all(re.match(r"saves \d+(\.\d+)? GB: fits, \d\d", text) for text in of_zero.values())
    # masters and moments, 12 bytes, leave the device
    assert re.match(r"saves 96.\d+ GB: fits, ", found["--optimizer-cpu-offload"])
    assert re.match(r"saves .*, too much", found["--fused-linear-cross-entropy"])
    assert not any("--recompute" in name or "--micro" in name for name in found), "in use already"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ("rtx-4090", "does NOT fit a GPU of 24 GB (21.06 GB available)"),
        ("a100-40", "fits a GPU of 40 GB (36.1 GB available), with "),
    ],
)
def test_it_fits_the_gpu_that_is_named(gpu, says):
    first, _ = advice(f"--zero-stage 3 --optimizer-cpu-offload --rehearse-device {gpu}", 2)
    assert first.startswith(says)


@pytest.mark.parametrize("name", ["MI300X", "rtx-4900", "nowhere/gpu.json"])
def test_a_gpu_that_is_none_is_refused(name):
    with pytest.raises(UsageError, match=f"^--rehearse-device {name}"):
        report(read(f"--rehearse-device {name}"))


@pytest.mark.prove
def test_the_measures_that_are_told_are_those_that_help():
    first, found = advice("--zero-stage 3 --global-batch-size 4 --optimizer-cpu-offload", 2)
    assert first.startswith("fits a GPU of 80 GB (73.7 GB available), with ") and not found
    plain = LLAMA_8B.replace("--recompute-granularity full", "")
    text = report(read(f"{plain} --micro-batch-size 8 --tensor-model-parallel-size 4", 4))
    shown = re.findall(r"^    (--\S+(?: \w+)?) .*saves", text, re.MULTILINE)
    for flag in ("--recompute-granularity full", "--micro-batch-size 1"):
        assert flag in shown, text
    assert not any("--zero-stage" in flag for flag in shown)
    assert "with one data-parallel rank --zero-stage shards nothing" in text


def test_only_the_differences_that_the_flags_touch():
    """A list of flags counts by one of them, "with" by both, "without" where one is left out."""

    def evaluate(more):
        text = report(read(more)).split("Differs from Megatron-LM\n")[1].splitlines()
        return [line.split(":")[0].strip() for line in text[:-1]], text[-1]

    without = [name for name in evaluate("")[0] if name.startswith("without ")]
    assert [name.split()[1] for name in without] == ["--swiglu,", "--hidden-dropout,"]
    llama = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    assert not any("--swiglu" in name for name in evaluate(llama)[0])
    few, rest = evaluate(f"--hidden-dropout 0 --attention-dropout 0 {llama}")
    assert few == ["--make-vocab-size-divisible-by", "--micro-batch-size", "--num-query-groups"]
    count = len(vocabulary().differences) - len(few)
    assert rest == f"  {count} more, for flags that you did not set: docs/flags.md"
    assert "--seed" in evaluate("--seed=3")[0] and evaluate("--seed 3")[1].startswith(
        f"  {count - 3} more"
    )
    with_schedule = "--train-iters with --step-batch-size-schedule"
    assert with_schedule in evaluate("--step-batch-size-schedule 0:4")[0]
    decay = "--lr-decay-style, other --lr-* flags, --weight-decay"
    assert decay in evaluate("--lr-warmup-iters 2")[0]


def test_the_memory_of_a_level():
    """120 blocks of 1,024: 8 ranks; masters and moments, gradients, weights are shared."""
    line = "--bf16 --zero-stage"
    text = report(read(f"{line} 1", 8))
    for row in (
        "  parameters            245.8 kB  bfloat16\n",
        "  gradients             491.5 kB  fp32\n",
        "  masters               61.44 kB  fp32, a share of 1/8\n",
        "  moments               122.9 kB  AdamW's two, a share of 1/8\n",
        "  dp_cp     reduce-scatter       1 of  491.5 kB; a rank sends 430.1 kB\n",
        "  dp_cp     all-gather           1 of  245.8 kB; a rank sends 215 kB\n",
    ):
        assert row in text, row
    assert "unsharded gradients" not in text and "gathered weights" not in text

    text = report(read(f"{line} 3 --main-grads-dtype bf16 {UNTIED}", 4))
    for row in (
        "  parameters            69.63 kB  bfloat16, a share of 1/4\n",
        "  gradients             139.3 kB  fp32, a share of 1/4\n",
        "  unsharded gradients   106.5 kB  during a part of a step, until they are summed\n",
        "  gathered weights      65.54 kB  during a part of a step\n",  # at the fullest moment
        "  --zero-stage 3 without --overlap-param-gather: every block waits for its weights\n",
    ):
        assert row in text, row

    text = report(read(f"{line} 1 --main-grads-dtype bf16", 4))
    assert "  gradients             356.4 kB  bf16, and fp32 sums of a share of 1/4\n" in text


def test_the_report_says_what_is_in_host_memory():
    """Of how many bytes: test_state.py."""
    away = ("masters                    0 B  fp32, in host memory", "AdamW's two, in host memory")
    rows = {
        "--optimizer-cpu-offload": ("  masters, moments and staging buffers; pinned\n",
                                    "gradients down, weights up; a rank sends "),
        # its activations take more than that state
        "--optimizer-state-offload --micro-batch-size 8": ("  masters and moments; pinned\n",
                                                           "masters and moments; a rank sends "),
    }  # fmt: skip
    for more, own in rows.items():
        text = report(read(f"{more} --bf16 --zero-stage 1 {UNTIED}", 4))
        for row in (*away, *own):
            assert row in text, row
    on_cpu = "--optimizer-cpu-offload --device cpu --zero-stage 1"
    text = report(read(on_cpu, 4))
    assert "  host memory  " not in text and "fp32, a share" not in text
    assert "--optimizer-cpu-offload has no effect with --device cpu" in text
