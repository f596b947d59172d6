# SPDX-License-Identifier: Apache-2.0
"""Rows of gpu-check that measure experts, loss curves and peers: that they find what is wrong.

That each row runs at small sizes, and what gpu-check does where one fails: test_gpu_check.py.
"""

import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mpu.layers import dispatch
from mpu.layers.experts import RECIPE, GroupedLinear, grouped_product, runs
from tests.gpu import curves, moe, moe_rank, overlap_peers
from tests.gpu.row import Row, Skip
from tests.gpu.row import main as row_main
from tests.gpu.summary import LINES, append, read, text


def checked(row: Row) -> dict[str, bool]:
    """Return the checks of a row by name, and whether each held."""
    return {line["what"]: line["ok"] for line in read(row.path) if "ok" in line}


# ---- products and moves of experts ----


def shifted(x: Any, weights: Any, counts: Any, on_gpu: bool) -> Any:
    """Multiply the rows of each expert by the next one's weights."""
    return grouped_product(x, weights.roll(1, 0), counts, on_gpu)


def overwrites(layer: GroupedLinear, x: Any, dy: Any, counts: Any) -> None:
    """Write each micro-batch's gradient over the one before."""
    layer.ctx.sink.written.clear()
    real_wgrad(layer, x, dy, counts)


def leaves_empty(layer: GroupedLinear, x: Any, dy: Any, counts: Any) -> None:
    """Leave the gradient of an expert without rows as it was."""
    main, fresh = layer.ctx.sink.grad_slot(layer.weight)
    grads = main.view(-1, layer.out_features, layer.in_features)
    for e, low, high in runs(counts):
        if high > low:
            RECIPE.accumulate(grads[e], fresh, x[low:high], dy[low:high])


def loses_last(rows: Any, place: Any, weights: Any, *rest: bool) -> Any:
    """Add all outputs of a token but the last."""
    return real_sum(rows, place[:, :-1], None if weights is None else weights[:, :-1], *rest)


real_wgrad, real_sum = GroupedLinear.wgrad, dispatch._sum
# what is wrong: where, what is put there, and what the names of the checks that fail hold
FAULTS = {
    "nothing": (None, "", None, set()),
    "weights of another expert": (moe, "grouped_product", shifted, {"forward", "dgrad"}),
    "wgrad overwrites": (GroupedLinear, "wgrad", overwrites, {"wgrad, layer, twice"}),
    "wgrad of an empty expert": (GroupedLinear, "wgrad", leaves_empty, {"wgrad, layer"}),
    "an output is lost": (dispatch, "_sum", loses_last, {"combine, of", "dispatch, backward"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_products_and_moves_of_experts_are_held_against_float64(tmp_path, monkeypatch, fault):
    where, name, wrong, fails = FAULTS[fault]
    if where:
        monkeypatch.setattr(where, name, wrong)
    some = {"a model": moe.TINY_LAYERS["Mixtral 8x7B"]}
    monkeypatch.setattr(moe, "TINY_LAYERS", some)
    row = Row("moe-kernels", tmp_path / LINES, "cpu", True)
    moe.kernels(row)
    held = checked(row)
    wrong_ones = [what for what, ok in held.items() if not ok]
    assert len(held) == 2 * 13 and row.failed == len(wrong_ones)
    assert bool(wrong_ones) == bool(fails)
    for part in fails:
        assert any(part in what for what in wrong_ones), (part, wrong_ones)
    for what in wrong_ones:
        assert any(part in what for part in fails), what
    counts = [line for line in read(row.path) if line["what"].endswith("counts")]
    assert [line["least"] for line in counts] == [48, 0] and counts[1]["most"] > 48
    timed = [line for line in read(row.path) if "tflops" in line or "gb_per_second" in line]
    assert len(timed) == 2 * (2 * 6 + 4)


def test_a_way_that_cannot_run_here_is_skipped(tmp_path, monkeypatch):
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("grouped_mm: not on this device")

    monkeypatch.setattr(F, "grouped_mm", absent)
    monkeypatch.setattr(moe, "TINY_LAYERS", {"a model": moe.TINY_LAYERS["Mixtral 8x7B"]})
    row = Row("moe-kernels", tmp_path / LINES, "cpu", True)
    moe.kernels(row)
    why = [line["skipped"] for line in read(row.path) if "skipped" in line]
    assert row.failed == 0 and why == ["RuntimeError: grouped_mm: not on this device"] * 4


# ---- a rank of the overlap of experts ----


def test_a_rank_notes_its_threads_and_the_plans_that_cudnn_built(monkeypatch):
    noted = moe_rank.Noted()
    monkeypatch.setattr(threading.Thread, "start", noted.starting(threading.Thread.start))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted.warned
        for caches in (2, 1, 1):  # two threads or directions, then one more in each step
            for _ in range(caches):
                for looked_up in range(1, 5):
                    rate = 100 * (looked_up - 1) // looked_up
                    text = f"SDPA Cache Called {looked_up} times. Hit rate: {rate}%"
                    warnings.warn(text, stacklevel=1)
                thread = threading.Thread(target=lambda: None)
                thread.start()
                thread.join()
            noted.after_step()
    assert noted.plans == [2, 3, 4] == noted.started
    assert moe.most(noted.plans) == {"last": 4, "a_step": 1}
    assert len(noted.threads) in (0, 3)  # 0 where there is no /proc


# ---- loss curves ----


def recorded(path: Path, name: str, losses: list[float], of: str = "a text") -> None:
    more = {"text": of, "device": "cpu", "validation": [[len(losses), losses[-1]]]}
    append(path, {"row": f"curve-{name}", "what": "losses", "loss": losses, **more})


def test_a_curve_is_compared_with_bf16s_on_the_same_text_and_drawn(tmp_path):
    path = tmp_path / LINES
    draw = torch.Generator().manual_seed(1)
    shared = 1.0 + 0.2 * torch.randn(400, generator=draw)  # what a batch does to every run
    for name, more in {"fp8-tensorwise": 0.01, "fp8-blockwise": 0.05}.items():
        losses = shared + more + 0.001 * torch.randn(400, generator=draw)
        recorded(path, name, losses.tolist())
    row = Row("curve-fp8-tensorwise", path, "cpu", False)
    with pytest.raises(Skip, match="no such losses of curve-bf16"):
        curves.compare(row, curves.recorded(row))
    recorded(path, "bf16", shared.tolist(), "another text")
    assert curves.recorded(row).keys() == {"fp8-tensorwise", "fp8-blockwise"}
    recorded(path, "bf16", shared.tolist())
    for name in ("fp8-tensorwise", "fp8-blockwise"):
        row = Row(f"curve-{name}", path, "cpu", False)
        curves.compare(row, curves.recorded(row))
        line = read(path)[-1]
        assert line["mean"] == pytest.approx(0.01 if "tensor" in name else 0.05, abs=5e-4)
        assert line["error_of_mean"] < 5e-4 and line["ok"] == ("tensor" in name)
        assert line["steps"] == 100 and line["validation_of_bf16"] == pytest.approx(
            shared[-1].item(), rel=1e-5
        )
    short = text(read(path), {})
    assert "curve-fp8-tensorwise: +0.01" in short and "curve-fp8-blockwise: +0.05" in short
    curves.picture(tmp_path / "curves.png", curves.recorded(row))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_of_the_curves_is_the_same_each_time_and_no_file_is_in_both(tmp_path):
    from training.data.indexed import IndexedTokens

    about = [curves.write_text(tmp_path / str(i), tiny=True) for i in range(2)]
    assert about[0] == about[1] and min(about[0]["files"].values()) > 0
    parts = [IndexedTokens(str(tmp_path / "0" / name)) for name in ("train", "heldout")]
    files = sum(len(part) for part in parts)
    assert sum(len(part.tokens) for part in parts) == about[0]["bytes"] + files
    ends = [Counter(part.tokens.tolist())[curves.END] for part in parts]
    assert ends == [about[0]["files"]["train"], about[0]["files"]["heldout"]]


# ---- torch's fused operations ----


def of_torch(comm: Any) -> list[float]:
    """Compute each shape by torch's fused operations, in the form that they have without CUDA."""
    import torch.distributed._symmetric_memory as symmetric_memory

    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    errors = []
    for shape in overlap_peers.shapes(True, comm.size):
        draw = torch.Generator().manual_seed(comm.rank)
        rows = shape.rows * (1 if shape.gathers else comm.size)
        x = torch.randn(rows, shape.k, generator=draw)
        w = torch.randn(shape.o, shape.k, generator=draw)
        got = overlap_peers.of_torch(shape, x, w, dist.group.WORLD.group_name)
        if shape.gathers:
            parts = [torch.empty_like(x) for _ in range(comm.size)]
            dist.all_gather(parts, x)
            want = torch.cat(parts) @ w.t()
        else:
            want = x @ w.t()
            dist.all_reduce(want)
            want = want[comm.rank * shape.rows : (comm.rank + 1) * shape.rows]
        errors.append(((got - want).norm() / want.norm()).item())
    return errors


def test_torchs_fused_operations_compute_what_ours_do(world):
    for errors in world(2).run(of_torch):
        assert len(errors) == 4 and max(errors) < 1e-5


def test_shapes_are_those_of_tensor_parallel_8():
    found = {s.name: s for s in overlap_peers.shapes(False, 8)}
    gate, down = found["Llama 3 70B, gate and up"], found["Llama 3 70B, down"]
    assert (gate.rows, gate.k, gate.o) == (1024, 8192, 7168) and gate.gathers
    assert (down.rows, down.k, down.o) == (1024, 3584, 8192) and not down.gathers
    assert found["Llama 3 8B, qkv"].o == 768 and len(found) == 8


# ---- the rows as they are typed ----


def test_the_flags_of_every_row_are_taken_at_full_size():
    from model.load import of_checkpoint
    from pretrain_llama import model_provider
    from tests.gpu import small
    from training.flags.parse import parse
    from training.run.model_profile import model_profile

    plan = ["--device", "cuda", "--dry-run"]  # no GPU is here
    step = [*small.small_flags(False), *small.batch_flags(4, 4)]
    data = ["--train-data-path", "x", "--valid-data-path", "y", "--seed", "1"]
    runs = {name: [*curves.run_flags(False, 1500), *words.split(), *data]
            for name, (words, _) in curves.CURVES.items()}  # fmt: skip
    for name, words in {"step": step, **runs}.items():
        config = parse([*words, *plan], 1, None, of_checkpoint)
        counts = model_profile(config.with_vocab(257), model_provider)
        assert 1.58e8 < counts.parameters < 1.61e8, name
        assert config.batch.global_batch_size * config.model.seq_length == 16384
    words = [*moe.overlap_flags(False), moe.OVERLAP, "--distributed-backend", "gloo", *plan]
    assert parse(words, 2, None, of_checkpoint).parallel.expert_model_parallel_size == 2


NEW = ["curve-fp8-blockwise", "step-160m", "overlap-peers", "ep-overlap"]


@pytest.mark.prove
@pytest.mark.parametrize("name", NEW)
def test_a_row_at_small_sizes(tmp_path, name):
    path = tmp_path / LINES
    code = row_main([name, "--out", str(path), "--device", "cpu", "--tiny"])
    lines = {line["what"]: line for line in read(path)}
    assert code == 0, lines
    if name == "ep-overlap":
        started = lines["with the overlap: threads started of a rank"]["of_ranks"]
        assert len(started) == 2 and "with the overlap: cuDNN's attention plans" not in lines
    if name == "overlap-peers":
        assert lines["tiny, qkv"]["of_each"].keys() >= {"none", "ring", "symmetric"}
        assert "need CUDA" in lines["tiny, qkv: torch"]["skipped"]
