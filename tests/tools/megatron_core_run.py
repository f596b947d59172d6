#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with megatron-core's own classes on CPUs, save, and go on.

    pip install megatron-core==0.16.1     into an environment that has torch
    python tests/tools/megatron_core_run.py OUT --format fully_reshardable --tp 2 --pp 2 ...
    python tests/tools/megatron_core_run.py OUT --load CKPT ...      read a checkpoint, go on

It imports nothing of Weft. Ranks are processes of this host with gloo; what megatron-core asks of
a GPU is answered by the CPU. OUT gets the checkpoint of step --steps as Megatron-LM's
save_checkpoint lays it out, and run.json: the loss of each step, the --more steps after the save
among them. Samples come from megatron-core's GPTDataset over --data. --dump writes each
parameter's state in safetensors, under megatron-core's names (one rank only).
"""

import argparse
import contextlib
import json
import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SIZES: dict[str, int | float] = {  # flags, and what they are unless given
    "vocabulary": 64, "hidden": 16, "ffn": 24, "heads": 4, "groups": 2, "sequence": 16,
    "micro": 2, "global-batch": 8,  # sequences
    "lr": 3e-2, "min-lr": 3e-3, "warmup": 2, "decay": 40,  # iterations
}  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Answers whatever is asked of a GPU by the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, (str, int)) or (device is not None and device.type == "cuda"):
            kwargs["device"] = torch.device("cpu") if device != "meta" else device
        return function(*args, **kwargs)


def without_a_gpu() -> None:
    """Stand in for torch.cuda."""
    cuda = torch.cuda
    nothing = contextlib.nullcontext

    class Stream:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    cuda.synchronize = lambda *a: None  # type: ignore[assignment]
    cuda.current_stream = lambda *a: Stream()  # type: ignore[assignment, return-value]
    cuda.default_stream = lambda *a: Stream()  # type: ignore[assignment, return-value]
    cuda.Stream = lambda *a, **k: Stream()  # type: ignore[assignment, misc]
    cuda.stream = lambda *a: nothing()  # type: ignore[assignment]
    cuda.empty_cache = lambda: None  # type: ignore[assignment]
    cuda.device_count = lambda: 0  # type: ignore[assignment]
    cuda.nvtx.range_push = lambda *a, **k: 0  # type: ignore[assignment]
    cuda.nvtx.range_pop = lambda *a, **k: 0  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    kind_of = torch.Tensor.type

    def kind(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind_of(self, *args, **kwargs)
        plain = isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if plain else found

    torch.Tensor.type = kind  # type: ignore[assignment, method-assign]
    for kind, dtype in (("Float", torch.float), ("Int", torch.int), ("Long", torch.long),
                        ("BFloat16", torch.bfloat16), ("Half", torch.half),
                        ("Double", torch.double), ("Byte", torch.uint8)):  # fmt: skip

        class OfCpu:
            def __new__(cls, values: Any, dtype: torch.dtype = dtype) -> Any:  # type: ignore[misc]
                return torch.tensor(values, dtype=dtype)

        setattr(cuda, f"{kind}Tensor", OfCpu)


def datasets(args: Namespace) -> Any:
    """Return megatron-core's training set."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    class Text:
        vocab_size, pad = args.vocabulary, -1
        eod = eos = args.vocabulary - 1
        unique_identifiers: dict[str, str] = {}

    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=args.sequence, tokenizer=Text(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        path_to_cache=None, split="1,0,0", blend=get_blend_from_list([args.data]),
    )  # fmt: skip
    sizes = [args.train_iters * args.global_batch, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)\
        .build()[0]  # fmt: skip


def build(args: Namespace) -> tuple[list[Any], Any, Any]:
    """Return the model's chunks, the optimizer and the schedule."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    bf16 = args.dtype == "bf16"
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=args.ffn,
        num_attention_heads=args.heads, num_query_groups=args.groups,
        kv_channels=args.hidden // args.heads, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, layernorm_epsilon=1e-5,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp,
        qk_layernorm=args.qk_layernorm, bf16=bf16, apply_rope_fusion=False,
        params_dtype=torch.bfloat16 if bf16 else torch.float32, init_method_std=0.2,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32, attention_softmax_in_fp32=True,
        deallocate_pipeline_outputs=False, batch_p2p_comm=False, overlap_p2p_comm=False,
    )  # fmt: skip
    spec = {"normalization": "RMSNorm"}
    layer = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, **spec)
    chunks = []
    for stage in range(args.vp or 1):
        more: dict[str, Any] = {}
        if args.vp:
            mpu.set_virtual_pipeline_model_parallel_rank(stage)
            more = {"vp_stage": stage} if takes(mpu.is_pipeline_first_stage, "vp_stage") else {}
        # whole weights are drawn on every rank, so the seed alone says what they are
        torch.manual_seed(7 + 100 * (mpu.get_pipeline_model_parallel_rank() + args.pp * stage))
        first, last = {**more, "ignore_virtual": False}, {**more, "ignore_virtual": False}
        chunk = GPTModel(
            config, layer, args.vocabulary, args.sequence,
            pre_process=mpu.is_pipeline_first_stage(**first),
            post_process=mpu.is_pipeline_last_stage(**last),
            position_embedding_type="rope", rotary_base=10_000, parallel_output=True,
            share_embeddings_and_output_weights=args.tied,
            **({"vp_stage": stage} if more else {}),
        )  # fmt: skip
        with torch.no_grad():
            for name, weight in chunk.named_parameters():
                if "norm" in name:
                    weight += torch.randn_like(weight, dtype=torch.float) / 8
        if bf16:
            chunk = Float16Module(config, chunk)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=args.bucket_size is not None,
            use_distributed_optimizer=args.format != "plain",
            bucket_size=args.bucket_size,
        )
        chunks.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=stage > 0))
        chunks[-1].broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = None
    how = OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=0.1, adam_beta1=0.9,
        adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0, bf16=bf16,
        use_distributed_optimizer=args.format != "plain",
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(how, chunks)
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.warmup * args.global_batch,
        lr_decay_steps=args.decay * args.global_batch, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_style="constant",
        wd_incr_steps=args.train_iters * args.global_batch,
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip
    return chunks, optimizer, schedule


def takes(function: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(function).parameters


def step(args: Namespace, chunks: list[Any], data: Any, first: int, train: bool) -> float:
    """Run the micro-batches of the global batch at sample `first`; return the mean loss."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    starts = range(first + rank * args.micro, first + args.global_batch, ranks * args.micro)
    mask = torch.triu(torch.ones(args.sequence, args.sequence, dtype=torch.bool), 1)[None, None]

    def forward(batches: Any, model: Any) -> Any:
        rows = [data[i] for i in next(batches)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        positions = torch.arange(args.sequence).expand_as(tokens)

        def loss_of(output: torch.Tensor) -> Any:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return model(tokens, positions, mask, labels=labels), loss_of

    batches = [iter([range(i, i + args.micro) for i in starts]) for _ in chunks]
    found = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=batches if args.vp else batches[0],
        model=chunks if args.vp else chunks[0], num_microbatches=len(starts),
        seq_length=args.sequence, micro_batch_size=args.micro, forward_only=not train,
    )  # fmt: skip
    total = torch.tensor(
        [float(sum(each["loss"] for each in found)) if found else 0.0], dtype=torch.float64
    )
    dist.all_reduce(total)
    return float(total) / args.tp / ranks / len(starts)


def bare(chunk: Any) -> Any:
    """Return a model without its wrappers, as Megatron-LM saves it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def content(args: Namespace) -> dict[str, Any]:
    """Return what Megatron-LM's checkpointing.py calls the sharded state dict's metadata."""
    if args.format == "plain":
        return {"singleton_local_shards": args.singleton, "chained_optim_avoid_prefix": True}
    return {
        "distrib_optim_sharding_type": args.format,
        "singleton_local_shards": args.singleton,
        "chained_optim_avoid_prefix": True,
    }


def sharded(
    args: Namespace, chunks: list[Any], optimizer: Any, about: dict[str, Any], loading: bool
) -> dict[str, Any]:
    """Return what is saved, or what a load fills."""
    from megatron.core import parallel_state as mpu

    group = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    made: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        name = "model" if len(chunks) == 1 else f"model{i}"
        if args.vp:
            mpu.set_virtual_pipeline_model_parallel_rank(i)
        made[name] = bare(chunk).sharded_state_dict(metadata={**about, **group})
    if not args.no_optimizer:
        own = dict(made) if len(chunks) > 1 else made
        of_optimizer: dict[str, Any] = {"metadata": {**about, **group}}
        if args.megatron:  # an older one
            of_optimizer = {"sharding_type": args.format} if args.format != "plain" else {}
        made["optimizer"] = optimizer.sharded_state_dict(own, is_loading=loading, **of_optimizer)
    return made


def save(args: Namespace, chunks: list[Any], optimizer: Any, schedule: Any, iteration: int) -> None:
    from megatron.core import dist_checkpointing

    for kind in args.also:
        also = Namespace(**{**vars(args), "format": kind, "also": [], "out": f"{args.out}/{kind}"})
        save(also, chunks, optimizer, schedule, iteration)
    about = content(args)
    state = sharded(args, chunks, optimizer, about, False)
    state["opt_param_scheduler"] = schedule.state_dict()
    state |= {"checkpoint_version": 3.0, "iteration": iteration}
    state["num_floating_point_operations_so_far"] = 0
    state["args"] = Namespace(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=args.ffn,
        num_attention_heads=args.heads, num_query_groups=args.groups,
        kv_channels=args.hidden // args.heads, seq_length=args.sequence, iteration=iteration,
        consumed_train_samples=iteration * args.global_batch, consumed_valid_samples=0,
        add_position_embedding=True,
        skipped_train_samples=0, tensor_model_parallel_size=args.tp,
        global_batch_size=args.global_batch,
        pipeline_model_parallel_size=args.pp, virtual_pipeline_model_parallel_size=args.vp,
        data_parallel_size=args.dp, world_size=args.tp * args.pp * args.dp, seed=1234,
        micro_batch_size=args.micro, train_iters=args.train_iters,
        padded_vocab_size=args.vocabulary,
        params_dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32,
        use_distributed_optimizer=args.format != "plain", ckpt_fully_parallel_save=True,
        untie_embeddings_and_output_weights=not args.tied, num_experts=None,
        lr=args.lr, min_lr=args.min_lr, lr_decay_style="cosine", lr_warmup_iters=args.warmup,
        weight_decay=0.1, lr_decay_iters=args.decay, adam_beta1=0.9, adam_beta2=0.95,
        adam_eps=1e-8, clip_grad=1.0,
        bf16=args.dtype == "bf16",
    )  # fmt: skip
    place = Path(args.out) / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    more = {"content_metadata": about} if takes(dist_checkpointing.save, "content_metadata") else {}
    dist_checkpointing.save(state, str(place), **more)
    if dist.get_rank() == 0:
        (Path(args.out) / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load(args: Namespace, chunks: list[Any], optimizer: Any, schedule: Any) -> int:
    """Load as Megatron-LM's load_checkpoint does; return the iteration."""
    from megatron.core import dist_checkpointing

    root = Path(args.load)
    latest = (root / "latest_checkpointed_iteration.txt").read_text()
    place = str(root / f"iter_{int(latest):07d}")
    common = dist_checkpointing.load_common_state_dict(place)
    about = common.get("content_metadata") or content(args)
    if args.format != "plain":  # without Transformer Engine its state_dict needs a step's state
        for each in optimizer.chained_optimizers:
            each._init_optimizer_states_with_dummy_values()
            keep_step(each)
    wanted = sharded(args, chunks, optimizer, about, True)
    found = dist_checkpointing.load(wanted, place)
    for i, chunk in enumerate(chunks):
        bare(chunk).load_state_dict(found["model" if len(chunks) == 1 else f"model{i}"])
    if args.no_optimizer:
        optimizer.reload_model_params()
        return 0
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["opt_param_scheduler"])
    assert found["args"].consumed_train_samples == found["iteration"] * args.global_batch
    return int(found["iteration"])


def keep_step(optimizer: Any) -> None:
    """Let torch's Adam keep its step while a parameter's state loads.

    megatron-core 0.16.1 looks for it there, and gives all parameters one tensor, in which each
    would count; both only where neither Transformer Engine nor apex is installed.
    """
    load = optimizer._set_main_param_and_optimizer_states

    def with_step(param: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main]
        state["step"] = state["step"].clone()
        load(param, {"step": state["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = with_step


def dump(args: Namespace, chunks: list[Any], optimizer: Any) -> None:
    """Write {parameter, parameter.exp_avg, ...} of one rank to dump.safetensors."""
    from safetensors.torch import save_file

    (chunk,) = chunks
    names = {p: n.removeprefix("module.").removeprefix("module.") for n, p in
             chunk.named_parameters()}  # fmt: skip
    tensors = {name: p.detach().clone() for p, name in names.items()}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        masters = {}
        for plain, own in zip(
            getattr(each, "float16_groups", []), getattr(each, "fp32_from_float16_groups", []),
            strict=False,
        ):  # fmt: skip
            masters |= dict(zip(own, plain, strict=True))
        for param, state in each.optimizer.state.items():
            name = names[masters.get(param, param)]
            if param in masters:
                tensors[f"{name}.master"] = param.detach().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}.{kind}"] = state[kind].clone()
    save_file(tensors, Path(args.out) / "dump.safetensors")


def write_logits(args: Namespace, model: Any) -> None:
    """Write the logits of one row of tokens, 0 to s-1 modulo V, to logits.safetensors."""
    from safetensors.torch import save_file

    places = torch.arange(args.sequence)[None]
    mask = torch.triu(torch.ones(args.sequence, args.sequence, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = model(places % args.vocabulary, places, mask)
    save_file({"logits": logits.float().contiguous()}, Path(args.out) / "logits.safetensors")


def run(rank: int, args: Namespace) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = args.tp * args.pp * args.dp
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{args.out}/.store", rank=rank, world_size=world
    )
    with OnCpu():
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel import random as rng

        fork = lambda self, *a, **k: contextlib.nullcontext()  # noqa: E731
        rng.CudaRNGStatesTracker.fork = fork
        from megatron.core.optimizer import distrib_optimizer

        if hasattr(distrib_optimizer, "quantize_param_shard"):  # it asks for Transformer Engine
            distrib_optimizer.quantize_param_shard = lambda *a, **k: None
        if args.megatron:  # torch's private writer has an argument more than it had then
            from megatron.core.dist_checkpointing.strategies import filesystem_async
            from torch.distributed.checkpoint.filesystem import SerializationFormat

            numpy.product = numpy.prod  # type: ignore[attr-defined]
            write = filesystem_async._write_item
            filesystem_async._write_item = partial(
                write, serialization_format=SerializationFormat.TORCH_SAVE
            )
        mpu.initialize_model_parallel(
            args.tp, args.pp, virtual_pipeline_model_parallel_size=args.vp
        )
        data = datasets(args)
        chunks, optimizer, schedule = build(args)
        iteration = load(args, chunks, optimizer, schedule) if args.load else 0
        first_loss = step(args, chunks, data, iteration * args.global_batch, train=False)
        if args.load and world == 1:
            write_logits(args, chunks[0])
        losses: dict[int, float] = {}
        saved = args.steps if not args.load else iteration
        while iteration < saved + args.more:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            begin = iteration * args.global_batch
            losses[iteration + 1] = step(args, chunks, data, begin, train=True)
            fine, norm, _ = optimizer.step()
            assert fine
            schedule.step(args.global_batch)
            iteration += 1
            if iteration == saved and not args.load:
                save(args, chunks, optimizer, schedule, iteration)
                if args.dump and args.format == "plain":
                    dump(args, chunks, optimizer)
        if rank == 0:
            import megatron.core

            about = {"megatron-core": megatron.core.__version__, "first_loss": first_loss}
            about |= {"losses": losses, "torch": torch.__version__}
            (Path(args.out) / "run.json").write_text(json.dumps(about, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def write_data(args: Namespace) -> None:
    """Write documents to --data with megatron-core's own writer."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = numpy.random.RandomState(0)
    builder = IndexedDatasetBuilder(f"{args.data}.bin", numpy.uint16)
    for _ in range(120):
        start, stride = draw.randint(args.vocabulary), draw.randint(1, 4)
        length = draw.randint(5, 60)
        tokens = (start + stride * numpy.arange(length)) % (args.vocabulary - 1)
        builder.add_document(torch.from_numpy(tokens.astype(numpy.int64)), [length])
    builder.finalize(f"{args.data}.idx")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--data", help="prefix of .bin and .idx; left out: made under OUT")
    parser.add_argument("--format", default="plain", help="plain, or a distrib_optim_sharding_type")
    parser.add_argument("--also", nargs="*", default=[], help="save the same step in these too")
    parser.add_argument("--load")
    parser.add_argument("--megatron", help="folder that holds another megatron-core")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--vp", type=int)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps before the save")
    parser.add_argument("--more", type=int, default=20, help="steps after it")
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--bucket-size", type=int)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    for name in ("tied", "singleton", "qk-layernorm", "dump", "no-optimizer"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    args.out = str(Path(args.out).resolve())
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.megatron:
        sys.path.insert(0, args.megatron)
    if args.data is None:
        args.data = str(Path(args.out) / "text")
        write_data(args)
    # imported once, before the ranks are forked
    without_a_gpu()
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    torch.multiprocessing.start_processes(
        run, (args,), args.tp * args.pp * args.dp, start_method="fork"
    )
    (Path(args.out) / ".store").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
