# SPDX-License-Identifier: Apache-2.0
"""Make a mixture of experts of a dense model: every expert is a copy of its MLP.

A token's weights add up to 1 and its experts are equal, so the first loss is the dense model's,
whatever the router chooses (Komatsuzaki et al. 2022, Sparse upcycling, arXiv:2212.05055).
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model import llama, moe, qwen3
from model.load import load_model_file, model_file_of, saved_config
from mpu.param import draw_normal
from tools.checkpoints.convert_huggingface import check_shapes, expected_tensors
from tools.checkpoints.copy import open_newest, save_new
from training.checkpoint import NamedPiece
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.pieces import whole
from training.checkpoint.stream import attached, stream
from training.data.tokenizer import tokenizer_of
from training.run.export import tokenizer_files
from training.run.waiting import Progress

DENSE = {llama.__file__: False, qwen3.__file__: True}  # whether queries and keys are normalised


def upcycle(
    place: Path, root: Path, experts: int, topk: int, seed: int, progress: Progress
) -> tuple[Path, Path]:
    """Write the newest checkpoint of a dense model, or a Hugging Face directory, with experts.

    experts, topk: of each layer, and of a token. seed: of the routers' weights. Return the
    directories read and written. Raises ValueError for a model that is neither a Llama nor a Qwen3.
    """
    if topk > experts:
        raise ValueError(f"--moe-router-topk {topk} is more than --num-experts {experts}")
    found = open_newest(place, hashed=True, progress=progress)
    sizes, saved = found.state.get("hf_config"), found.state.get("config")
    if not isinstance(sizes, dict):
        raise ValueError(f"{found.directory}: state.json has no hf_config, the model's sizes")
    file = model_file_of(sizes, saved)
    if file.__file__ not in DENSE:
        raise ValueError(
            f"--upcycle {place}: its model is {Path(file.__file__).name}, and only a dense Llama "
            "or Qwen3 can become a mixture of experts"
        )
    dense = saved_config(file, sizes, saved)
    normalised = DENSE[file.__file__]
    config = moe.MoEConfig(
        **{field.name: getattr(dense, field.name) for field in fields(dense)},
        num_experts=experts,
        moe_router_topk=topk,
        qk_layernorm=normalised,
    )
    check_shapes(found, expected_tensors(file, dense))
    copies, pieces = moe.dense_names(config), list[NamedPiece]()
    for name, shape in expected_tensors(load_model_file(moe.__file__), config).items():
        source = copies.get(name, name)
        if source in found.index:
            (piece,) = stream(found, [source])
            pieces.append(replace(piece, name=name))
        else:
            stored = pieces[0].tensor.dtype
            pieces.append(drawn(name, shape, stored, dense.init_method_std, seed))
    dtype = str(pieces[0].tensor.dtype).removeprefix("torch.")
    token_ids = {
        k: sizes[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in sizes
    }
    state: dict[str, Any] = {"iteration": 0, "consumed_samples": 0}
    if isinstance(found, HuggingFaceDirectory):
        files = tokenizer_files(found.directory)
        state |= tokenizer_of(files)
    else:
        files = attached(found)
        tokens = ("tokenizer_type", "tokenizer_model")
        state |= {k: found.state[k] for k in tokens if k in found.state}
    state["hf_config"] = {**moe.hf_config(config, dtype), **token_ids}
    made = save_new(root, pieces, progress, step=0, state=state, attach=files)
    return found.directory, made


def drawn(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, std: float, seed: int
) -> NamedPiece:
    """Return a router's weight, drawn as in a new run."""

    def fetch() -> Tensor:
        weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        draw_normal(weight, [name], std, seed)
        return weight.detach()

    return whole(name, torch.empty(shape, dtype=dtype, device="meta"), fetch)
