#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO peer on CPU/gloo: the model, data and peak memory of native.py, trained by deepspeed.initialize.

  OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 deepspeed_zero.py --stage 2 --size tiny [--dtype bf16]

Needs an interpreter with torch and deepspeed (pip install torch==2.13.0, then deepspeed==0.19.8). AdamW is
torch's fused kernel, as in native.py; clipping at 1.0. bf16 has fp32 masters, and DeepSpeed's defaults
otherwise: gradients kept and sent in bf16, so half the bytes that Weft and FSDP2 reduce in fp32.
"""
import argparse, json, os, sys, time, warnings
warnings.filterwarnings("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
import native

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--stage", type=int, required=True, choices=[1, 2, 3])
    mine, rest = p.parse_known_args()
    sys.argv[1:] = rest
    a = native.get_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = native.Transformer(a)
    model.init_weights(a.seed)
    data = native.Data(a)
    per = data.n // world
    config = {
        "train_micro_batch_size_per_gpu": per, "gradient_accumulation_steps": 1, "gradient_clipping": a.clip,
        "bf16": {"enabled": a.dtype == "bf16"},
        "zero_optimization": {"stage": mine.stage, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    times, losses = [], []
    for i in range(a.steps):
        if i == a.warmup - 1: native.reset_peak()
        dist.barrier()
        begin = time.perf_counter()
        x, y = (t[rank * per:(rank + 1) * per] for t in data(i))
        loss = native.ce(engine(x), y)
        engine.backward(loss)
        engine.step()
        dist.barrier()
        if i >= a.warmup: times.append(time.perf_counter() - begin)
        mean = loss.detach().float().reshape(1)
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
        if rank == 0: print(f"step {i} loss {losses[-1]:.6f}", flush=True)
    peaks = [None] * world
    dist.all_gather_object(peaks, native.peak_rss_mb())
    if rank == 0:
        found = dict(stage=mine.stage, size=a.size, dtype=a.dtype, dp=world, times=times, losses=losses, peak_rss_mb=peaks)
        print("JSON " + json.dumps(found), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
