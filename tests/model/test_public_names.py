# SPDX-License-Identifier: Apache-2.0
"""What a model's file imports from mpu stays where it is: forks of users import the same names.

NAMES is the promise. A name that docs/forking.md or a model's file imports and that is not in it is
added here; none is taken out or moved.
"""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "mpu.comm.mappings": (
        "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region",
        "reduce_from_tensor_model_parallel_region",
    ),
    "mpu.comm.transport": ("Label",),
    "mpu.context": ("LayerContext",),
    "mpu.comm.collectives": ("sum_in_order",),
    "mpu.gradients": ("use",),
    "mpu.grid": ("Grid",),
    "mpu.layers.context_attention": ("core_attention_of",),
    "mpu.layers.cross_entropy": ("output_loss", "vocab_parallel_cross_entropy"),
    "mpu.layers.dispatch": ("Capacity", "Plan", "count_of", "dispatcher"),
    "mpu.layers.embedding": ("VocabParallelEmbedding",),
    "mpu.layers.expert_load": ("ExpertLoad",),
    "mpu.layers.experts": ("Experts", "RouterLinear"),
    "mpu.layers.fused": ("RMSNorm", "ResidualRMSNorm", "apply_rope", "swiglu"),
    "mpu.layers.linear": (
        "ColumnParallelLinear", "Recipe", "RowParallelLinear", "column_vector",
    ),
    "mpu.layers.packed_seq_params": ("PackedSeqParams",),
    "mpu.layers.qkv": ("add_bias", "local_heads", "qkv_linear"),
    "mpu.layers.rope": ("LINEAR", "Yarn", "rope_frequencies", "rope_table"),
    "mpu.mup": ("MuP", "Widths"),
    "mpu.param": (
        "GROUPS", "Region", "divide", "draw_normal", "parameter", "placement_of", "saved_buffers",
        "tie", "unique_parameters",
    ),
    "mpu.param_grad": ("ParamGrad",),
    "mpu.pipeline.stage_layout": ("Stage",),
    "mpu.recompute": ("Decisions", "Recompute"),
}  # fmt: skip
IMPORT = re.compile(r"^[ +]*from (mpu[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def imported() -> set[tuple[str, str]]:
    """Return every (module, name) that the page on forks, a model's file or an example imports."""
    files = [ROOT / "docs/forking.md", *(ROOT / "model").glob("*.py")]
    files.remove(ROOT / "model/load.py")  # no model's file: it reads them
    files += (ROOT / "examples").rglob("*.py")
    return {
        (module, name.strip())
        for file in files
        for module, names in IMPORT.findall(file.read_text())
        for name in names.split(",")
    }


def test_the_names_are_where_they_were():
    for module, names in NAMES.items():
        found = importlib.import_module(module)
        missing = [name for name in names if not hasattr(found, name)]
        assert not missing, f"{module} has no {missing}, and forks import it"


def test_the_list_is_whole():
    listed = {(module, name) for module, names in NAMES.items() for name in names}
    assert len(imported()) > 20 and not imported() - listed
