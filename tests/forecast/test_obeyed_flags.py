# SPDX-License-Identifier: Apache-2.0
"""Each module of a model is replaced by one with a forward of its own: every flag is obeyed, which
shows in the loss and in each gradient (fp64), or refused before the first step by its name.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from forecast.obeyed_flags import check_flags
from model import llama
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.layers.fused import ResidualRMSNorm, RMSNorm
from mpu.layers.linear_cross_entropy import linear_cross_entropy
from mpu.param import unique_parameters
from pretrain_llama import model_provider
from tests.model.test_worked_forks import case_of, equal
from tests.model.twin import run_cases
from tests.sampling import sampled
from training.flags.parse import parse
from training.settings.layer_options import recompute_of

SIZES = """
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4
    --num-query-groups 2 --group-query-attention --kv-channels 32 --seq-length 16 --vocab-size 50
    --micro-batch-size 8 --global-batch-size 8 --mock-data --train-iters 1 --lr 1e-3 --device cpu
    --fp64 --untie-embeddings-and-output-weights
"""
ON_CUDA = SIZES.replace("--device cpu", "--device cuda --dry-run").replace("--fp64", "--bf16")
FUSED = "--fused-linear-cross-entropy"
FLAGS = (
    FUSED,
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--cpu-offload-activations",
    "--cpu-offload-activations --offload-modules mlp.down attention",
)
# a module's class in model/llama.py, and its class there with a forward of its own: each scales
SCALED = {
    "VocabParallelEmbedding": "super().forward(*a) * 1.5",
    "ColumnParallelLinear": "super().forward(*a) * 1.5",
    "tanh head": "torch.tanh(super().forward(*a))",
    "z loss head": "super().forward(*a)",
    "RowParallelLinear": "super().forward(*a) * 1.5",
    "RMSNorm": "super().forward(*a) * 1.5",
    "ResidualRMSNorm": "tuple(y * x for y, x in zip(super().forward(*a), (1.5, 1.0)))",
    "Attention": "super().forward(*a) * 1.5",
    "MLP": "super().forward(*a) * 1.5",
    "Block": "super().forward(*a) * 1.5",
}
OUTPUT = ("ColumnParallelLinear", "tanh head")  # the head is one of them


def fork(folder: Path, name: str, edits: dict[str, str] | None = None) -> Path:
    """Write model/llama.py with each use of one class replaced by a subclass of it."""
    text, path = Path(llama.__file__).read_text(), folder / f"{name.replace(' ', '_')}.py"
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    if name in SCALED:
        base = "ColumnParallelLinear" if name.endswith("head") else name
        own = (
            f"class Own({base}):\n    def forward(self, *a, **k):\n        return {SCALED[name]}\n"
        )
        own = own.replace("(*a)", "(*a, **k)")
        if base in ("Attention", "MLP", "Block"):
            at = text.index("\nclass ", text.index(f"class {base}(nn.Module)") + 5)
        else:
            at = text.index("\n@dataclass")
        head, tail = text[:at], text[at:]
        used = r"self\.head = ColumnParallelLinear\(" if name != base else rf"(= )?\b{base}\("
        tail = re.sub(used, lambda found: found[0].replace(base, "Own"), tail)
        tail = tail.replace(f"= {base}\n", "= Own\n")
        text = f"{head}\n\n{own}{tail}"
    path.write_text(text)
    return path


def step(path: Path, flags: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses of each token and every gradient of one micro-batch."""
    config = parse([*SIZES.split(), *flags.split(), "--model-file", str(path)], 1)
    check_flags(config, model_provider)
    kind = torch.float64
    chunks = linear_cross_entropy if FUSED in flags else None
    ctx = LayerContext(Grid(1), False, kind, kind, loss_in_chunks=chunks)
    ctx.sink.dtype = kind
    model: Any = model_provider(config, ctx, recompute_of(config, torch.device("cpu")), None)
    model.initialize(1)
    g = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 50, (2, 8, 16), generator=g)
    loss = model(tokens, labels)
    (loss * torch.rand(loss.shape, generator=g, dtype=kind)).sum().backward()
    named = unique_parameters(model)
    assert all(param in ctx.sink.written for _, param in named)
    return loss.detach(), {name: ctx.sink.main_grad(param) for name, param in named}


def same(got: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=0, msg=what)
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 1e-10 * grad.norm(), f"{what}: {name}"


@pytest.mark.parametrize("name", sampled(["copy", *SCALED], 2))
def test_a_flag_is_obeyed_or_refused(tmp_path, name):
    path = fork(tmp_path, name)
    want = step(path, "")
    for flags in FLAGS:
        if FUSED in flags and name in (*OUTPUT, "z loss head"):
            with pytest.raises(ValueError, match=f"^{FUSED}: Own has a forward of its own"):
                step(path, flags)
        else:
            same(step(path, flags), want, f"{name} {flags}")


def test_a_replaced_module_is_another_model(tmp_path):
    plain = step(fork(tmp_path, "copy"), "")
    for name in SCALED:
        if name != "z loss head":
            assert not torch.allclose(step(fork(tmp_path, name), "")[0], plain[0]), name


CORE = "self.core = recompute.selective(core_attention_of(ctx))"
PASSED_BY = {  # what a fork does, and the flags that no longer reach anything
    "no selective": ({CORE: "self.core = core_attention_of(ctx)"}, FLAGS[1:2]),
    "own loop": ({"if self.recompute.runs_blocks and caches is None:": "if False:"}, FLAGS[2:]),
    "own loss": (
        {
            "return output_loss(self.head, h, labels, v, self.ctx, self.logits)": (
                "return vocab_parallel_cross_entropy("
                "30 * torch.tanh(self.head(h) / 30), labels, v, self.ctx)"
            ),
            "import output_loss": "import output_loss, vocab_parallel_cross_entropy",
        },
        FLAGS[:1],
    ),
    "own logits": (
        {"        return self.head(h)\n": "        return 30 * torch.tanh(self.head(h) / 30)\n"},
        FLAGS[:1],
    ),
    "scaled before the head": ({"return self.head(h)": "return self.head(h / 8)"}, FLAGS[:1]),
    "inner call": (
        {
            "return swiglu(x, self.gate_up, self.down)":
            "return self.down.forward(swiglu(self.gate_up(x)))"
        },
        FLAGS[5:],
    ),
    "plain head": (
        {"weight=shared, output_layer=True, bias": "weight=shared, bias"},
        ("--defer-embedding-wgrad-compute",),
    ),
    "loss of torch": (
        {
            "return output_loss(self.head, h, labels, v, self.ctx, self.logits)":
            "return torch.nn.functional.cross_entropy(self.logits(h)[..., :v].flatten(0, 1), "
            "labels.flatten(), reduction='none').view(labels.shape)",
        },
        ("--output-z-loss-coeff 1e-4",),
    ),
    "own attention": (
        {
            "y = self.core(qkv, cos, sin, self.heads, self.groups, packed, cache=cache, **more)":
            "y = qkv[..., : self.heads * self.head_size]",
        },
        ("--qk-clip", "--log-max-attention-logit"),
    ),
    "own queries": (
        {"self.qkv = qkv_linear(h,": "self.qkv = ColumnParallelLinear(h,"},
        ("--qk-clip",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled([*PASSED_BY], 2))
def test_a_flag_that_reaches_nothing_is_refused(tmp_path, name):
    edits, flags = PASSED_BY[name]
    path = fork(tmp_path, name, edits)
    for each in flags:
        more = "--pipeline-model-parallel-size 2" if "defer" in each else ""
        argv = [*SIZES.split(), *each.split(), *more.split(), "--model-file", str(path)]
        named = "--offload-modules mlp.down" if name == "inner call" else each.split(" ")[0]
        config = parse(argv, 2 if more else 1)
        with pytest.raises(ValueError, match=f"^{named}.*{re.escape(str(path))}"):
            check_flags(config, model_provider)


FP8 = "--fp8-format e4m3 --fp8-recipe tensorwise --bf16"
BY_HAND = "F.linear(a[0], use(self.weight, self.ctx.sink))"


@pytest.mark.parametrize("base", ["ColumnParallelLinear", "RowParallelLinear"])
def test_float8_reaches_each_layer_or_is_refused(tmp_path, base):
    argv = [*SIZES.replace("--fp64", "").split(), *FP8.split(), "--model-file"]
    check_flags(parse([*argv, str(fork(tmp_path, base))], 1), model_provider)
    (tmp_path / "by_hand").mkdir()  # a file is loaded once
    imports = "import torch.nn.functional as F\nfrom mpu.gradients import use\n"
    path = fork(tmp_path / "by_hand", base)
    path.write_text(
        path.read_text()
        .replace("import torch\n", "import torch\n" + imports, 1)
        .replace(SCALED[base].replace("(*a)", "(*a, **k)"), BY_HAND)
    )
    with pytest.raises(ValueError, match=r"^--fp8-format e4m3: layers\.0\..* forward of Own does"):
        check_flags(parse([*argv, str(path)], 1), model_provider)


@pytest.mark.parametrize(("file", "why"), [
    ("model/qwen3.py", "this model normalises queries and keys"),
    ("examples/forks/olmo2.py", r".* has layers\.0\.attention\.q_norm\.weight"),
])  # fmt: skip
def test_a_norm_that_would_undo_a_clip_is_refused(file, why):
    argv = [*SIZES.split(), "--model-file", file]
    check_flags(parse([*argv, "--log-max-attention-logit"], 1), model_provider)
    with pytest.raises(ValueError, match=f"^--qk-clip: {why}"):
        check_flags(parse([*argv, "--qk-clip"], 1), model_provider)


NORMS = {
    "obeyed": ("super().forward(*a)", ""),
    "by hand": ("a[0] * self.weight", "layers.0.attention_norm"),
}


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_of_ones_own_and_another_package(tmp_path, way):
    body, refused = NORMS[way]
    path = fork(tmp_path, "ResidualRMSNorm")
    scaled = SCALED["ResidualRMSNorm"].replace("(*a)", "(*a, **k)")
    body = body if way == "obeyed" else f"({body}, a[0])"
    path.write_text(path.read_text().replace(scaled, body))
    argv = ON_CUDA.split()
    for backend in ("apex", "te"):
        config = parse([*argv, "--norm-backend", backend, "--model-file", str(path)], 1)
        if not refused:
            check_flags(config, model_provider)
            continue
        with pytest.raises(ValueError, match=f"^--norm-backend {backend}: {refused} of"):
            check_flags(config, model_provider)


@pytest.mark.parametrize("flag", ["--norm-backend apex", "--norm-backend te"])
@pytest.mark.parametrize(
    "fork_of, says",
    [("gemma2", r"multiplies by 1 \+ w"), ("phi", "no module of a layer has the norm's kernel")],
)
def test_worked_forks_refuse_norms_of_a_package(fork_of, says, flag):
    argv = [*ON_CUDA.split(), *flag.split(), "--model-file", f"examples/forks/{fork_of}.py"]
    with pytest.raises(ValueError, match=f"^{flag}: .*{says}"):
        check_flags(parse(argv, 1), model_provider)


def test_an_attention_of_ones_own_and_transformer_engine(tmp_path):
    argv = ON_CUDA.split()
    argv += ["--core-attention-backend", "te", "--model-file"]
    check_flags(parse([*argv, str(fork(tmp_path, "copy"))], 1), model_provider)
    edits = {
        CORE: "self.core = recompute.selective(core_attention)",
        "from mpu.layers.context_attention import core_attention_of": (
            "from mpu.layers.attention.core import core_attention"
        ),
    }
    config = parse([*argv, str(fork(tmp_path, "plain", edits))], 1)
    with pytest.raises(ValueError, match="^--attention-backend te: .*core_attention_of"):
        check_flags(config, model_provider)


def test_the_epsilon_of_a_norm_may_change_after_it_was_made(monkeypatch):
    """A fork sets it; the kernels of another package must have the same."""
    given: list[float] = []

    class Kernels:
        @staticmethod
        def rms_forward_affine(x, shape, w, eps):
            given.append(eps)
            r = (x.square().mean(1) + eps).rsqrt()
            return x * r[:, None] * w, r

        @staticmethod
        def rms_backward_affine(dy, r, x, shape, w, eps, efficient):
            given.append(eps)
            return dy, w

    import mpu.layers.norm_backends as module
    from mpu import native

    monkeypatch.setattr(module.importlib, "import_module", lambda name: Kernels)
    monkeypatch.setattr(native, "load", lambda: None)
    for kind in (RMSNorm, ResidualRMSNorm):
        norm = kind(4, ctx=LayerContext(norm_backend="apex"))
        torch.nn.init.ones_(norm.weight)
        norm.eps = 0.5
        y = norm(torch.ones(2, 1, 4, requires_grad=True))
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert given == [0.5] * 4


WAYS = (  # of two ranks: what acts on a layer's matmuls, weights and their gradients
    dict(tp=2, dp=1, m=1, sp=True, path="ring"),
    dict(tp=2, dp=1, m=1, sp=True, path="symmetric", recompute="selective"),
    dict(tp=1, dp=2, m=1, zero=3, gather=True, recompute="full"),
    dict(tp=1, dp=1, m=3, pp=2, schedule="zb-h1"),
    dict(tp=1, dp=1, m=3, pp=2, schedule="1f1b", defer=True, limit=1),
)


@pytest.mark.prove
def test_two_ranks_obey_with_every_module_replaced(world, tmp_path):
    """Two steps on two ranks as on one: losses, norms, every gradient to 1e-10."""
    paths = {name: str(fork(tmp_path, name)) for name in SCALED if name != "z loss head"}
    ones = world(1).run(run_cases, [case_of(name, path) for name, path in paths.items()], 2)[0]
    for way in WAYS:
        cases = [case_of(name, path) | way for name, path in paths.items()]
        for rank in world(2).run(run_cases, cases, 2):
            for name, got, one in zip(paths, rank, ones, strict=True):
                equal(got, one, f"{name}, {way}")
