#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch-native parallel training peer (what torchtitan's llama3 does), on CPU/gloo or, with --device cuda, on GPUs/nccl.

  OMP_NUM_THREADS=2 python native.py --size tiny
  OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 native.py --size tiny --tp 2
  ...             torchrun --nproc_per_node 2 native.py --dp-shard 2 | --ddp
  ...             torchrun --nproc_per_node 2 native.py --pp 2 --schedule 1F1B --microbatches 4
  ...             torchrun --nproc_per_node 4 native.py --tp 2 --dp-shard 2 | --tp 2 --pp 2

The global batch is micro_batch * microbatches sequences in EVERY mode, split over dp ranks; only PP
(and --accum) really cuts it into microbatches. Weights and data depend on --seed alone.
"""
import argparse, contextlib, ctypes, json, math, os, statistics, sys, time, warnings
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
warnings.filterwarnings("ignore")

SIZES = {
    "tiny":  dict(dim=256, layers=4, heads=8, kv_heads=4, ffn=768, vocab=4096, seq=256),
    "small": dict(dim=768, layers=12, heads=12, kv_heads=4, ffn=2048, vocab=8192, seq=512),
}

def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--size", default="tiny", choices=list(SIZES))
    for k in SIZES["tiny"]:
        p.add_argument("--" + k.replace("_", "-"), type=int, default=None)
    p.add_argument("--micro-batch", type=int, default=1)
    p.add_argument("--microbatches", type=int, default=4)
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument("--bf16-mode", default="mixed", choices=["mixed", "pure"],
                   help="mixed: fp32 master weights, bf16 compute (FSDP2 mp policy, or autocast); pure: all bf16")
    p.add_argument("--mp-carrier", default="auto", choices=["auto", "autocast", "fsdp"])
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--dp-shard", type=int, default=1)
    p.add_argument("--no-reshard", action="store_true", help="reshard_after_forward=False (ZeRO-2 like)")
    p.add_argument("--ddp", action="store_true")
    p.add_argument("--ddp-gabv", type=int, default=1, help="gradient_as_bucket_view")
    p.add_argument("--pp", type=int, default=1)
    p.add_argument("--schedule", default="1F1B")
    p.add_argument("--vpp", "--virtual", dest="virtual", type=int, default=1)
    p.add_argument("--accum", action="store_true", help="non-PP: run the microbatches one by one")
    p.add_argument("--hf", action="store_true", help="transformers.LlamaForCausalLM instead of ours")
    p.add_argument("--rope", default="complex", choices=["complex", "half"])
    p.add_argument("--gqa", default="expand", choices=["expand", "native"])
    p.add_argument("--compile", action="store_true")
    p.add_argument("--no-loss-parallel", action="store_true")
    p.add_argument("--no-sp", action="store_true")
    p.add_argument("--optimizer", default="fused", choices=["fused", "foreach", "forloop"])
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--data", default=None, help=".npy/.bin(uint16) of token ids, or a .npy of batches [steps, sequences, seq + 1]; default random")
    p.add_argument("--pin", action="store_true")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--profile", default=None, help="write a profile summary (JSON) of one step here")
    p.add_argument("--tag", default="")
    a = p.parse_args()
    for k, v in SIZES[a.size].items():
        if getattr(a, k) is None:
            setattr(a, k, v)
    return a

# ---------------------------------------------------------------- model (torchtitan llama3 layout)
def rope_complex(hd, seq, theta=500000.0):
    f = 1.0 / (theta ** (torch.arange(0, hd, 2).float() / hd))
    f = torch.outer(torch.arange(seq).float(), f)
    return torch.polar(torch.ones_like(f), f)

def rope_half(hd, seq, theta=500000.0):
    f = 1.0 / (theta ** (torch.arange(0, hd, 2).float() / hd))
    f = torch.outer(torch.arange(seq).float(), f)
    f = torch.cat((f, f), -1)
    return torch.stack((f.cos(), f.sin()))

def apply_rope(q, k, fc):
    if fc.is_complex():
        s = q.shape[1]
        def one(x):
            xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(xc * fc[:s].view(1, s, 1, -1)).flatten(3).type_as(x)
    else:
        s = q.shape[1]
        cos, sin = fc[0, :s].view(1, s, 1, -1).to(q.dtype), fc[1, :s].view(1, s, 1, -1).to(q.dtype)
        def one(x):
            h = x.shape[-1] // 2
            return x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin
    return one(q), one(k)

class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.hd = a.dim // a.heads
        self.rep = a.heads // a.kv_heads
        self.gqa_native = a.gqa == "native"
        self.wq = nn.Linear(a.dim, a.heads * self.hd, bias=False)
        self.wk = nn.Linear(a.dim, a.kv_heads * self.hd, bias=False)
        self.wv = nn.Linear(a.dim, a.kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(a.heads * self.hd, a.dim, bias=False)

    def forward(self, x, fc):
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (t.view(b, s, -1, self.hd) for t in (q, k, v))
        q, k = apply_rope(q, k, fc)
        if self.rep > 1 and not self.gqa_native:
            k, v = (t[:, :, :, None, :].expand(b, s, t.shape[2], self.rep, self.hd).reshape(b, s, -1, self.hd)
                    for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa_native and self.rep > 1)
        return self.wo(o.transpose(1, 2).contiguous().view(b, s, -1))

class FeedForward(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.w1 = nn.Linear(a.dim, a.ffn, bias=False)
        self.w2 = nn.Linear(a.ffn, a.dim, bias=False)
        self.w3 = nn.Linear(a.dim, a.ffn, bias=False)
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.attention_norm = nn.RMSNorm(a.dim, eps=1e-5)
        self.attention = Attention(a)
        self.ffn_norm = nn.RMSNorm(a.dim, eps=1e-5)
        self.feed_forward = FeedForward(a)
    def forward(self, x, fc):
        h = x + self.attention(self.attention_norm(x), fc)
        return h + self.feed_forward(self.ffn_norm(h))

class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        self.tok_embeddings = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleDict({str(i): Block(a) for i in range(a.layers)})
        self.norm = nn.RMSNorm(a.dim, eps=1e-5)
        self.output = nn.Linear(a.dim, a.vocab, bias=False)
        self.register_buffer("freqs_cis", (rope_complex if a.rope == "complex" else rope_half)(a.dim // a.heads, a.seq),
                             persistent=False)
    def init_weights(self, seed):
        # Normal(0.02); drawn tensor by tensor from its own generator -> independent of what else exists
        for i, (n, p) in enumerate(self.named_parameters()):
            if p.dim() == 1:
                nn.init.ones_(p)
            else:
                g = torch.Generator(p.device).manual_seed(seed * 1000 + i)
                std = 0.02 / math.sqrt(2 * self.a.layers) if n.endswith(("wo.weight", "w2.weight")) else 0.02
                with torch.no_grad():
                    p.normal_(0, std, generator=g)
    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if self.a.compile and self.a.tp > 1 and self.tok_embeddings is not None:
            h = h.clone()   # an AsyncCollectiveTensor entering a compiled block breaks Redistribute.backward (torch 2.13)
        for l in self.layers.values():
            h = l(h, self.freqs_cis)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h

def ce(pred, y):
    return F.cross_entropy(pred.flatten(0, 1).float(), y.flatten(0, 1))

# ---------------------------------------------------------------- parallelize (order: TP, compile, FSDP/DDP)
def apply_tp(model, mesh, loss_parallel, sp=True):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                                   SequenceParallel, parallelize_module)
    s1 = Shard(1) if sp else Replicate()
    top = {}
    if model.tok_embeddings is not None:
        top["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=s1)
    if model.norm is not None:
        if sp: top["norm"] = SequenceParallel()
        top["output"] = ColwiseParallel(input_layouts=s1, output_layouts=Shard(-1) if loss_parallel else Replicate(),
                                        use_local_output=not loss_parallel)
    parallelize_module(model, mesh, top)
    for l in model.layers.values():
        plan = {"attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=s1),
                "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=s1)}
        if sp:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
                     "attention": PrepareModuleInput(input_layouts=(Shard(1), None),
                                                     desired_input_layouts=(Replicate(), None)),
                     "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
        parallelize_module(l, mesh, plan)

def apply_fsdp(model, mesh, a, mixed, pp):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    kw = dict(mesh=mesh)
    if mixed:
        kw["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = not a.no_reshard and not pp          # torchtitan's "default" policy: no reshard under PP
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **kw, reshard_after_forward=reshard)
    for l in model.layers.values():
        fully_shard(l, **kw, reshard_after_forward=reshard)
    if model.norm is not None:
        fully_shard([model.norm, model.output], **kw, reshard_after_forward=False)
    fully_shard(model, **kw)

def compile_blocks(model):
    for l in model.layers.values():
        l.compile(backend="inductor", fullgraph=True)

def reset_peak():
    import gc; gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        open("/proc/self/clear_refs", "w").write("5")
    except Exception as e:
        print("reset_peak failed", e, file=sys.stderr)

def peak_rss_mb():
    for l in open("/proc/self/status"):
        if l.startswith("VmHWM"):
            return int(l.split()[1]) / 1024

class Data:
    def __init__(self, a):
        self.a = a
        self.n = a.micro_batch * a.microbatches
        self.tok = None
        if a.data:
            self.tok = np.load(a.data) if a.data.endswith(".npy") else np.memmap(a.data, np.uint16, "r")
    def __call__(self, step):
        a, L = self.a, self.a.seq + 1
        if self.tok is None:    # two alternating random batches, so the loss moves
            t = np.random.RandomState(a.seed + step % 2).randint(0, a.vocab, (self.n, L))
        elif self.tok.ndim == 3:
            t = self.tok[step]
        else:
            o = (step * self.n * a.seq) % (len(self.tok) - self.n * L)
            t = np.stack([self.tok[o + i * a.seq: o + i * a.seq + L] for i in range(self.n)]).astype(np.int64)
        t = torch.from_numpy(t).to(a.device)
        return t[:, :-1].contiguous(), t[:, 1:].contiguous()

def hf_name(n):
    """The Hugging Face name of one of our parameters (the same weights with --rope half)."""
    ren = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    sub = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
           "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
           "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    q = n.rsplit(".", 1)[0]
    if q in ren: return ren[q] + ".weight"
    _, i, rest = q.split(".", 2)
    return f"model.layers.{i}.{sub[rest]}.weight"

def hf_model(a):
    from transformers import LlamaConfig, LlamaForCausalLM
    c = LlamaConfig(vocab_size=a.vocab, hidden_size=a.dim, intermediate_size=a.ffn, num_hidden_layers=a.layers,
                    num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, max_position_embeddings=a.seq,
                    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, use_cache=False,
                    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="sdpa")
    m = LlamaForCausalLM(c)
    ref = Transformer(a); ref.init_weights(a.seed)
    sd = {hf_name(n): p for n, p in ref.state_dict().items()}
    m.load_state_dict(sd)
    return m

def main():
    a = get_args()
    world = int(os.environ.get("WORLD_SIZE", 1)); rank = int(os.environ.get("RANK", 0))
    distributed = "RANK" in os.environ
    threads = a.threads or max(1, len(os.sched_getaffinity(0)) // world)
    if a.pin:
        cores = sorted(os.sched_getaffinity(0))
        if world > 1: os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(threads)
    dp = a.dp_shard if not a.ddp else world
    assert a.pp * dp * a.tp == world, (a.pp, dp, a.tp, world)
    mixed = a.dtype == "bf16" and a.bf16_mode == "mixed"
    pure = a.dtype == "bf16" and a.bf16_mode == "pure"
    carrier = a.mp_carrier
    if carrier == "auto":
        carrier = "fsdp" if (a.tp > 1 or a.pp > 1 or a.dp_shard > 1) else "autocast"
    use_fsdp = a.dp_shard > 1 or (mixed and carrier == "fsdp")
    autocast = mixed and not use_fsdp
    if use_fsdp and not distributed:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29911"); distributed = True
    mesh = None
    gpu = a.device == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if distributed:
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("nccl" if gpu else "gloo")
        mesh = init_device_mesh(a.device, (a.pp, dp, a.tp), mesh_dim_names=("pp", "dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank() if mesh else 0
    pp_rank = mesh["pp"].get_local_rank() if mesh else 0
    lp = a.tp > 1 and not a.no_loss_parallel

    def parallelize(m):
        if pure: m.to(torch.bfloat16); m.freqs_cis = (rope_complex if a.rope == "complex" else rope_half)(a.dim // a.heads, a.seq)
        if a.tp > 1: apply_tp(m, mesh["tp"], lp, not a.no_sp)
        if a.compile: compile_blocks(m)
        if use_fsdp: apply_fsdp(m, mesh["dp"], a, mixed, a.pp > 1)
        return m

    torch.manual_seed(a.seed)
    if a.hf:
        model = hf_model(a)
        if pure: model.to(torch.bfloat16)
        model.to(a.device)
        if a.compile:
            for l in model.model.layers: l.compile(backend="inductor")
    else:
        with torch.device(a.device): model = Transformer(a)
        model.init_weights(a.seed)
    nparam = sum(p.numel() for p in model.parameters())
    loss_fn = ce
    if a.compile: loss_fn = torch.compile(ce, backend="inductor") if not lp else ce
    lp_ctx = contextlib.nullcontext
    if lp:
        from torch.distributed.tensor.parallel import loss_parallel
        lp_ctx = loss_parallel
    ac_ctx = (lambda: torch.autocast(a.device, torch.bfloat16)) if autocast else contextlib.nullcontext

    # ---- pipeline
    sched = None; busy = [0.0]; parts = None
    if a.pp > 1:
        import copy
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
        cls = get_schedule_class(a.schedule)
        single = issubclass(cls, PipelineScheduleSingle)
        V = 1 if single else max(a.virtual, 2)
        n = a.pp * V
        vstyle = a.schedule in ("ZBVZeroBubble", "DualPipeV")
        mine = [pp_rank, 2 * a.pp - 1 - pp_rank] if vstyle else [pp_rank + a.pp * v for v in range(V)]
        bounds = [round(i * a.layers / n) for i in range(n + 1)]
        stages, parts = [], []
        for s in mine:
            m = copy.deepcopy(model)
            for i in range(a.layers):
                if not bounds[s] <= i < bounds[s + 1]: del m.layers[str(i)]
            if s: m.tok_embeddings = None
            if s != n - 1: m.norm = m.output = None
            parallelize(m); parts.append(m)
            st = PipelineStage(m, s, n, torch.device(a.device), group=mesh["pp"].get_group())
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                def wrap(f):
                    def g(*x, **k):
                        t = time.perf_counter(); r = f(*x, **k); busy[0] += time.perf_counter() - t; return r
                    return g
                setattr(st, name, wrap(getattr(st, name)))
            stages.append(st)
        del model
        has_first, has_last = 0 in mine, n - 1 in mine
        sched = cls(stages[0], n_microbatches=a.microbatches, loss_fn=loss_fn) if single else \
            cls(stages, n_microbatches=a.microbatches, loss_fn=loss_fn)
    else:
        if not a.hf: parallelize(model)
        if a.ddp:
            from torch.nn.parallel import DistributedDataParallel as DDP
            model = DDP(model, gradient_as_bucket_view=bool(a.ddp_gabv), bucket_cap_mb=25)
        parts = [model]
    params = [p for m in parts for p in m.parameters()]
    opt = torch.optim.AdamW(params, lr=a.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                            fused=a.optimizer == "fused" or None, foreach=a.optimizer == "foreach" or None)
    data = Data(a)
    pipe_t = [0.0]

    def clip():
        grads = [p.grad for p in params if p.grad is not None]
        tn = torch.nn.utils.get_total_norm(grads, foreach=True)
        if hasattr(tn, "full_tensor"): tn = tn.full_tensor()
        if a.pp > 1:
            tn = tn ** 2; dist.all_reduce(tn, group=mesh["pp"].get_group()); tn = tn ** 0.5
        torch.nn.utils.clip_grads_with_norm_(params, a.clip, tn, foreach=True)

    def step(i):
        x, y = data(i)
        per = x.shape[0] // dp
        x, y = x[dp_rank * per:(dp_rank + 1) * per], y[dp_rank * per:(dp_rank + 1) * per]
        opt.zero_grad(set_to_none=True)
        if sched is not None:
            losses = []
            t = time.perf_counter(); busy[0] = 0.0
            with lp_ctx(), ac_ctx():
                tgt, ls = (y, losses) if has_last else (None, None)
                sched.step(x, target=tgt, losses=ls) if has_first else sched.step(target=tgt, losses=ls)
            pipe_t[0] = time.perf_counter() - t
            loss = torch.stack([l.detach() if not hasattr(l, "full_tensor") else l.full_tensor().detach() for l in losses]).mean() if has_last else torch.zeros((), device=a.device)
        else:
            chunks = a.microbatches // dp if a.accum else 1
            loss = 0.0
            for j, (xx, yy) in enumerate(zip(x.chunk(chunks), y.chunk(chunks))):
                if use_fsdp and chunks > 1: model.set_requires_gradient_sync(j == chunks - 1)
                with lp_ctx():
                    with ac_ctx():
                        out = model(xx)
                        l = loss_fn(out.logits if a.hf else out, yy) / chunks
                    del out
                    l.backward()
                l = l.detach(); loss = loss + (l.full_tensor() if hasattr(l, "full_tensor") else l)
        if a.clip > 0: clip()
        opt.step()
        return loss

    def global_loss(l):
        l = float(l)
        if distributed and (dp > 1 or a.pp > 1):
            t = torch.tensor([l], device=a.device); g = None
            dist.all_reduce(t, group=g)
            # PP: non-last ranks hold 0; dp: mean; tp: replicated
            l = float(t) / (dp * a.tp)
        return l

    def sync():
        if distributed: dist.barrier()
        if gpu: torch.cuda.synchronize()

    times, losses, bub, foreign = [], [], [], []
    def cpu_busy():
        v = [int(x) for x in open("/proc/stat").readline().split()[1:]]
        return (v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / os.sysconf("SC_CLK_TCK")
    for i in range(a.steps):
        if i == a.warmup - 1:
            torch.cuda.reset_peak_memory_stats() if gpu else reset_peak()
        sync()
        b0, c0 = cpu_busy(), time.process_time()
        t = time.perf_counter()
        l = step(i)
        sync()
        dt = time.perf_counter() - t
        own = time.process_time() - c0; b1 = cpu_busy() - b0
        if distributed:
            o = torch.tensor([own], device=a.device); dist.all_reduce(o); own = float(o)
        foreign.append(max(0.0, b1 - own) / (dt * os.cpu_count()))   # share of the machine others used in this step
        losses.append(global_loss(l))
        if i >= a.warmup:
            times.append(dt)
            if sched is not None: bub.append((pipe_t[0], busy[0]))
        if rank == 0: print(f"step {i} loss {losses[-1]:.6f} time {dt:.4f} foreign {foreign[-1]:.2f}", flush=True)
    pk = torch.cuda.max_memory_allocated() / 2**20 if gpu else peak_rss_mb(); peaks = [pk]; bubs = [bub]
    if distributed:
        peaks = [None] * world; dist.all_gather_object(peaks, pk)
        bubs = [None] * world; dist.all_gather_object(bubs, bub)
    fw = foreign[a.warmup:]
    clean = [t for t, f in zip(times, fw) if gpu or f < 0.08]   # a GPU's step does not wait for the host's cores
    med = statistics.median(clean or times)
    toks = data.n * a.seq
    if a.profile:
        from torch.profiler import profile, ProfilerActivity
        sync()
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            t = time.perf_counter(); step(a.steps); pt = time.perf_counter() - t
        if rank == 0:
            json.dump(summarize(prof, pt, med), open(a.profile, "w"), indent=1)
    if rank == 0:
        r = dict(tag=a.tag, size=a.size, dtype=a.dtype + ("" if a.dtype == "fp32" else "-" + a.bf16_mode), world=world, tp=a.tp,
                 dp=dp, ddp=a.ddp, pp=a.pp, schedule=a.schedule if a.pp > 1 else None, threads=threads, compile=a.compile, hf=a.hf,
                 params=nparam, tokens_per_step=toks, step_s=round(med, 5), tok_s=round(toks / med, 1),
                 peak_rss_mb=[round(x) for x in peaks], peak_bytes=round(max(peaks) * 2**20), device=a.device, final_loss=losses[-1], losses=[round(x, 6) for x in losses],
                 times=[round(x, 4) for x in times], clean=len(clean), foreign=[round(f, 3) for f in fw])
        if sched is not None:
            r["pipe_s"] = [round(statistics.median(b[0] for b in bb), 4) for bb in bubs]
            r["busy_s"] = [round(statistics.median(b[1] for b in bb), 4) for bb in bubs]
        print("JSON " + json.dumps(r), flush=True)
    if distributed: dist.destroy_process_group()

# ---------------------------------------------------------------- profile buckets (self time, main thread)
def summarize(prof, wall, med):
    evs = [e for e in prof.events()]
    by_t = {}
    for e in evs: by_t.setdefault(e.thread, []).append(e)
    main_t = max(by_t, key=lambda t: sum(e.self_cpu_time_total for e in by_t[t] if e.name.startswith("aten::") or "Backward" in e.name))
    MM = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::", "aten::mkldnn", "aten::_addmm_activation")
    def same_inner(e):
        st = list(e.cpu_children)
        while st:
            c = st.pop()
            if c.name == e.name: return True
            st.extend(c.cpu_children)
        return False
    cat, names = {}, {}
    for e in by_t[main_t]:
        n, s = e.name, e.self_cpu_time_total / 1e6
        if n.startswith("aten::") and e.cpu_children and same_inner(e): k = "DTensor/wrapper op (outer self time)"
        elif n.startswith(MM): k = "matmul"
        elif "scaled_dot_product" in n: k = "sdpa"
        elif "c10d" in n or n.startswith("gloo") or "wait_tensor" in n: k = "comm (issue + wait)"
        elif "fused_adam" in n: k = "adamw kernel"
        elif n.startswith("FSDP::"): k = "fsdp python (self)"
        elif "fsdp::" in n: k = "fsdp copy ops"
        elif n.startswith("Optimizer."): k = "optimizer python (self)"
        elif "Backward" in n or n.startswith("autograd::") or "AccumulateGrad" in n: k = "autograd engine/node self"
        elif n.startswith("aten::"): k = "other aten (elementwise, norm, copy, ce)"
        else: k = "other ranges"
        cat[k] = cat.get(k, 0) + s
        d = names.setdefault(k, {}); c = d.setdefault(n, [0, 0.0]); c[0] += 1; c[1] += s
    tot = sum(cat.values())
    cat["python outside any op (modules, hooks, DTensor glue)"] = max(0.0, wall - tot)
    bg = {}
    for t, l in by_t.items():
        if t == main_t: continue
        for e in l:
            if "gloo" in e.name: bg[e.name] = bg.get(e.name, 0) + e.cpu_time_total / 1e6
    return dict(wall_profiled=wall, wall_median_unprofiled=med,
                percent={k: round(100 * v / wall, 1) for k, v in sorted(cat.items(), key=lambda x: -x[1])},
                seconds={k: round(v, 5) for k, v in cat.items()},
                background_gloo_s=bg, n_events_main=len(by_t[main_t]),
                top={k: {n: [c, round(s, 5)] for n, (c, s) in sorted(d.items(), key=lambda x: -x[1][1])[:14]} for k, d in names.items()})

if __name__ == "__main__":
    main()
