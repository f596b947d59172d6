# SPDX-License-Identifier: Apache-2.0
"""Find the first difference between two runs' logs and checkpoints, without the product's code.

A function ..._differ or ..._differs returns the difference as text, base's value first, or "".
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# settings of removed or renamed flags, which are only in the state.json of older commits
REMOVED = (
    "fault.checksum_messages", "parallel.tp_comm_overlap_cache", "float8.fp8_auto",
    "parallel.core_attention_backend",  # parallel.attention_backend
    "fault.peer_checkpoint", "fault.empty_unused_memory_level", "data.data_local_copy",
    "float8.fp8_param_gather", "gpu.cuda_graph", "gpu.cuda_graph_warmup_steps",
    "parallel.hierarchical_context_parallel_sizes",
    "run.memory_picture_rank", "checkpoint.save_hf_max_shard_size", "data.validation_set_names",
    "optimizer.muon_coefficients", "optimizer.muon_use_syrk", "float8.fp8_margin",
    "moe.moe_token_drop_policy", "parallel.wgrad_deferral_limit",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split", "gpu.cpu_offloading_num_layers",
    "model.mup_attn_scale_power",
)  # fmt: skip
KIND = "parallel.cp_comm_type"
LOGGED = ("iteration", "consumed_samples", "loss", "grad_norm", "lr")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the logged values of each step, without times and speeds; JSON keeps every bit."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [{key: line[key] for key in LOGGED} for line in lines]


def rows_differ(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> str:
    """Return the first difference of two logs, or ""."""
    if len(want) != len(got):
        return f"{len(want)} steps are logged in base, here {len(got)}"
    for one, other in zip(want, got, strict=True):
        if where := value_differs(one, other):
            return f"iteration {one['iteration']}: {where}"
    return ""


def saves_differ(want: Path, got: Path, steps: list[str]) -> str:
    """Return the first difference between the checkpoints in two directories, or "".

    Tensor files are compared first, then JSON files, and last the manifest, which has the hashes of
    all others. Settings and hashes that only the new state.json has are ignored, as are REMOVED
    ones, and the hash and the folder of the model's source file.
    """
    for folder in (want, got):
        saved = sorted(path.name for path in folder.glob("step_*"))
        if saved != steps:
            return f"{folder} holds {saved}, not {steps}"
    for step in steps:
        names = [{path.name for path in (folder / step).iterdir()} for folder in (want, got)]
        if names[0] != names[1]:
            return f"{step}: only one side has {sorted(names[0] ^ names[1])}"
        by_kind = sorted(names[0], key=lambda n: (n == "manifest.json", n.endswith("json"), n))
        for name in by_kind:
            one, other = want / step / name, got / step / name
            if one.read_bytes() == other.read_bytes():
                continue
            where = file_differs(one, other)
            grown = name == "state.json" and json.loads(one.read_text()) != json.loads(
                other.read_text()
            )
            if where or not (grown or name == "manifest.json"):
                return f"{step}/{name}: {where or 'bytes, not contents'}"
    return ""


def file_differs(one: Path, other: Path) -> str:
    """Return the first difference in the contents of two files of a checkpoint, or ""."""
    if one.suffix == ".json":
        here, there = json.loads(one.read_text()), json.loads(other.read_text())
        if one.name == "manifest.json":  # it has the hashes of state.json and of its settings
            for manifest in (here, there):
                manifest.get("files", {}).pop("state.json", None)
                for key in ("config_digest", "digest"):
                    manifest.pop(key, None)
        if one.name == "state.json":
            here.pop("fp8_auto", None)  # what that flag chose
            files = [state.get("config", {}).get("model.model_file") for state in (here, there)]
            for state, file in zip((here, there), files, strict=True):
                state.pop("model_digest", None)  # of the source of the model's file
                if file:  # its folder differs between the trees
                    state["config"]["model.model_file"] = Path(file).name
                    words = state.get("command_line", ())
                    state["command_line"] = [Path(w).name if w == file else w for w in words]
                if files[0] != files[1]:
                    state.pop("config_digest", None)
            here["config"] = {k: v for k, v in here.get("config", {}).items() if k not in REMOVED}
            if isinstance(kinds := here["config"].get(KIND), list) and len(kinds) == 1:
                here["config"][KIND] = kinds[0]  # it was a list, with one kind for all layers
        if one.name == "state.json" and here.get("config", {}).keys() != there["config"].keys():
            there["config_digest"] = here.get("config_digest")  # a hash of all settings
        return value_differs(here, there, more=one.name == "state.json")
    here, there = load_file(one), load_file(other)
    if here.keys() != there.keys():
        return f"only one side has {sorted(here.keys() ^ there.keys())[:3]}"
    for name, tensor in here.items():
        if where := tensor_differs(tensor, there[name]):
            return f"{name}: {where}"
    return ""


def tensor_differs(one: torch.Tensor, other: torch.Tensor) -> str:
    """Return the first element whose bits differ in two tensors, or ""."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {list(one.shape)}, here {other.dtype} {list(other.shape)}"
    size = one.element_size()
    bits = [t.contiguous().view(-1).view(torch.uint8).view(-1, size) for t in (one, other)]
    unlike = (bits[0] != bits[1]).any(1).nonzero().flatten()
    if not len(unlike):
        return ""
    at = int(unlike[0])
    values = [t.flatten()[at].item() for t in (one, other)]
    return f"{len(unlike)} of {one.numel()} differ, element {at}: {values[0]!r}, here {values[1]!r}"


def value_differs(one: Any, other: Any, at: str = "", more: bool = False) -> str:
    """Return where two JSON values first differ, and how, or "".

    more: ignore keys that only `other` has.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one and not more)]:
            if key not in one or key not in other:
                return f"{at}{key} is only in {'base' if key in one else 'new'}"
            if where := value_differs(one[key], other[key], f"{at}{key}: ", more):
                return where
        return ""
    return "" if one == other else f"{at}{one!r}, here {other!r}"
