# SPDX-License-Identifier: Apache-2.0
"""Published runs of other programs, larger models and clusters, and how each source was used.

They are in the format of the table of several sources (benchmarks/planning/published.py).
"""

from pathlib import Path
from typing import NamedTuple

from benchmarks.planning.published import Row, read_table

FITTED, TUNED, LOOKED, NOT_SEEN = "fitted", "tuned on", "looked at", "not seen"
USES = {
    FITTED: "constants are fitted on it; a line of an accuracy table fits without what it tests",
    TUNED: "the form of the model, or a constant, was chosen after a look at its errors",
    LOOKED: "its errors were printed while the model was changed, and nothing was chosen by them",
    NOT_SEEN: "its prediction was committed before it was compared, and nothing changed by it",
}


class Source(NamedTuple):
    """A published table. where: its publication. use: a key of USES."""

    where: str
    use: str


SOURCES = {
    "SC'21": Source(
        "Narayanan et al. 2021 (arXiv:2104.04473), table 1: interleaved, full recomputation; its "
        "TFLOP/s, which count recomputation, turned into seconds by its own formula; "
        "micro-batch 1", TUNED),
    "SC'21 b 4": Source(
        "the same rows without a pipeline; micro-batch 4: the paper does not say", TUNED),
    "MLSys'23 full": Source(
        "Korthikanti et al. 2023 (arXiv:2205.05198), table 5: full recomputation", TUNED),
    "MLSys'23 selective": Source(
        "the same, sequence parallelism and selective recomputation", TUNED),
    "Bridge": Source("Megatron-Bridge docs/performance-summary.md, 25.11 container", TUNED),
    "Bridge H100": Source("the same page and its archive, 25.09 and 26.02 containers", LOOKED),
    "titan": Source("torchtitan benchmarks/llama3_h100_202412_torchtitan.md; H100s of 500 W and "
                    "2.4 TB/s", TUNED),
    "titan H200": Source("torchtitan benchmarks/llama3_8b_h200_2025-06_torchtitan.md", TUNED),
    "MLPerf": Source("MLCommons Training 5.1, logs of the entries; systems by name", TUNED),
    "NeMo": Source("NeMo performance summary, 24.07 and 24.12, Llama 3", LOOKED),
    "DGXC": Source("NVIDIA/dgxc-benchmarking llama3.1/README_8b.md and README_405b.md, 24.09; "
                   "405B with fewer layers on 32 to 192 GPUs", FITTED),
    "DGXC 70B": Source("the same, README_70b.md", LOOKED),
    # of BLIND
    "DGXC GPT-3 175B": Source("the same, nemo_megatron/README_175b.md at 0b71cfd", NOT_SEEN),
    "DGXC Nemotron-4 15B": Source("the same, nemotron/README_15b.md at 0b71cfd", NOT_SEEN),
    "DGXC Nemotron-4 340B": Source(
        "the same, nemotron/README_340b.md at 143b90d, 24.11", NOT_SEEN),
    "IBM FSDP A100": Source(
        "foundation-model-stack/fms-fsdp README.md at 0d31998 and pytorch.org's blog, 2024-03-13; "
        "400 Gb/s a node; 7B and 13B shard in a node, predicted as over all GPUs", NOT_SEEN),
    "IBM FSDP H100": Source("the same blog; 96 GPUs, 800 Gb/s a node", NOT_SEEN),
    "titan A100": Source("torchtitan docs/performance.md at 0413364, 64 GPUs, FSDP2", NOT_SEEN),
    "BigScience": Source(
        "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md at 9e64ede, "
        "'GBS Variations', without the three that ran out of memory; GPT-181B, Megatron-DeepSpeed, "
        "nodes with four 100 Gb/s links", NOT_SEEN),
    "InternLM": Source(
        "InternLM doc/en/train_performance.md at 20fe5ac, zero1=-1; nodes with four 100 Gb/s links",
        NOT_SEEN),
    "NeMo long sequences": Source(
        "NeMo docs/source/performance/performance_long_sequence.md at 8cfedd7, Llama 2 7B, 24.03; "
        "its TFLOP/s, which count attention whole, turned into seconds by NeMo's formula",
        NOT_SEEN),
    "titan async TP page": Source(
        "torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md at 2887250, the column "
        "without async TP; its float8 runs of 70B have a layout of \"titan\" and are left out",
        NOT_SEEN),
    "DGXC MaxText 70B": Source(
        "NVIDIA/dgxc-benchmarking maxtext/README_70b.md at 741c886, 25.04; FSDP over all GPUs: its "
        "runs on 512 and more do not", NOT_SEEN),
    "DGXC 405B GB200": Source("the same, llama3.1/README.md at 68eaf7e, 25.05", NOT_SEEN),
    "DGXC 340B GB200": Source("the same, nemotron/README.md at 68eaf7e, 25.05", NOT_SEEN),
    "DGXC Nemotron-4 15B tp 2": Source("the same page", NOT_SEEN),
    "Bridge 26.04 and 26.06": Source(
        "Megatron-Bridge docs/performance-summary-archive.md at 067f987, 26.04.01 (70B) and 26.06 "
        "(405B): the layouts that \"Bridge\" does not have", NOT_SEEN),
    "TinyLlama": Source(
        "jzhang38/TinyLlama README.md and pretrain/tinyllama.py at bf12224", NOT_SEEN),
}  # fmt: skip
BLIND = tuple(  # predictions committed before the rates
    Path(__file__).with_name(name) for name in ("blind_runs.csv", "blind_runs_2.csv")
)
HEAD = (
    "source,framework,model,layers,hidden,heads,ffn,vocab,gpu,n_gpus,precision,tp,pp,vpp,cp,zero,"
    "mbs,gbs,seq,recompute,sp,step_time_s,tokens_s_gpu"
)
GPT = {  # layers, hidden, heads
    "1.7B": (24, 2304, 24), "3.6B": (30, 3072, 32), "7.5B": (36, 4096, 32),
    "18.4B": (40, 6144, 48), "22B": (48, 6144, 64), "39.1B": (48, 8192, 64),
    "76.1B": (60, 10240, 80), "145.6B": (80, 12288, 96), "175B": (96, 12288, 96),
    "310.1B": (96, 16384, 128), "530B": (105, 20480, 128), "1T": (128, 25600, 160),
}  # fmt: skip
SC21 = (  # model, tp, pp, GPUs, batch, TFLOP/s of a GPU
    ("1.7B", 1, 1, 32, 512, 137), ("3.6B", 2, 1, 64, 512, 138), ("7.5B", 4, 1, 128, 512, 142),
    ("18.4B", 8, 1, 256, 1024, 135), ("39.1B", 8, 2, 512, 1536, 138),
    ("76.1B", 8, 4, 1024, 1792, 140), ("145.6B", 8, 8, 1536, 2304, 148),
    ("310.1B", 8, 16, 1920, 2160, 155), ("530B", 8, 35, 2520, 2520, 163),
    ("1T", 8, 64, 3072, 3072, 163),
)  # fmt: skip
MLSYS = (  # model, pp, GPUs, batch, micro-batch, v, seconds with full, with selective recomputation
    ("22B", 1, 8, 4, 4, 1, 1.42, 1.10), ("175B", 8, 64, 64, 1, 3, 18.13, 13.75),
    ("530B", 35, 280, 280, 1, 3, 49.05, 37.83), ("1T", 64, 512, 512, 1, 1, 94.42, 71.49),
)  # fmt: skip
OTHERS = """
Bridge,megatron-bridge,LLAMA3_8B,GB300,8,fp8,1,1,1,1,1,2,128,8192,,1,,37556
Bridge,megatron-bridge,LLAMA3.1_405B,GB300,256,fp8,2,8,4,2,1,1,1536,8192,,1,,999
Bridge,megatron-bridge,LLAMA3_8B,GB200,8,fp8,1,1,1,1,1,2,128,8192,,1,,31508
Bridge,megatron-bridge,LLAMA3.1_405B,GB200,256,fp8,4,16,4,1,1,1,1536,8192,,1,,813
Bridge,megatron-bridge,LLAMA3_8B,B200,8,fp8,1,1,1,1,1,2,128,8192,,1,,30624
Bridge,megatron-bridge,LLAMA3.1_405B,B200,128,fp8,4,8,8,2,1,1,64,8192,,1,,661
Bridge,megatron-bridge,LLAMA3_70B,GB300,64,fp8,1,1,1,1,3,2,256,8192,,1,,4520
Bridge,megatron-bridge,LLAMA3_70B,GB200,64,fp8,1,1,1,1,3,2,256,8192,,1,,4312
Bridge,megatron-bridge,LLAMA3_8B,H100,8,fp8,1,1,1,1,3,1,128,8192,,1,,14451
Bridge,megatron-bridge,LLAMA3_70B,H100,64,fp8,4,8,5,1,1,1,128,8192,,1,,1602
Bridge,megatron-bridge,LLAMA3.1_405B,H100,1024,fp8,8,8,8,2,1,1,512,8192,,1,,292
titan,titan,LLAMA3_8B,H100,8,bf16,1,1,1,1,3,2,16,8192,,1,,6667
titan,titan,LLAMA3_8B,H100,8,fp8,1,1,1,1,3,2,16,8192,,1,,8532
titan,titan,LLAMA3_8B,H100,128,bf16,1,1,1,1,3,2,256,8192,,1,,6514
titan,titan,LLAMA3_8B,H100,128,fp8,1,1,1,1,3,2,256,8192,,1,,8380
titan,titan,LLAMA3_8B,H100,8,fp8,1,1,1,1,3,1,8,32768,full,1,,3890
titan,titan,LLAMA3_8B,H100,8,fp8,1,1,1,2,3,1,4,65536,full,1,,2540
titan,titan,LLAMA3_8B,H100,8,fp8,1,1,1,4,3,1,2,131072,full,1,,1071
titan,titan,LLAMA3_8B,H100,8,fp8,1,1,1,8,3,1,1,262144,full,1,,548
titan,titan,LLAMA3_70B,H100,256,fp8,8,1,1,1,3,16,512,8192,full,1,,829
titan,titan,LLAMA3.1_405B,H100,512,fp8,8,8,1,1,3,1,256,8192,full,1,,100
titan,titan,LLAMA3.1_405B,H100,512,fp8,8,8,2,1,3,1,256,8192,full,1,,128
MLPerf,nemo,LLAMA3.1_405B,H200,512,fp8,4,8,8,2,1,1,1152,8192,,1,50.0,
MLPerf,nemo,LLAMA3.1_405B,H200,1024,fp8,4,8,8,2,1,1,1152,8192,,1,25.36,
MLPerf,nemo,LLAMA3_8B,H200,64,fp8,1,1,1,2,1,1,32,8192,,1,0.353,
MLPerf,nemo,LLAMA3_8B,B200,8,fp8,1,1,1,1,1,2,16,8192,,1,0.49,
MLPerf,nemo,LLAMA3_8B,GB200,8,fp8,1,1,1,1,1,2,16,8192,,1,0.405,
NeMo,nemo,LLAMA3_8B,H100,8,fp8,1,1,1,2,1,1,128,8192,,1,,12036
NeMo,nemo,LLAMA3_70B,H100,64,fp8,4,4,5,2,1,1,128,8192,,1,,1533
NeMo,nemo,LLAMA3_8B,H100,8,fp8,1,1,1,2,1,1,128,8192,,1,,12273
NeMo,nemo,LLAMA3_70B,H100,64,fp8,4,4,5,2,1,1,128,8192,,1,,1524
Bridge_H100,nemo,LLAMA3_8B,H100,8,fp8,1,1,1,1,3,1,128,8192,,1,,14079
Bridge_H100,nemo,LLAMA3_70B,H100,64,fp8,4,8,5,1,1,1,128,8192,,1,,1619
Bridge_H100,nemo,LLAMA3_70B,H100,64,fp8,4,8,5,1,1,1,256,8192,,1,,1621
Bridge_H100,nemo,LLAMA3.1_405B,H100,1024,fp8,8,8,8,2,1,1,512,8192,,1,,302
Bridge_H100,nemo,LLAMA3.1_405B,H100,1024,fp8,8,8,8,2,1,1,1536,8192,,1,,311
titan_H200,titan,LLAMA3_8B,H200,32,fp8,1,1,1,1,3,2,64,8192,,1,,10938
titan_H200,titan,LLAMA3_8B,H200,64,fp8,1,1,1,1,3,2,128,8192,,1,,10753
"""


DGXC = (  # model, precision, tp, pp, v; then GPUs, batch, seconds, and layers if not the model's
    ("LLAMA3_8B", "bf16", 1, 1, 1, "8 128 12.91, 16 256 13.00, 32 512 13.05, 64 1024 13.08, "
     "128 2048 13.10"),
    ("LLAMA3_8B", "fp8", 1, 1, 1, "8 128 9.67, 16 256 9.73, 32 512 9.75, 64 1024 9.80, "
     "128 2048 9.82"),
    ("LLAMA3_70B", "bf16", 4, 4, 5, "64 128 14.72, 128 256 14.73, 256 512 14.80, 512 1024 14.89, "
     "1024 2048 14.92, 2048 4096 14.98"),
    ("LLAMA3_70B", "fp8", 4, 4, 5, "64 128 11.01, 128 256 10.93, 256 512 11.16, 512 1024 11.18, "
     "1024 2048 11.28, 2048 4096 11.39"),
    ("LLAMA3.1_405B", "bf16", 8, 1, 1, "32 126 8.85 7"),
    ("LLAMA3.1_405B", "bf16", 8, 3, 7, "96 126 8.75 21, 192 252 16.93 42"),
    ("LLAMA3.1_405B", "bf16", 8, 9, 7, "576 252 17.20, 1152 504 17.52, 2304 1008 17.62"),
    ("LLAMA3.1_405B", "fp8", 8, 1, 1, "32 126 5.80 7"),
    ("LLAMA3.1_405B", "fp8", 8, 3, 7, "96 126 5.71 21, 192 252 11.00 42"),
    ("LLAMA3.1_405B", "fp8", 8, 9, 7, "576 252 11.24, 1152 504 11.31, 2304 1008 12.35"),
)  # fmt: skip


def megatron(source: str, model: str, tp: int, pp: int, v: int, gpus: int, b: int, batch: int,
             recompute: str, seconds: float) -> str:  # fmt: skip
    """Return a run of a GPT on A100s as a line of the CSV."""
    layers, hidden, heads = GPT[model]
    sp = int(recompute == "selective")
    return (
        f"{source},megatron-lm,gpt-{model},{layers},{hidden},{heads},{4 * hidden},51200,A100,{gpus}"
        f",bf16,{tp},{pp},{v},1,0,{b},{batch},2048,{recompute},{sp},{seconds:.4f},"
    )


def lines() -> list[str]:
    """Return the CSV's lines."""
    found = [HEAD]
    for model, tp, pp, gpus, batch, tflops in SC21:
        layers, h, _ = GPT[model]
        work = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / 6 / h + 51200 / 16 / layers / h)
        seconds = work / (gpus * tflops * 1e12)
        b, source = (1, "SC'21") if pp > 1 else (4, "SC'21 b 4")
        found.append(megatron(source, model, tp, pp, 1, gpus, b, batch, "full", seconds))
    for model, pp, gpus, batch, b, v, full, selective in MLSYS:
        for kind, seconds in (("full", full), ("selective", selective)):
            source = f"MLSys'23 {kind}"
            found.append(megatron(source, model, 8, pp, v, gpus, b, batch, kind, seconds))
    for line in OTHERS.split():
        first, framework, model, *rest = line.split(",")
        source = first.replace("_", " ")
        found.append(",".join([source, framework, model, "", "", "", "", "", *rest]))
    return found + dgxc()


def dgxc() -> list[str]:
    """Return NVIDIA's runs of Llama 3.1 on H100: context parallelism 2, micro-batch 1."""
    found = []
    for model, precision, tp, pp, v, runs in DGXC:
        source = "DGXC 70B" if "70B" in model else "DGXC"
        for run in runs.split(","):
            gpus, batch, seconds, *layers = run.split()
            found.append(
                f"{source},nemo,{model},{''.join(layers)},,,,,H100,{gpus},{precision},{tp},{pp},{v}"
                f",2,1,1,{batch},8192,,1,{seconds},"
            )
    return found


def runs(folder: Path) -> list[tuple[Row, dict[str, str]]]:
    """Return each run of lines(), written into a folder, and of BLIND, with its line of the CSV."""
    path = folder / "runs.csv"
    path.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    found: list[tuple[Row, dict[str, str]]] = []
    for table in map(read_table, (path, *BLIND)):
        assert not table.reasons, table.reasons
        found += zip(table.rows, table.lines, strict=True)
    return found


def fitted(folder: Path) -> list[Row]:
    """Return the runs on which constants are fitted."""
    return [row for row, line in runs(folder) if SOURCES[line["source"]].use == FITTED]
