# SPDX-License-Identifier: Apache-2.0
"""Predict published runs of other programs and larger clusters, on which nothing is ever fitted.

    python benchmarks/plan_check.py [--csv FILE]

RUNS has one run a line, with its source; nothing here is read by benchmarks/plan_fit.py. Each run
is predicted as `tools/plan.py --predict` does, from a CSV in the form of a table of several
sources. --csv keeps that CSV. Printed: predicted and measured tokens a second and GPU, their
ratio, and the mean error by source.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.planner.predict import predict  # noqa: E402
from tools.planner.published import read_table  # noqa: E402

SOURCES = {
    "SC'21": "Narayanan et al. 2021 (arXiv:2104.04473), table 1: interleaved, full recomputation; "
    "its TFLOP/s, which count recomputation, turned into seconds by its own formula; micro-batch 1",
    "SC'21, b 4": "the same rows without a pipeline; micro-batch 4: the paper does not say",
    "MLSys'23": "Korthikanti et al. 2023 (arXiv:2205.05198), table 5: full recomputation",
    "MLSys'23, selective": "the same, sequence parallelism and selective recomputation",
    "Bridge": "Megatron-Bridge docs/performance-summary.md, 25.11 container",
    "titan": "torchtitan benchmarks/llama3_h100_202412_torchtitan.md; H100s of 500 W and 2.4 TB/s",
    "MLPerf": "MLCommons Training 5.1, logs of the entries; systems by name",
}
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
"""


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
        found.append(",".join([first, framework, model, "", "", "", "", "", *rest]))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="keep the runs as a CSV, for plan.py --predict")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = args.csv or Path(folder) / "runs.csv"
        path.write_text("\n".join(lines()) + "\n", encoding="utf-8")
        table = read_table(path)
    assert not table.reasons, table.reasons
    told = predict(table.rows)
    errors: dict[str, list[float]] = {}
    for n, (row, line) in enumerate(zip(table.rows, table.lines, strict=True)):
        r = row.record
        measured = told.rate[n] * told.seconds[n] / row.seconds
        ratio = told.rate[n] / measured
        errors.setdefault(line["source"], []).append(abs(ratio - 1))
        layout = f"tp {r['tp']} pp {r['pp']} v {r['virtual']} cp {r['cp']} zero {r['zero']:g}"
        gpus = f"{line['n_gpus']:>5} {line['gpu']:6} {line['precision']}"
        print(f"{line['source']:20} {line['model']:14} {gpus} {layout:34} "
              f"measured {measured:9.1f}  predicted {told.rate[n]:9.1f}  {ratio:5.2f}  "
              f"MFU {told.mfu[n]:4.0%}  {told.gib[n]:5.1f} GiB")  # fmt: skip
    for source, own in errors.items():
        print(f"{source:20} {len(own):3} runs, mean error {np.mean(own):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
