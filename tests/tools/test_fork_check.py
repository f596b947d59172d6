# SPDX-License-Identifier: Apache-2.0
"""Plant mistakes that forks make, each a few edits of a model's file: fork-check names each.

The models themselves pass.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model import llama
from tests.tools import fork_mistakes, fork_tensors
from tools import fork_check
from tools.compare.verdict import Verdict
from tools.fork_check import main
from tools.forks import huggingface, layouts
from tools.forks.case import Desk
from tools.forks.fields import others, output_of
from tools.forks.one import initial_values
from tools.forks.results_table import Row, table
from training.run import waiting

ROOT = Path(__file__).resolve().parents[2]
MLP = "        return swiglu(x, self.gate_up, self.down)\n"
DOWN = "        self.down = RowParallelLinear(f, h, ctx=ctx)\n"
PROJ = "        self.proj = RowParallelLinear(a * d, h, ctx=ctx, bias=self.proj_bias)\n"
SCALE = "        self.scale = nn.Parameter(torch.ones(h, dtype=ctx.dtype, device=ctx.device))\n"
QKV = '        qkv, more = self.project(x), {"window": self.window}\n'
PARAM = "from mpu.param import draw_normal, placement_of, saved_buffers, tie, unique_parameters\n"
CONTEXT = "from mpu.context import LayerContext\n"
USE = {CONTEXT: CONTEXT + "from mpu.gradients import use\n"}
GAIN = USE | {  # a gain on the queries, keys and values of this rank's heads
    PARAM: PARAM.replace("import ", "import Region, "),
    PROJ: PROJ
    + "        self.ctx = ctx\n"
    + "        self.gain = ctx.replicated_parameter((d,), Region.TENSOR_PARALLEL)\n",
}
TIE = "            tie(end.weight, ctx.grid.embd)  # the other end of the pipeline holds a copy\n"
ENDS = 'if config.tied and hasattr(self, "embedding") != hasattr(self, "head"):'
DECODE = "        return self(tokens, position_ids=at.expand_as(tokens), caches=caches)\n"
EMBED = "h = self.embed(tokens) if hidden is None else hidden"


def gained(gain: str) -> dict[str, str]:
    """Return the edits of a gain that is used as the expression `gain`."""
    return GAIN | {
        QKV: QKV + f"        qkv = (qkv.unflatten(-1, (-1, self.head_size)) * {gain}).flatten(2)\n"
    }


# what is planted: (model, edits, layouts, what must be told)
MISTAKES = {
    "missing sum": (
        "qwen3",
        {", region=region)": ")"},
        "tp 2; tp 2 + SP",
        (
            "tp 2: layers.0.attention.k_norm.weight: its gradient differs among the ranks of tp",
            "Region.TENSOR_PARALLEL",
            "(in layers.3.attention.k_norm), before it is summed over data-parallel ranks, differs",
            "a sum over tp is missing",
        ),
    ),
    "double sum": (
        "llama",
        gained("copy_to_tensor_model_parallel_region(use(self.gain, self.ctx.sink), self.ctx.tp)")
        | {
            CONTEXT: USE[CONTEXT]
            + "from mpu.comm.mappings import copy_to_tensor_model_parallel_region\n"
        },
        "tp 2",
        (
            "added more than once: by the layer itself",
            "the gradient of layers.3.attention.gain (in layers.3.attention), before it is summed",
            "added over tp twice",
            "warning, tp 2: layers.0.attention.gain: its gradients are summed over tp",
        ),
    ),
    "wrong cut": (
        "llama",
        {"h, (f, f), ctx": "h, 2 * f, ctx", '("mlp.gate_proj", "mlp.up_proj")': '("mlp.gate_up",)'},
        "tp 2; pp 2 1f1b",
        (
            "the input of layers.0.mlp.down (RowParallelLinear) differs first",
            "only with tensor parallelism",
            "a Placement cuts wrongly",
        ),
    ),
    "a section without a name": (
        "llama",
        {"h, (f, f), ctx": "h, 2 * f, ctx"},
        "tp 2",
        ("layers.0.mlp.gate_up.weight has 1 section, but hf_names gives it", "not saved"),
    ),
    "norm over a shard": (
        "llama",
        {
            DOWN: DOWN + "        self.norm = RMSNorm(f // ctx.tp.size, ctx=ctx)\n",
            MLP: "        return self.down(self.norm(swiglu(self.gate_up(x))))\n",
        },
        "tp 2",
        ("layers.0.mlp.norm.weight has the full shape [10] here and [20] on one rank",),
    ),
    "norm over a shard, without a weight": (
        "llama",
        {
            MLP: "        y = swiglu(self.gate_up(x))\n"
            "        return self.down(nn.functional.rms_norm(y, y.shape[-1:]))\n"
        },
        "tp 2; dp 2",
        (
            "the input of layers.0.mlp.down (RowParallelLinear) differs first",
            "only with tensor parallelism",
            "(a norm, a mean",
        ),
    ),
    "forgotten decode": (
        "llama",
        {
            EMBED: "h = 5 * self.embed(tokens) if hidden is None else hidden",
            DECODE: "        cos, sin = self.rope(at.expand_as(tokens), 0)\n"
            "        h = self.embedding(tokens)\n"
            "        for block, cache in zip(self.blocks[0], caches, strict=True):\n"
            "            h = block(h, cos, sin, None, cache)\n"
            "        return self.head(self.norm(h))\n",
        },
        "one rank",
        ("one rank: decode differs from forward: given token by token, the logits at position 0",),
    ),
    "attention that looks at own keys alone": (
        "llama",
        {
            CONTEXT: CONTEXT + "from mpu.layers.attention.core import core_attention\n",
            "recompute.selective(core_attention_of(ctx))": "recompute.selective(core_attention)",
            "self.groups, packed, cache=cache": "self.groups, None, cache=cache",
        },
        "cp 2 all_gather; dp 2",
        ("sends nothing over the context-parallel group, so tokens would not attend to",),
    ),
    "positions counted on a rank": (
        "llama",
        {"position_ids, tokens.shape[1] * self.ctx.grid.cp.size": "None, tokens.shape[1]"},
        "cp 2 all_gather",
        (
            "the input of layers.0 (Block), tensor 1 differs first",
            "only under context parallelism",
            "positions counted from 0",
        ),
    ),
    "parameter outside the sink": (
        "llama",
        {
            DOWN: DOWN + SCALE,
            MLP: MLP.replace("\n", " * self.scale\n"),
        },
        "dp 2; dp 2 + ZeRO 3; tp 2 + SP",
        (
            "mlp.scale was used in plain autograd",
            "mpu.gradients.use",
            "3 of 4 layouts disagree",
            "tp 2 + SP: layers.0.mlp.scale: its gradient differs",
        ),
    ),
    "parameter in a list": (
        "llama",
        {
            DOWN: DOWN + "        self.scales = [nn.Parameter(torch.ones(h, dtype=ctx.dtype))]\n",
            MLP: MLP.replace("\n", " * self.scales[0]\n"),
        },
        "one rank",
        ("layers.0.mlp.scales: a tensor there requires a gradient and is not a parameter",),
    ),
    "tied twice": (
        "llama",
        {TIE: TIE + TIE},
        "pp 2 1f1b, tied",
        ("a weight of shape [97, 28] is tied over embd twice",),
    ),
    "tied by sharing and by tie": (
        "llama",
        {ENDS: 'if config.tied and (hasattr(self, "embedding") or hasattr(self, "head")):'},
        "pp 2 1f1b, tied; pp 2 zb-v, tied",
        ("pp 2 zb-v, tied: it hung", "only where a rank has several stages"),
    ),
    "local positions": (
        "llama",
        {
            QKV: QKV
            + "        at = torch.arange(x.shape[0]).repeat(qkv.shape[0] // x.shape[0])\n"
            + "        cos, sin = cos[at], sin[at]\n"
        },
        "tp 2; tp 2 + SP",
        (
            "tp 2 + SP: the loss of the first step",
            "the input of layers.0.attention.proj (RowParallelLinear) differs first",
            "only under SP",
        ),
    ),
    "random numbers": (
        "llama",
        {MLP: "        return nn.functional.dropout(self.down(swiglu(self.gate_up(x))), 0.1)\n"},
        "tp 2",
        ("draws random numbers from torch's default generator", "the output of layers.0.mlp (MLP)"),
    ),
    "a weight detached": (
        "llama",
        gained("self.gain.detach()"),
        "tp 2",
        (
            "of layers.3.attention.gain, and its gradient is zero",
            "gain got no gradient in the first",
        ),
    ),
    "an activation detached": (
        "llama",
        {QKV: QKV.replace("(x)", "(x.detach())")},
        "one rank",
        ("of model.layers.3.input_layernorm.weight, and its gradient is zero",),
    ),
}
SAMPLE = ("missing sum",)
RUN = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100
    --mock-data --train-iters 2 --lr 1e-3 --device cpu --tensor-model-parallel-size 2""".split()


def write(folder: Path, model: str, edits: dict[str, str]) -> Path:
    """Write a changed copy of a model's file."""
    text = (ROOT / "model" / f"{model}.py").read_text()
    for old, new in edits.items():
        assert old in text, f"{old!r} is not in model/{model}.py"
        text = text.replace(old, new)
    path = folder / f"fork_{folder.name.replace('-', '_')}.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.prove) for n in MISTAKES]
)
def test_a_mistake_is_named(name, tmp_path, capfd):
    model, edits, only, told = MISTAKES[name]
    path = write(tmp_path, model, edits)
    assert (
        main(
            [
                "--model",
                str(path),
                "--only",
                only,
                "--timeout",
                "40" if "sharing" in name else "100",
            ]
        )
        == 1
    )
    out = capfd.readouterr().out
    for text in told:
        assert text in out, out


@pytest.mark.prove
@pytest.mark.parametrize(
    "name, code, kind, told",
    [
        ("missing sum", 1, "err", "_norm.weight: its gradient differs among the ranks of tp"),
        ("double sum", 0, "out", "gain: its gradients are summed over tp, whose ranks all have"),
        (
            "a weight detached",
            0,
            "out",
            "layers.0.attention.gain got no gradient in the first step",
        ),
        ("parameter in a list", 2, "err", "layers.0.mlp.scales: a tensor there requires a "),
    ],
)
def test_an_ordinary_run_tells_of_a_mistake(name, code, kind, told, tmp_path, launcher):
    model, edits, _, _ = MISTAKES[name]
    path = write(tmp_path, model, edits)
    result = launcher.run(2, [*RUN, "--model-file", str(path)])
    assert result.codes == [code, code], result.said(0)
    assert told in result.said(0, kind)


DEEPSEEK = "../examples/forks/deepseek"
LATENT = "--num-experts 4 --moe-shared-expert-intermediate-size 20".split()
SIGMOID = """--moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-num-groups 2 --moe-router-group-topk 1""".split()


@pytest.mark.parametrize(
    "model, only",
    [
        pytest.param(
            "qwen3", ["--only", "tp 2 + SP; dp 2 + ZeRO 3"], marks=pytest.mark.prove
        ),
        pytest.param("llama", [], marks=pytest.mark.prove),
        pytest.param(  # matrices have owners: ranks keep different amounts of state
            "llama",
            ["--only", "tp 2 + SP, dp 2 + ZeRO 3, tied", "--", "--optimizer", "muon"],
            marks=pytest.mark.prove,
        ),
        pytest.param("qwen3", [], marks=pytest.mark.prove),
        pytest.param(  # RoPE of two pairs
            "../examples/forks/phi",
            ["--only", "tp 2", "--", "--rotary-factor", "0.25"],
            marks=pytest.mark.prove,
        ),
        pytest.param("moe", [], marks=pytest.mark.prove),
        pytest.param("moe", "-- --num-experts 4 --qk-layernorm".split(), marks=pytest.mark.prove),
        *(
            pytest.param(DEEPSEEK, ["--", *LATENT, *more], marks=pytest.mark.prove)
            for more in (SIGMOID, ["--moe-router-pre-softmax", "--q-lora-rank", "0"])
        ),
    ],
)
def test_the_models_pass(model, only, capfd, monkeypatch):
    monkeypatch.setattr(waiting, "AFTER", 0.05)
    code = main(["--model", str(ROOT / "model" / f"{model}.py"), *only])
    out, err = capfd.readouterr()
    first = r"^one rank(, tied)?: \d s, layout 1 of \d+$"
    assert re.search(first, err, re.M), "before the first row"
    assert re.search(r"layout \d+ of \d+, about \d+ s left$", err, re.M)
    assert code == 0, out
    assert "layouts agree" in out and "warning" not in out


@pytest.mark.prove
def test_a_fork_that_carries_a_tensor_through_its_layers_and_adds_a_loss_passes(capfd):
    """Its hidden states are wider after the first layer. One field acts on the loss alone. The last
    layout loads the weights after a step with a mask.
    """
    only = "tp 2; cp 2 all_gather; tp 2 + SP, pp 2 zb-h1; pp 2 1f1b, loads tp 2 + SP"
    assert main(["--model", str(ROOT / fork_mistakes.VALUES), "--only", only]) == 0
    assert "all 6 layouts agree" in capfd.readouterr().out


@pytest.mark.prove
def test_a_layout_that_the_model_itself_refuses_is_no_disagreement(tmp_path, capfd):
    edits = {
        "        self.core = recompute": "        if ctx.grid.cp.size > 1:\n"
        "            raise ValueError('--context-parallel-size must be 1')\n"
        "        self.core = recompute"
    }
    path = write(tmp_path, "llama", edits)
    assert main(["--model", str(path), "--only", "cp 2 all_gather; tp 2"]) == 0
    out = capfd.readouterr().out
    line = "cp 2 all_gather: not run, as the model refuses it: --context-parallel-size must be 1"
    assert line in out and "all 2 layouts agree, and 1 were not run" in out


@pytest.mark.prove
def test_a_checkpoint_of_a_layout_with_wrong_shapes_is_not_loaded(tmp_path, capfd):
    path = write(tmp_path, *MISTAKES["norm over a shard"][:2])
    assert main(["--model", str(path), "--only", "pp 2 1f1b, loads tp 2 + SP"]) == 1
    out = capfd.readouterr().out
    assert "not run: the checkpoint to load is wrong" in out and "2 of 3 layouts disagree" in out


@pytest.mark.prove
def test_a_module_may_return_complex_numbers(tmp_path, capfd):
    """As Meta's RoPE does: the record of a layout that differs has what is made of them. It takes
    the queries, keys and values of a rank's heads, as qkv gives them, and declares no region.
    """
    turn = "class Turn(nn.Module):\n    def forward(self, x):\n"
    turn += "        return torch.polar(torch.ones_like(x), x)\n\n\nclass Attention("
    (local,) = MISTAKES["local positions"][1].values()
    edits = {
        "class Attention(": turn,
        PROJ: PROJ + "        self.turn = Turn()\n",
        QKV: local + "        qkv = qkv + 0 * self.turn(qkv).real\n",
    }
    path = write(tmp_path, "llama", edits)
    assert main(["--model", str(path), "--only", "tp 2 + SP"]) == 1
    out = capfd.readouterr().out
    assert "the input of layers.0.attention.proj (RowParallelLinear) differs first" in out, out


def test_the_likely_cause_is_of_a_layout_and_not_of_what_it_loads():
    every = layouts.cases()
    names = [case.name for case in every]
    for word, what in (("tp ", "with tensor parallelism"), ("SP", "under SP"), ("pp ", "in pipe")):
        failed = [name for name in names if word in name.partition(", loads ")[0]]
        assert f"(only {what}" in layouts.pattern(failed, names, ("", False))
    rows = [Row(case, 0.0) for case in every]
    (loads,) = (row for row in rows if row.case.name == "pp 2 1f1b, loads tp 2 + SP")
    loads.explain_with(2, (1.0, 1.0), Verdict("the weight w differs first", False, begins=True))
    text = "\n".join(table(rows))
    assert "the loaded checkpoint differs from what was saved" in text
    assert "likely cause" not in text


def test_a_record_that_failed_is_not_taken_for_a_whole_one(tmp_path):
    desk, case = Desk("", str(tmp_path), (), ()), layouts.cases()[0]
    folder = desk.record(case.name, 0, inside=True)

    def run(case):
        Path(folder).mkdir(parents=True)
        return [{"error": "out of time"}]

    world = SimpleNamespace(desk=desk, run=run)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a record of one rank failed: .*out of time"):
            fork_check.recorded_inside(world, case, 0)


def test_transformers_4_saves_the_names_that_it_has_in_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    theirs = SimpleNamespace(state_dict=lambda: {"lm_head.weight": 0})
    ours = SimpleNamespace(weights={"lm_head.weight": 0})
    assert huggingface._Theirs.renamed(ours, theirs) == ""


def test_experts_are_dealt_out_and_a_layout_that_their_rule_refuses_is_not_run(tmp_path):
    model = str(ROOT / "model" / "moe.py")
    assert [fork_check.experts_of(model, own) for own in ([], ["--num-experts=4"])] == [8, 4]
    assert fork_check.experts_of(str(ROOT / "model" / "llama.py"), []) == 0
    desk = Desk(model, str(tmp_path), layouts.sizes(8), ())
    why = {case.name: desk.refusal(case) for case in layouts.cases(experts=True)}
    refused = {name for name, text in why.items() if text}
    assert refused == {"tp 2", "tp 4", "tp 2, dp 2 + ZeRO 3, tied, loads pp 2 1f1b"}
    assert "needs --sequence-parallel" in why["tp 2"] and "dp 4 + ZeRO 3, ep 2 alltoall" in why
    assert len(why) == len(layouts.cases(experts=True)), "each has its name"


@pytest.mark.parametrize(
    "name, fits",
    [
        ("gemma3", {"--num-layers": "6", "--sliding-window": "5"}),  # the sixth layer is another
        ("gemma2", {"--num-layers": "4", "--sliding-window": "5"}),
        ("widths", {"--num-layers": "4"}),  # more layers are of more kinds
    ],
)
def test_sizes_fit_the_fork(name, fits, tmp_path):
    desk = Desk(str(ROOT / "examples" / "forks" / f"{name}.py"), str(tmp_path), (), ())
    found = fork_check.fitting(desk, 0, layouts.cases()[0])
    assert {flag: found[found.index(flag) + 1] for flag in fits} == fits


def test_sizes_fit_a_model_with_one_key_for_all_heads(tmp_path):
    path, sizes = tmp_path / "fork.py", "        check_sizes(self)\n"
    text = (ROOT / "model" / "llama.py").read_text()
    check = sizes + (
        "        if self.vocab_size == 97 and self.num_query_groups > 1:\n"  # none of SIZES
        "            raise ValueError('one key for all heads')\n"
    )
    path.write_text(text.replace(sizes, check, 1))
    found = fork_check.fitting(Desk(str(path), str(tmp_path), (), ()), 0, layouts.cases()[0])
    assert found[found.index("--num-query-groups") + 1] == "1"


def test_mistakes_in_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--model FILE is missing: make fork-check MODEL=" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none.py")]) == 2
    assert "no such Python file" in capsys.readouterr().err
    assert main(["--model", "model/llama.py", "--only", "tp 3"]) == 2
    text = capsys.readouterr().err
    assert "--only 'tp 3' is not the name of a layout; the names are: one rank; " in text
    assert main(["--model", "model/llama.py", "--", "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.prove
@pytest.mark.parametrize("name", fork_mistakes.MISTAKES)
def test_a_planted_mistake_ends_in_a_sentence_with_its_cause(name, tmp_path):
    """Those that nothing here can see have no sentence, and the page on forks lists them."""
    mistake = fork_mistakes.MISTAKES[name]
    if not mistake.said:
        assert name in (ROOT / "docs" / "forking.md").read_text()
        return
    code, out = fork_mistakes.checked(mistake, tmp_path)
    assert mistake.said in out and "fork-check itself failed" not in out, out
    assert code == 1 or "warning" in out, out


def test_what_is_planted_is_an_edit_of_todays_files(tmp_path):
    for mistake in (*fork_mistakes.MISTAKES.values(), *fork_tensors.TENSORS.values()):
        fork_mistakes.planted(mistake, tmp_path)
    for model, edits, *_ in MISTAKES.values():
        write(tmp_path, model, edits)


@pytest.mark.prove
@pytest.mark.parametrize("name", fork_tensors.TENSORS)
def test_the_tensor_that_is_named_first_is_the_right_one(name, tmp_path):
    code, out = fork_mistakes.checked(fork_tensors.TENSORS[name], tmp_path)
    assert code == 1 and re.search(fork_tensors.TENSORS[name].said, out), out


@pytest.mark.prove
def test_an_update_by_rounding_is_no_mistake(tmp_path, capfd):
    """A key's bias shifts all scores of a query alike, so without RoPE its gradient is 0."""
    none = "    def frequencies(self):\n        return 0 * super().frequencies()\n"
    path = write(tmp_path, "qwen2", {"    block = Block\n": f"    block = Block\n\n{none}"})
    main(["--model", str(path), "--only", "dp 2"])
    out = capfd.readouterr().out
    assert "dp 2" in out and "its update differs" not in out, out


@pytest.mark.prove
def test_a_crash_of_the_check_itself_is_a_sentence(monkeypatch, capfd):
    def crash(*_):
        raise KeyError("no such row")

    monkeypatch.setattr(fork_check, "row_of", crash)
    assert main(["--model", str(ROOT / "model" / "llama.py"), "--only", "one rank"]) == 1
    assert "fork-check itself failed: KeyError: 'no such row'" in capfd.readouterr().out


@dataclass(frozen=True)
class _Biased(llama.LlamaConfig):
    biased: bool = False


class _Attention(llama.Attention):
    def __init__(self, config, ctx, recompute):
        self.qkv_bias = config.biased
        super().__init__(config, ctx, recompute)


class _Block(llama.Block):
    attention_type = _Attention


class _Model(llama.Llama):
    block = _Block


def test_a_field_that_adds_a_bias_of_0_is_one_that_the_model_depends_on():
    config, tokens = _Biased(11, 16, 8, 1, 4, 2), torch.arange(6).view(1, 6)
    file = SimpleNamespace(Model=_Model)
    one, two = (output_of(file, replace(config, biased=b), tokens) for b in (False, True))
    assert one is not None and two is not None and not torch.equal(one, two)


@dataclass(frozen=True)
class _Bounded(llama.LlamaConfig):
    limit: float = 7.0
    own_norm: bool = False


class _MLP(llama.MLP):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        self.limit = config.limit

    def forward(self, x):
        return self.down(self.gate_up(x).clamp(max=self.limit).chunk(2, -1)[0])


class _BoundedBlock(llama.Block):
    mlp_type, norm_type = _MLP, llama.RMSNorm

    def __init__(self, config, ctx, recompute):
        super().__init__(config, ctx, recompute)
        if not config.own_norm:
            self.mlp_norm = self.attention_norm

    def forward(self, h, cos, sin, packed=None, cache=None):
        return h + self.attention(self.attention_norm(h), cos, sin) + self.mlp(self.mlp_norm(h))


class _BoundedModel(llama.Llama):
    block = _BoundedBlock


@pytest.mark.parametrize("name", ["limit", "own_norm"])
def test_fields_with_a_rare_effect_are_those_that_the_model_depends_on(name):
    """A bound acts where it is far smaller; two norms are as one where their weights are equal."""
    config, tokens = _Bounded(11, 16, 8, 1, 4, 2), torch.arange(6).view(1, 6)
    file = SimpleNamespace(Model=_BoundedModel)
    values = [*others(name, getattr(config, name))]
    some = [output_of(file, replace(config, **{name: value}), tokens) for value in values]
    plain = output_of(file, config, tokens)
    assert plain is not None and not all(torch.equal(plain, each) for each in some)


def test_layers_and_experts_of_any_prefix_are_listed_once():
    values = {f"h.{i}.experts.{j}.w": torch.ones(2, 3) for i in range(2) for j in range(3)}
    values |= {f"h.{i}.experts.bias": torch.zeros(4, 3) for i in range(2)}
    line, odd = initial_values(values, 0.02, 2)
    assert line.count("experts.N.w") == 1 and line.endswith("0: h.N.experts.bias"), line
    assert len(odd) == 1 and odd[0].startswith("h.N.experts.N.w is 1 after initialize()"), odd


@pytest.mark.parametrize("field, told", [("rope_theta", 1), ("", 0)])
def test_a_field_read_wrongly_is_told_although_other_sizes_agree(field, told, monkeypatch):
    """Heads as wide as hidden states are for models that transformers takes only with these."""
    pytest.importorskip("transformers")

    class Theirs:
        def __init__(self, library, file, config, tokens):
            self.found = [("transformers", field, "wrong")] if config.kv_channels == 16 else []

        def compare(self):
            return self.found, []

    config = llama.LlamaConfig(11, 16, 8, 1, 4, 2, kv_channels=16)
    file = SimpleNamespace(hf_config=llama.hf_config)
    monkeypatch.setattr(huggingface, "_Theirs", Theirs)
    assert len(huggingface.compare(file, config, torch.zeros(1, 2))[0]) == told


TINY = {  # sizes of a model of transformers
    "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 8,
}  # fmt: skip


@pytest.mark.prove
def test_a_shape_that_transformers_does_not_have_is_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("llama", **TINY)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    weights = theirs.state_dict() | {"model.norm.weight": torch.ones(4, 4)}
    odd = huggingface._Theirs.read(SimpleNamespace(weights=weights), theirs)
    assert odd == "model.norm.weight has shape [4, 4], and [16] in transformers"


@pytest.mark.prove
def test_a_padding_token_beyond_the_vocabulary_is_no_mistake_of_the_fork():
    """SmolLM3's own pad_token_id is 128004, whatever the size of the vocabulary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("smollm3", **TINY)
    assert config.pad_token_id > 11
    maker = SimpleNamespace(library=transformers)
    assert huggingface._Theirs.made(maker, config).config.pad_token_id is None


@pytest.mark.prove
def test_a_buffer_of_transformers_model_that_the_fork_does_not_save_is_named():
    class Theirs(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 3, bias=False)
            self.register_buffer("beta", torch.ones(1))

    maker = SimpleNamespace(weights={"weight": torch.ones(3, 2)})
    odd = huggingface._Theirs.load(maker, Theirs())
    assert odd == "it also needs beta (buffers: register_buffer makes them part of a checkpoint)"


@pytest.mark.prove
def test_a_name_that_transformers_module_has_in_memory_alone_is_no_name_of_a_checkpoint():
    """GPT-NeoX's lm_head is embed_out in every checkpoint."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "gpt_neox", vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=8,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    maker = SimpleNamespace(weights=theirs.state_dict())
    said = huggingface._Theirs.renamed(maker, theirs)
    assert said == (
        "lm_head.weight is only its name in memory, and checkpoints have embed_out.weight"
    )
