# SPDX-License-Identifier: Apache-2.0
"""Model files as users write them: what a save or a resume would fail at is said before a step.

Each case of `KINDS` is a fork with one mistake in a function that a save or a resume calls. The run
must end with exit code 2 and a sentence that names the file, and make no checkpoint. Forks of
`SOUND` look odd and are right: they train, resume and give the losses of a run that did not stop.
"""

import json
import random
from pathlib import Path

import pytest

from tests.sampling import sampled
from tests.unlucky import Case, check, drawn

FLAGS = """pretrain_llama.py --mock-data --tokenizer-type NullTokenizer --vocab-size 200
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
    --lr 1e-3 --device cpu --log-interval 1""".split()
FORK = """from dataclasses import dataclass, replace

import numpy as np
import torch

from model import llama
from model.llama import *
from model.llama import LlamaConfig


@dataclass(frozen=True)
class Config(LlamaConfig):
    window_size: int = 0


class Model(llama.Llama):
    pass


def hf_config(config, dtype="float32"):
    return {{**llama.hf_config(config, dtype), "model_type": "mine", **own(config)}}


def own(config):
    return {{"window_size": config.window_size}}


def from_hf_config(hf):
    return llama.read_hf_config(hf, "mine", Config, window_size=hf["window_size"])


def extra_args_provider(parser):
    parser.add_argument("--window-size", type=int, default=0)


{more}

ModelConfig = Config
"""


def fork(folder: Path, more: str, says: str, *flags: str) -> Case:
    """Return the case of a run of FORK with `more` in it."""
    (folder / "mine.py").write_text(FORK.format(more=more))
    saved, run = folder / "saved", [*FLAGS, "--train-iters", "2", "--model-file"]
    argv = [*run, folder / "mine.py", "--save", saved, "--window-size", "8", *flags]
    return Case(argv, says=rf"--model-file \S*mine\.py: .*{says}", absent=[saved])


def field(folder: Path, value: str) -> Case:
    """Return the case of a fork whose hf_config writes a value that JSON does not hold."""
    more = f"def own(config):\n    return {{'window_size': 8, 'odd': {value}}}"
    return fork(folder, more, "hf_config: odd is .*cannot hold")


def numpy_number(rng: random.Random, folder: Path) -> Case:
    values = "np.int64(3) np.float32(0.5) np.bool_(True) np.arange(3) [np.int32(1)]"
    return field(folder, rng.choice(values.split()))


def other_type(rng: random.Random, folder: Path) -> Case:
    values = "torch.float32 torch.bfloat16 {1,2} b'x' complex(1,2) torch.zeros(2) Config object()"
    return field(folder, rng.choice(values.split()))


def no_number(rng: random.Random, folder: Path) -> Case:
    values = "float('nan') float('inf') -1e400 1<<70 [1,float('nan')] {'x':1<<64} np.float64('nan')"
    return field(folder, rng.choice(values.split()))


def odd_text(rng: random.Random, folder: Path) -> Case:
    values = (r"'\ud800'", "{1:2,'a':3}", "{None:1,'b':2}", r"['a','\udcff']", "{(1,2):3}")
    return field(folder, rng.choice(values))


def too_deep(rng: random.Random, folder: Path) -> Case:
    depth = rng.choice((65, 100, 900, 5000, 0))
    more = "deep = []\n" + (f"for _ in range({depth}):\n    deep = [deep]\n" if depth else "")
    more += "def own(config):\n    return {'window_size': 8, 'odd': deep}\n"
    return fork(folder, more + ("deep.append(deep)" if not depth else ""), "hf_config: odd is ")


def hf_config_fails(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("config, dtype='float32'):\n    return None", "returns a NoneType"),
            ("config, dtype='float32'):\n    return [1]", "returns a list"),
            ("config):\n    return {}", "takes 1 positional argument but 2"),
            ("config, dtype):\n    return {'a': config.absent}", "hf_config, line .*'absent'"),
            ("config, dtype):\n    return {}['x']", "hf_config, line .*KeyError: 'x'"),
            ("config, dtype):\n    import sys; sys.exit(0)", "hf_config, line .*SystemExit"),
            ("config, dtype):\n    assert False, 'later'", "AssertionError: later"),
            ("config, dtype):\n    return {1: 2}", "name is a int, not a str"),
        ]
    )
    return fork(folder, f"def hf_config({body}\n", says)


def from_hf_config_fails(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("hf['theta']", "KeyError: 'theta'"),
            ("hf['layer_types'][0]", "KeyError"),
            ("[][1]", "IndexError"),
            ("1 / 0", "ZeroDivisionError"),
            ("int('x')", "ValueError: invalid literal"),
            (
                "(_ for _ in ()).throw(NotImplementedError('not yet'))",
                "NotImplementedError: not yet",
            ),
            ("Config(**hf)", "TypeError"),
            ("exit(0)", "SystemExit: 0"),
            ("None", "NoneType"),
        ]
    )
    return fork(folder, f"def from_hf_config(hf):\n    return {body}\n", says)


def lost_field(rng: random.Random, folder: Path) -> Case:
    read, says, flags = rng.choice(
        [
            ("read_hf_config(hf, 'mine', Config)", "loses window_size: hf_config writes 8", ""),
            ("read_hf_config(hf, 'mine', Config, window_size=7)", "loses window_size", ""),
            ("replace(sound(hf), rotary_base=1e4)", "loses rope_theta", "--rotary-base 5e5"),
            ("replace(sound(hf), norm_epsilon=1e-6)", "loses rms_norm_eps", ""),
            ("replace(sound(hf), tied=False)", "loses tie_word_embeddings", ""),
            ("replace(sound(hf), num_layers=3)", "loses num_hidden_layers", ""),
            ("replace(sound(hf), num_query_groups=2)", "loses num_key_value", "--group-query-"
             "attention --num-query-groups 1"),
        ]
    )  # fmt: skip
    more = f"sound = from_hf_config\n\n\ndef from_hf_config(hf):\n    return {read}\n"
    return fork(folder, more, f"from_hf_config {says}", *flags.split())


def unwritten_field(rng: random.Random, folder: Path) -> Case:
    name, field, flags = rng.choice(
        [
            ("rope_theta", "rotary_base", "--rotary-base 500000"),
            ("tie_word_embeddings", "tied", ""),
            ("rms_norm_eps", "norm_epsilon", "--norm-epsilon 1e-4"),
            ("num_key_value_heads", "num_query_groups", "--group-query-attention"),
        ]
    )
    more = "whole = hf_config\n\n\ndef hf_config(config, dtype='float32'):\n"
    more += f"    return {{k: v for k, v in whole(config, dtype).items() if k != '{name}'}}\n"
    return fork(folder, more, f"from_hf_config returns {field} .*the run has", *flags.split())


def changing_config(rng: random.Random, folder: Path) -> Case:
    made = rng.choice(("calls.append(1) or len(calls)", "id([calls.append([])] * len(calls))"))
    more = f"calls = []\n\n\ndef own(config):\n    return {{'window_size': 8, 'made': {made}}}\n"
    return fork(folder, more, "from_hf_config loses made")


def bad_names(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("names.pop('norm.weight')", "hf_names has no norm.weight"),
            ("names.pop('layers.1.mlp.down.weight')", "hf_names has no layers.1.mlp.down"),
            ("names['norm.weight'] = ('model.embed_tokens.weight',)", "a name of its own"),
            ("names['layers.1.mlp.down.weight'] = names['layers.0.mlp.down.weight']", "of its own"),
            ("names['layers.0.attention.qkv.weight'] = ('a', 'b')", "must be a tuple of 3 names"),
            ("names['norm.weight'] = 'n'", "must be a tuple of a name"),
            ("names['norm.weight'] = (1,)", "must be a tuple of a name"),
            ("names['norm.weight'] = ('',)", "must be a tuple of a name"),
            ("names = None", "hf_names returns a NoneType"),
            ("names = list(names)", "hf_names returns a list"),
            ("names['norm.weight'] = ('model.embed_tokens.weight.bias',)", "optimizer state"),
            ("names[0]", "hf_names, line .*KeyError: 0"),
        ]
    )
    more = (
        f"def hf_names(model):\n    names = llama.hf_names(model)\n    {body}\n    return names\n"
    )
    return fork(folder, more, says)


def bad_group(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("'matrices'", "parameter_group of the --model-file returns 'matrices'"),
            ("None", "returns None for embedding.weight: it must name"),
            ("('matrix', 1)", "it must name"),
            ("{'norm.weight': 'vector'}[name]", "parameter_group, line .*KeyError"),
            ("param.absent", "parameter_group, line .*AttributeError"),
            ("'matrix' if 'mlp' in name else 'mlp'", "returns 'mlp' for embedding.weight"),
        ]
    )
    return fork(folder, f"def parameter_group(name, param):\n    return {body}\n", says)


def bad_flag(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("parser.add_argument('--lr', type=float)", "ArgumentError.*--lr"),
            ("parser.add_argument('--wide', type=int, type_=1)", "TypeError"),
            ("parser.absent('--wide')", "extra_args_provider, line .*AttributeError"),
            ("exit(0)", "extra_args_provider, line .*SystemExit"),
            ("raise RuntimeError('no flags today')", "RuntimeError: no flags today"),
        ]
    )
    return fork(folder, f"def extra_args_provider(parser):\n    {body}\n", says)


def odd_value_of_a_flag(rng: random.Random, folder: Path) -> Case:
    body, says = rng.choice(
        [
            ("type=float, default=float('nan')", "extra_args_provider: extra.odd is nan"),
            ("type=float, default=float('inf')", "extra_args_provider: extra.odd is inf"),
            ("default=pathlib.Path('x')", "extra.odd is PosixPath"),
            ("default=np.int64(3)", "extra.odd is .*cannot hold"),
            ("default=b'x'", "extra.odd is b'x'"),
            ("type=int, default=1 << 70", "does not fit into 64 bits"),
        ]
    )
    more = "flags = extra_args_provider\n\n\ndef extra_args_provider(parser):\n    flags(parser)\n"
    more = more.replace("flags = ", "import pathlib\nflags = ", 1)
    return fork(folder, f"{more}    parser.add_argument('--odd', {body})\n", says)


def no_text(rng: random.Random, folder: Path) -> Case:
    """A word of the command line that is not UTF-8, as Python has it."""
    word = rng.choice(("a\udcff", "\udc80", "b\udce9c"))
    where = rng.choice(("--save", "--log-json", "--tensorboard-dir"))
    saved = folder / "saved"
    argv = [*FLAGS, "--train-iters", "2", "--save", saved, where, f"{folder}/{word}"]
    return Case(argv, says=r"\\udc.* is not UTF-8, which it must be to be saved", absent=[saved])


KINDS = {
    kind.__name__: kind
    for kind in (
        numpy_number, other_type, no_number, odd_text, too_deep, hf_config_fails,
        from_hf_config_fails, lost_field, unwritten_field, changing_config, bad_names, bad_group,
        bad_flag, odd_value_of_a_flag, no_text,
    )
}  # fmt: skip


@pytest.mark.parametrize("name, seed", sampled(drawn(KINDS, 35), 6))
def test_what_a_resume_would_fail_at_is_refused_before_a_step(launcher, tmp_path, name, seed):
    check(launcher, KINDS[name], seed, tmp_path)


ROPE = """whole = hf_config


def hf_config(config, dtype="float32"):
    hf = whole(config, dtype)
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": hf.pop("rope_theta")}
    del hf["rope_scaling"]
    return hf
"""
SOUND = {
    "rope_parameters alone": ROPE,
    "rope_parameters of each kind of layer": ROPE.replace(
        'return hf\n',
        'hf["rope_parameters"] = {"full_attention": hf["rope_parameters"]}\n    return hf\n\n\n'
        'read = from_hf_config\n\n\ndef from_hf_config(hf):\n    rope = hf.get("rope_parameters")\n'
        '    return read({**hf, "rope_parameters": rope["full_attention"]})\n',
    ),
    "tuples and nested dicts": "def own(config):\n    w = config.window_size\n"
    "    return {'window_size': w, 'odd': (1, (2.5, None)), 'deep': {'a': (), 'b': {1: w}}}\n",
    "no model_type": "MODEL_TYPE = None\nwhole = hf_config\n\n\ndef hf_config(config, dtype=''):\n"
    "    return {k: v for k, v in whole(config, dtype).items() if k != 'model_type'}\n",
    "a flag of no field": "flags = extra_args_provider\n\n\ndef extra_args_provider(parser):\n"
    "    flags(parser)\n    parser.add_argument('--mood', nargs='*', default=['good'])\n",
    "a field that is no number of JSON's": "def own(config):\n"
    "    return {'window_size': config.window_size, 'scale': np.float64(0.1) * 3}\n",
    "a config.json that is taken apart": "read = from_hf_config\n\n\ndef from_hf_config(hf):\n"
    "    hf.pop('architectures')\n    return read(hf)\n",
}  # fmt: skip


def losses(launcher, folder, iterations, *flags):
    """Train up to an iteration; return the losses of the steps."""
    argv = [*FLAGS, "--train-iters", str(iterations), "--lr-decay-iters", "9", *map(str, flags)]
    done = launcher.python(*argv, "--log-json", folder / "log.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("name", sampled(sorted(SOUND), 8))
def test_a_fork_that_is_right_resumes(launcher, tmp_path, name):
    (tmp_path / "mine.py").write_text(FORK.format(more=SOUND[name]))
    file = ("--model-file", tmp_path / "mine.py", "--window-size", "8")
    straight, again = tmp_path / "straight", tmp_path / "again"
    straight.mkdir(), again.mkdir()
    whole = losses(launcher, straight, 4, *file)
    both = ("--save", again / "saved", "--load", again / "saved")
    assert losses(launcher, again, 2, *file, *both) == whole[:2]
    assert losses(launcher, again, 3, *file, *both)[-1] == whole[2]
    taken = losses(launcher, again, 4, *file[:2], *both, "--use-checkpoint-args")
    assert taken[-1] == whole[3]


@pytest.mark.prove
def test_the_rope_of_a_fork_may_change_where_it_is_allowed(launcher, tmp_path):
    (tmp_path / "mine.py").write_text(FORK.format(more=ROPE))
    argv = [*FLAGS, "--model-file", tmp_path / "mine.py", "--save", tmp_path / "saved"]
    argv += ["--load", tmp_path / "saved", "--rotary-base"]
    assert launcher.python(*argv, 1e4, "--train-iters", 1).returncode == 0
    done = launcher.python(*argv, 2e4, "--train-iters", 2)
    assert done.returncode == 2 and "rope_parameters is {" in done.stderr
    assert "(--rotary-base); --allow-change rope allows it" in done.stderr
    done = launcher.python(*argv, 2e4, "--train-iters", 2, "--allow-change", "rope")
    assert done.returncode == 0, done.stderr
    assert "was trained with rope_parameters {" in done.stdout
    assert "'rope_theta': 10000.0," in done.stdout and "'rope_theta': 20000.0," in done.stdout


@pytest.mark.parametrize("rank", sampled([1, 0], 2))
def test_ranks_are_refused_together(launcher, tmp_path, rank):
    """Every rank ends with 2 where the file of one, as on its machine, has a mistake."""
    more = "def hf_names(model):\n    return {}\n"
    here = tmp_path / "mine.py"
    here.write_text(FORK.format(more=f"import os\nif os.environ['RANK'] == '{rank}':\n    "
                                     f"{more.replace(chr(10), chr(10) + '    ')}"))  # fmt: skip
    argv = [*FLAGS[1:], "--train-iters", "2", "--model-file", str(here), "--save"]
    done = launcher.run(2, [*argv, str(tmp_path / "saved")])
    assert done.codes == [2, 2], [done.said(0), done.said(1)]
    assert "mine.py: hf_names has no embedding.weight" in done.said(0) + done.said(1)
    assert not (tmp_path / "saved").exists()
