# SPDX-License-Identifier: Apache-2.0
"""A model whose attention does not know of other context-parallel ranks is refused, by layer."""

import re
from pathlib import Path

import pytest
import torch

from forecast.obeyed_flags import check_attention
from mpu.layers.attention.core import core_attention
from mpu.layers.packed_seq_params import PackedSeqParams
from pretrain_llama import model_provider
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    --context-parallel-size 2 --num-layers 3 --hidden-size 16 --ffn-hidden-size 24
    --num-attention-heads 4 --num-query-groups 2 --group-query-attention --seq-length 16
    --vocab-size 50 --micro-batch-size 2 --global-batch-size 2 --mock-data --train-iters 1
    --lr 1e-3 --device cpu --cp-comm-type
"""
CORE = "recompute.selective(core_attention_of(ctx))"


def check(path: Path, kind: str, edits: dict[str, str]) -> None:
    text = (ROOT / "model/llama.py").read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    config = parse([*FLAGS.split(), *kind.split(), "--model-file", str(path)], 2)
    check_attention(config, model_provider)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_llama_passes(tmp_path, kind):
    check(tmp_path / "copy.py", kind, {})


def test_an_attention_of_its_own_is_refused(tmp_path):
    """It attends to the rank's own tokens, as if they were a row; here in layer 1 alone."""
    last = "        self._rope: "
    own = "        self.layers['1'].attention.core = lambda qkv, *rest, **more: qkv[..., :16]\n"
    with pytest.raises(ValueError, match=re.escape("layer 1 of --model-file")):
        check(tmp_path / "own.py", "p2p", {last: own + last})


def test_a_fork_that_calls_core_attention_is_refused(tmp_path):
    edits = {
        CORE: "recompute.selective(core_attention)",
        "from mpu.layers.context_attention import core_attention_of": (
            "from mpu.layers.attention.core import core_attention"
        ),
    }
    with pytest.raises(ValueError, match="use core_attention_of.ctx. instead of core_attention"):
        check(tmp_path / "plain.py", "p2p", edits)


def test_a_fork_that_asks_for_each_layers_context_passes(tmp_path):
    edits = {"self.layer_config(i), ctx, ": "self.layer_config(i), ctx.of_layer(i), "}
    check(tmp_path / "old.py", "all_gather", edits)


def test_the_documents_of_whole_rows_are_what_a_rank_takes():
    qkv, turn = torch.randn(8, 1, 32), torch.ones(8, 1, 1, 4)
    with pytest.raises(ValueError, match="have 16 tokens, but the batch has 8; under context"):
        core_attention(qkv, turn, turn, 2, 1, PackedSeqParams.of((16,)))
