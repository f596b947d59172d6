# SPDX-License-Identifier: Apache-2.0
"""Weights in Megatron's torch_dist format come in to the bit; hostile or foreign ones do not.

The directories are written with torch's own classes, in the names, shapes and parts that
megatron-core 0.16.1 writes. `interleave` puts a layer together in plain Python, apart from what the
tool does.
"""

import enum
import io
import json
import pickle
import random
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import pretrain_llama
from model import llama, qwen3
from model.llama import Llama, LlamaConfig, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.saved import stored
from tools.checkpoint import main
from tools.checkpoints.torch_dist import McoreCheckpoint
from training.checkpoint import CheckpointError, find_latest, load, parameter_pieces

V, PADDED, H, F, L, A, G = 251, 256, 48, 72, 3, 6, 2
D = H // A


def model_of(tied: bool, dtype: torch.dtype = torch.float32, file: Any = llama) -> Llama:
    config = LlamaConfig(V, H, F, L, A, G, max_position_embeddings=32, tied=tied)
    return file.Model(config, LayerContext(Grid(), dtype=dtype))


def weights_of(model: Llama) -> dict[str, Tensor]:
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    return {piece.name: piece.tensor.clone() for piece in pieces}


def interleave(ours: dict[str, Tensor], stacked: bool) -> dict[str, Tensor]:
    """Return Megatron's tensors: layers stacked, or numbered; q, k, v by group; padded."""
    found = {"decoder.final_layernorm.weight": ours["model.norm.weight"]}
    for name, theirs in (("model.embed_tokens", "embedding.word_embeddings"),
                         ("lm_head", "output_layer")):  # fmt: skip
        if f"{name}.weight" in ours:
            padding = torch.full((PADDED - V, H), 9.0).to(ours["model.norm.weight"].dtype)
            found[f"{theirs}.weight"] = torch.cat([ours[f"{name}.weight"], padding])
    layers = []
    for i in range(L):
        w = {n.split(".", 3)[3]: t for n, t in ours.items() if n.startswith(f"model.layers.{i}.")}
        q, k, v = (w[f"self_attn.{x}_proj.weight"] for x in "qkv")
        rows, per = [], A // G * D
        for g in range(G):
            rows += [q[g * per : (g + 1) * per], k[g * D : (g + 1) * D], v[g * D : (g + 1) * D]]
        gate_up = [w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]
        norms = {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
        layers.append({
            **{theirs: w[own] for theirs, own in norms.items() if own in w},
            "self_attention.linear_qkv.layer_norm_weight": w["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": torch.cat(rows),
            "self_attention.linear_proj.weight": w["self_attn.o_proj.weight"],
            "mlp.linear_fc1.layer_norm_weight": w["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat(gate_up),
            "mlp.linear_fc2.weight": w["mlp.down_proj.weight"],
        })  # fmt: skip
    for name in layers[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            found |= {f"decoder.layers.{i}.{name}": layers[i][name] for i in range(L)}
    return found


def boxes(shape: tuple[int, ...], stacked: bool) -> list[tuple[slice, ...]]:
    """Cut as two tensor-parallel ranks do, a layer at a time; here always by rows."""
    rows = len(shape) > 1 + stacked
    at = int(stacked)
    half = shape[at] // 2
    cuts = [slice(0, half), slice(half, shape[at])] if rows else [slice(0, shape[at])]
    layers = [(slice(i, i + 1),) for i in range(shape[0])] if stacked else [()]
    return [(*layer, cut) for layer in layers for cut in cuts]


def write_parts(place: Path, tensors: dict[str, Tensor], payload: Any = None) -> Path:
    """Write the format part by part, as ranks do, with bytes among them. payload: in place of each
    part's archive."""
    place.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"rng_state/shard_0.0_1.1": BytesStorageMetadata()}
    storage: dict[Any, Any] = {}
    with open(place / "__0_0.distcp", "wb") as zero, open(place / "__1_0.distcp", "wb") as one:
        files = [zero, one]
        for name, tensor in tensors.items():
            chunks = []
            stacked = name.startswith("decoder.layers.") and not name.split(".")[2].isdigit()
            for n, box in enumerate(boxes(tuple(tensor.shape), stacked)):
                part = tensor[box].clone()
                starts = torch.Size([s.start for s in box] + [0] * (tensor.dim() - len(box)))
                chunks.append(ChunkStorageMetadata(starts, part.shape))
                archive = io.BytesIO()
                torch.save(part if payload is None else payload, archive)
                file = files[n % 2]
                at = _StorageInfo(Path(file.name).name, file.tell(), len(archive.getvalue()))
                storage[MetadataIndex(name, starts)] = at
                file.write(archive.getvalue())
            about = TensorProperties(tensor.dtype)
            metadata[name] = TensorStorageMetadata(about, tensor.shape, chunks)
    (place / ".metadata").write_bytes(pickle.dumps(Metadata(metadata, None, storage)))
    write_format(place)
    return place


def write_format(place: Path, backend: str = "torch_dist") -> None:
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    torch.save({"args": "is not opened"}, place / "common.pt")


def convert(
    tmp_path: Path, source: Path, tied: bool = False, file: Any = llama, **more: Any
) -> int:
    config = file.hf_config(model_of(tied).config, "float32") | more
    (tmp_path / "sizes").mkdir(exist_ok=True)
    (tmp_path / "sizes" / "config.json").write_text(json.dumps(config))
    flags = ["--hf-config", str(tmp_path / "sizes"), "--save", str(tmp_path / "weft")]
    return main(["convert", "--from-mcore", str(source), *flags])


@pytest.mark.parametrize(
    "tied, dtype, stacked, file",
    [
        (False, torch.float32, True, llama),
        (True, torch.bfloat16, True, llama),
        (False, torch.float32, False, llama),
        (False, torch.float32, True, qwen3),
    ],
)
def test_weights_come_in_to_the_bit(tmp_path, capsys, tied, dtype, stacked, file):
    model = model_of(tied, dtype, file).initialize(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += torch.randn_like(weight) / 8
    ours = weights_of(model)
    write_parts(tmp_path / "ckpt" / "iter_0000007", interleave(ours, stacked))
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("7")
    assert convert(tmp_path, tmp_path / "ckpt", tied, file) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{PADDED - V} rows of the vocabulary beyond the {V} of " in said
    back = stored(tmp_path / "weft" / "step_00000000")
    assert back.keys() == ours.keys()
    assert [n for n in ours if back[n].dtype != dtype or not torch.equal(back[n], ours[n])] == []
    found, again = find_latest(str(tmp_path / "weft"), Grid()), model_of(tied, dtype, file)
    pieces = parameter_pieces(unique_parameters(again), hf_names(again), Grid())
    load(found, pieces, Grid())
    tokens = torch.arange(32).view(1, 32) * 5 % V
    with torch.no_grad():
        one, other = (m(tokens)[..., :V] for m in (again, model))  # the rest is padding
        assert torch.equal(one, other)


def test_torchs_own_writer(tmp_path):
    """One part a tensor, the optimizer's among them, and what else torch puts into .metadata."""
    ours = weights_of(model_of(False).initialize(4))
    theirs = interleave(ours, True)
    moments = {f"optimizer.state.exp_avg.{name}": t * 0 for name, t in theirs.items()}
    state = theirs | moments | {"decoder.layers._extra_state/shard_0_3": io.BytesIO(b"x")}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    write_format(tmp_path / "ckpt")
    assert convert(tmp_path, tmp_path / "ckpt") == 0
    back = stored(tmp_path / "weft" / "step_00000000")
    assert all(torch.equal(back[name], ours[name]) for name in ours) and len(back) == len(ours)


class Choice(enum.Enum):
    """Stands for the classes of Megatron's own that its arguments hold."""

    FLASH = 1


def write_progress(place: Path, **args: Any) -> None:
    """Write a common.pt as Megatron-LM's save_checkpoint does: its arguments, and much else."""
    known = {"consumed_train_samples": 4, "seq_length": 16, "attention_backend": Choice.FLASH}
    known |= {"params_dtype": torch.bfloat16, "names": ("a", None, {"b": 2.5}), **args}
    state = {"args": Namespace(**known), "checkpoint_version": 3.0, "iteration": 7}
    state |= {"optimizer": {"param_groups": [{"step": 7, "lr": 1e-3}]}, "rng": torch.zeros(3)}
    torch.save(state, place / "common.pt")


def test_a_run_goes_on_in_the_data_where_megatron_was(tmp_path, capsys):
    """It begins at the iteration and the sample that common.pt names."""
    source = tmp_path / "ckpt" / "iter_0000007"
    write_parts(source, interleave(weights_of(model_of(False).initialize(4)), True))
    write_progress(source)
    assert convert(tmp_path, source) == 0
    said = capsys.readouterr().out
    assert "--no-load-optim --data-order megatron: iteration 7, 4 samples consumed" in said
    state = json.loads((tmp_path / "weft" / "step_00000007" / "state.json").read_text())
    assert (state["iteration"], state["consumed_samples"], state["consumed_tokens"]) == (7, 4, 64)
    c = model_of(False).config
    words = f"""
        --num-layers {L} --hidden-size {H} --ffn-hidden-size {F} --num-attention-heads {A}
        --group-query-attention --num-query-groups {G} --vocab-size {V} --seq-length 16
        --max-position-embeddings 32 --untie-embeddings-and-output-weights --device cpu
        --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 9 --log-interval 1
        --norm-epsilon {c.norm_epsilon} --tokenizer-type NullTokenizer --mock-data
        --load {tmp_path}/weft --no-load-optim --data-order megatron
    """.split()
    assert pretrain_llama.main(words) == 0
    said = capsys.readouterr().out
    assert "at iteration 7, 4 samples consumed" in said and "finished: 9 iterations" in said


@pytest.mark.parametrize(
    "args, why",
    [
        ({"consumed_train_samples": -1}, "are not counts"),
        ({"consumed_train_samples": "many"}, "are not counts"),
        (None, "the run's progress is"),
    ],
)
def test_without_its_progress_a_checkpoint_begins_at_sample_0(tmp_path, capsys, args, why):
    source = write_parts(
        tmp_path / "ckpt", interleave(weights_of(model_of(False).initialize(4)), True)
    )
    if args is not None:
        write_progress(source, **args)
    assert convert(tmp_path, source) == 0
    said = capsys.readouterr()
    assert why in said.err and "begins at sample 0" in said.err and "--finetune" in said.out
    assert (tmp_path / "weft" / "step_00000000").is_dir()


def test_nothing_of_a_common_pt_is_executed(tmp_path, capsys):
    mark = tmp_path / "executed"
    source = write_parts(
        tmp_path / "ckpt", interleave(weights_of(model_of(False).initialize(4)), True)
    )
    write_progress(source, bomb=Bomb(mark))
    assert convert(tmp_path, source) == 0 and not mark.exists()
    assert "iteration 7, 4 samples consumed" in capsys.readouterr().out


@pytest.fixture
def sound(tmp_path):
    return write_parts(
        tmp_path / "ckpt", interleave(weights_of(model_of(False).initialize(4)), True)
    )


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_nothing_is_executed(tmp_path, sound, capsys):
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(mark))).close()
    assert mark.exists(), "the bomb works"
    mark.unlink()
    (sound / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    assert convert(tmp_path, sound) == 2
    assert ": it names io.open, which is not in" in capsys.readouterr().err
    shutil.rmtree(sound)
    tensors = interleave(weights_of(model_of(False).initialize(4)), True)
    write_parts(sound, tensors, payload=Bomb(mark))
    assert convert(tmp_path, sound) == 2
    assert "it names io.open" in capsys.readouterr().err
    assert not mark.exists() and not (tmp_path / "weft" / "step_00000000").exists()


def test_no_damage_is_more_than_a_refusal(tmp_path, sound):
    """Flipped and cut bytes of .metadata: it opens, or CheckpointError says why not."""
    data, rng = (sound / ".metadata").read_bytes(), random.Random(0)
    refused = 0
    for i in range(90):
        bad = bytearray(data)
        if i % 3:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        else:
            del bad[rng.randrange(len(bad)) :]
        (sound / ".metadata").write_bytes(bad)
        try:
            McoreCheckpoint(sound)
        except CheckpointError:
            refused += 1
    assert refused > 45


def test_a_flipped_bit_of_a_weight_is_found(tmp_path, sound, capsys):
    """The archives of torch.save have a CRC of each of their members."""
    data = bytearray((sound / "__1_0.distcp").read_bytes())
    data[data.index(b"data/0") + 200] ^= 1
    (sound / "__1_0.distcp").write_bytes(data)
    assert convert(tmp_path, sound) == 2
    assert "__1_0.distcp: " in capsys.readouterr().err


def without(name):
    def change(place: Path) -> None:
        tensors = interleave(weights_of(model_of(False)), True)
        del tensors[name]
        write_parts(place, tensors)

    return change


def beside(name, *shape):
    def change(place: Path) -> None:
        tensors = interleave(weights_of(model_of(False)), True)
        write_parts(place, tensors | {name: torch.zeros(shape)})

    return change


def legacy(place: Path) -> None:
    shutil.rmtree(place)
    (place / "mp_rank_00").mkdir(parents=True)


def edit(old: bytes, new: bytes):
    def change(place: Path) -> None:
        data = (place / ".metadata").read_bytes()
        assert old in data and len(old) == len(new)
        (place / ".metadata").write_bytes(data.replace(old, new))

    return change


def remove(*names):
    def change(place: Path) -> None:
        for name in names:
            (place / name).unlink()

    return change


def shorten(name, length):
    def change(place: Path) -> None:
        (place / name).write_bytes((place / name).read_bytes()[:length])

    return change


def emptied(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def started(place: Path) -> None:
    emptied(place)
    (place / "iter_0000007").mkdir()


def tracked(place: Path) -> None:
    started(place)
    (place / "latest_checkpointed_iteration.txt").write_text("9")


EXPERT = "decoder.layers.mlp.experts.linear_fc1.weight"
BIAS = "decoder.layers.self_attention.linear_qkv.bias"


@pytest.mark.parametrize(
    "change, said",
    [
        (legacy, "mp_rank_* directories are pickles, which can run code; only Megatron's torch_di"),
        (lambda place: write_format(place, "zarr"), "says 'zarr'; only the format torch_dist"),
        (beside(EXPERT, L, 4), f"ckpt: it is a mixture of experts ({EXPERT}), and only dense"),
        (beside(BIAS, L, 80), f"{BIAS} is not a tensor of the dense Llama"),
        (without("output_layer.weight"), "the tensor output_layer.weight is missing; it has "),
        (beside("embedding.word_embeddings.weight", 250, H), "asks for at least [251, 48]"),
        (beside("decoder.layers.mlp.linear_fc2.weight", L + 1, H, F), "asks for [3, 48, 72]"),
        (edit(b"__1_0.distcp", b"../.._distcp"), "not a .distcp file next to it"),
        (edit(b"float32", b"float16"), "not torch.float16"),
        # saves that were cut off, or copied in part
        (
            remove("__1_0.distcp"),
            "1 of 2 required files are incomplete: __1_0.distcp, of ",
        ),
        (shorten("__0_0.distcp", 100), "__0_0.distcp has 100 bytes and needs at least "),
        (shorten("__0_0.distcp", -1), "__0_0.distcp has "),
        (shorten(".metadata", 0), ".metadata, the index of its tensors, has 0 bytes: the save was"),
        (remove(".metadata"), ".metadata, the index of its tensors, is missing: the save was cut"),
        (shorten(".metadata", 50), ".metadata (50 bytes): "),
        (shorten("metadata.json", 0), "(0 bytes): the save was cut off"),
        (remove("metadata.json"), "metadata.json, which Megatron writes last, is missing (2 .dist"),
        (remove("metadata.json", ".metadata"), ".metadata is missing): the save was cut off"),
        (shutil.rmtree, "ckpt: No such file or directory"),
        (started, "latest_checkpointed_iteration.txt is missing, which Megatron writes after a sa"),
        (tracked, "names iter_0000009, which is not there; there are iter_0000007"),
        (emptied, "there is no metadata.json, no .metadata and no .distcp file"),
        (
            beside("decoder.layers.mlp.router.weight", L, 4, H),
            "ckpt: it is a mixture of experts (decoder.layers.mlp.router.weight), and only dense",
        ),
    ],
)
def test_what_is_refused(tmp_path, sound, capsys, change, said):
    change(sound)
    assert convert(tmp_path, sound) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "weft" / "step_00000000").exists()


def test_a_model_s_folder_without_config_json_is_named(tmp_path, sound, capsys):
    flags = ["--hf-config", str(tmp_path / "no"), "--save", str(tmp_path / "weft")]
    assert main(["convert", "--from-mcore", str(sound), *flags]) == 2
    assert f"--hf-config {tmp_path}/no: config.json: No such file" in capsys.readouterr().err


def test_flags_that_go_together(tmp_path, capsys):
    assert main(["convert", "--from-mcore", "a", "--save", "b"]) == 2
    assert "--from-mcore needs --hf-config" in capsys.readouterr().err
    assert main(["convert", "--from-hf", "a", "--save", "b", "--hf-config", "c"]) == 2
    assert "--hf-config can only be used with --from-mcore" in capsys.readouterr().err
