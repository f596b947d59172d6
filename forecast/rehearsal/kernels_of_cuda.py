# SPDX-License-Identifier: Apache-2.0
"""List torch's operations without a CUDA kernel, from torch's own list of functions.

torch ships native_functions.yaml with torchgen. An operation runs on CUDA if one of its overloads
names a CUDA kernel, is a composite of others, or names no kernel, which also means a composite.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FILE = "packaged/ATen/native/native_functions.yaml"
RUNS = re.compile(r"\b(CUDA|CompositeImplicitAutograd|CompositeExplicitAutograd\w*)\b")
# used if torchgen is missing: operations of torch 2.11 to 2.13 that a trainer might call
STORED = frozenset({
    "aten::mkldnn_linear", "aten::mkldnn_convolution", "aten::mkldnn_max_pool2d",
    "aten::to_mkldnn", "aten::_to_dense", "aten::fbgemm_linear_int8_weight",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
})  # fmt: skip
NOT_ON_CUDA = ("mkldnn::", "mkldnn_prepacked::", "quantized::", "onednn::")


@cache
def without() -> frozenset[str]:
    """Return the operations, such as "aten::to_mkldnn", of which no overload runs on CUDA."""
    found = find_spec("torchgen")
    path = Path(next(iter(found.submodule_search_locations or [""]))) / FILE if found else None
    if path is None or not path.is_file():
        return STORED
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> frozenset[str]:
    """Return the operations of a native_functions.yaml that do not run on CUDA."""
    runs: dict[str, bool] = {}
    for entry in re.split(r"^- func: ", text, flags=re.M)[1:]:
        name = "aten::" + re.split(r"[.(]", entry, maxsplit=1)[0]
        table = re.search(r"^  dispatch:\n((?:    .*\n|\s*#.*\n)+)", entry, flags=re.M)
        there = table is None or "structured_delegate" in entry or bool(RUNS.search(table[1]))
        runs[name] = runs.get(name, False) or there
    return frozenset(name for name, there in runs.items() if not there)


def has_kernel(op: str) -> bool:
    """Return whether an operation runs on CUDA; assumed for operations that torch does not list."""
    return op not in without() and not op.startswith(NOT_ON_CUDA)
