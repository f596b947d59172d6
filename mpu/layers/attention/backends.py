# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes attention: the only place where --attention-backend is interpreted.

    auto     torch's choice for whole rows: cuDNN on Hopper and Blackwell with cuDNN > 9.15.0,
             else flash; flash for documents and windows, whose lengths change from step to step
    flash    FlashAttention: 3 or 4 if their package is active in torch, else torch's own 2
    fused    cuDNN's kernels
    unfused  matrix products and a softmax, block after block
    local    Weft's own code: csrc/attention.h on a CPU; Weft has no CUDA kernel, so unfused there
    te       Transformer Engine's DotProductAttention, which makes its own choice

The names are those of Megatron-LM's AttnBackend (megatron/core/transformer/enums.py), except te.
The conditions are torch's (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, read at main's
001f694a; torch/nn/attention/_fa3.py of 2.13), which `torch._fused_sdp_choice` checks on a GPU.
Everything here is a pure function of its arguments, except `card_of`, which queries the device.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch

from mpu.launch import deprioritizes_cudnn
from mpu.torch_private import VARLEN, WAYS, attention_lacks

BACKENDS = ("auto", "flash", "fused", "unfused", "local", "te")
# The kind of attention: whole rows of one document; blocks of such rows, merged by log-sum-exp
# (context parallelism); documents or windows; a few tokens that attend to a growing key cache
Work = Literal["rows", "blocks", "documents", "cache"]
# cpu: csrc/attention.h, else torch's operator for CPUs. math: matrix products
Kernel = Literal["cpu", "flash", "cudnn", "efficient", "math", "te"]

FLAG = "--attention-backend"
HALVES = (torch.bfloat16, torch.float16)
CUDNN_PREFERRED = 91500  # torch prefers a newer one: pytorch/pytorch#169849
CUDNN_OLDEST = 90000
CUDNN_WIDE = 92200  # a newer one supports heads of 256 on Hopper and Blackwell


class Card(NamedTuple):
    """The properties of a device and of torch on which the choice of a backend depends."""

    kind: str = "cpu"
    major: int = 0
    minor: int = 0
    cudnn: int = 0  # as torch.backends.cudnn.version(); 0: none
    flash: int = 2  # version of FlashAttention that is active in torch
    deterministic: bool = False
    cuda: int = 13  # major version of CUDA that torch was built for
    cudnn_last: bool = False  # TORCH_CUDNN_SDPA_DEPRIORITIZED is set
    lacks: tuple[str, ...] = ()  # operators missing in this torch

    def __str__(self) -> str:
        if self.kind != "cuda":
            return f"a {self.kind} device"
        cudnn = f"cuDNN {_version(self.cudnn)}" if self.cudnn else "without cuDNN"
        return f"compute capability {self.major}.{self.minor}, {cudnn}"


def card_of(device: torch.device | str) -> Card:
    """Return the Card of a device, read from torch; a CPU or meta device has only its kind."""
    kind = torch.device(device).type
    if kind != "cuda":
        return Card(kind)
    major, minor = torch.cuda.get_device_capability(device)
    active = torch.nn.attention.current_flash_attention_impl()
    return Card(
        kind,
        major,
        minor,
        cudnn=torch.backends.cudnn.version() or 0,
        flash=int(active.removeprefix("FA")) if active else 2,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cuda=int((torch.version.cuda or "13").partition(".")[0]),
        cudnn_last=deprioritizes_cudnn(),
        lacks=attention_lacks(),
    )


def kernel_of(
    requested: str, card: Card, dtype: torch.dtype, head_size: int, work: Work = "rows"
) -> Kernel:
    """Return which kernel computes attention. requested: one of BACKENDS; head_size: of q, k and v.

    Raises ValueError if the requested kernel does not support it; the message names the flag.
    """
    if requested not in BACKENDS:
        raise ValueError(f"{FLAG} {requested}: must be one of {', '.join(BACKENDS)}")
    if requested == "te" and work != "cache":
        return "te"
    if requested == "unfused" or (requested == "local" and card.kind == "cuda"):
        return "math"
    if card.kind != "cuda":
        return "cpu"
    # for whole rows torch itself chooses, unless a flag names the kernel
    lacks = () if requested == "auto" and work == "rows" else card.lacks
    no_flash = why_no_flash(card, dtype, head_size) or why_no_operator(lacks, "flash", work)
    if requested == "flash":
        if no_flash:
            raise ValueError(f"{FLAG} flash: {no_flash}")
        return "flash"
    no_cudnn = why_no_cudnn(card, dtype, head_size, work) or why_no_operator(lacks, "cudnn", work)
    if requested == "fused" and work != "cache":
        if why := no_cudnn:
            raise ValueError(f"{FLAG} fused: {why}")
        return "cudnn"
    if prefers_cudnn(card) and not no_cudnn:
        return "cudnn"
    if not no_flash:
        return "flash"
    unit = 8 if dtype in HALVES else 4
    if work in ("rows", "cache") and dtype != torch.float64 and head_size % unit == 0:
        return "efficient"
    return "math"


def prefers_cudnn(card: Card) -> bool:
    """Return whether torch prefers cuDNN to flash: check_prefer_cudnn_attention.

    It also respects TORCH_CUDNN_SDPA_DEPRIORITIZED, with which users avoid faulty cuDNN versions.
    """
    if card.cudnn_last:
        return False
    minors = (0, 3) if card.cuda < 13 else range(100)
    return card.cudnn > CUDNN_PREFERRED and card.major in (9, 10) and card.minor in minors


def why_no_cudnn(card: Card, dtype: torch.dtype, head_size: int, work: Work = "rows") -> str:
    """Return why cuDNN's attention does not support this, or "": can_use_cudnn_attention.

    cuDNN builds a plan for each new shape, which takes about half a second
    (sgl-project/sglang#4650), so documents, windows and a growing cache use other kernels.
    """
    if work in ("documents", "cache"):
        return (
            "cuDNN builds a plan for each new length, and the lengths of documents and windows "
            "change from step to step; use flash or auto"
        )
    if dtype not in HALVES:
        return f"cuDNN's attention computes bf16 and fp16, not {_name(dtype)}; use auto"
    if not (8, 0) <= (card.major, card.minor) <= (12, 1):
        return f"cuDNN's attention runs on compute capability 8.0 to 12.1, not {card}; use auto"
    if card.cudnn < CUDNN_OLDEST:
        return f"torch's cuDNN must be 9.0 or newer, found {card}; use auto"
    if card.deterministic:
        return "cuDNN's attention is not deterministic; with --deterministic-mode use flash"
    wide = (card.major, card.minor) == (9, 0) or card.major == 10
    most = 256 if wide and card.cudnn > CUDNN_WIDE else 128
    if head_size % 8 or head_size > most or 128 < head_size < most:
        only = "or of 256 " if most == 256 else ""
        return (
            f"--kv-channels {head_size}: cuDNN's attention takes a head of at most 128 channels "
            f"{only}in multiples of 8 on {card}; use auto"
        )
    return ""


def why_no_length(card: Card, length: int) -> str:
    """Return why cuDNN's attention must not be used for rows or blocks of `length` tokens, or "".

    Up to 9.15.0 its backward accesses memory beyond them (pytorch/pytorch#169849, #171627).
    """
    if card.cudnn > CUDNN_PREFERRED or length % 128 == 0:
        return ""
    return (
        f"cuDNN {_version(card.cudnn)} reads beyond the end of rows and blocks of {length} tokens, "
        "no multiple of 128; use flash or auto, or cuDNN 9.15.1 or newer"
    )


def why_no_flash(card: Card, dtype: torch.dtype, head_size: int) -> str:
    """Return why FlashAttention cannot train with this, or "": can_use_flash_attention.

    torch pads heads to a multiple of 8; Weft calls the operator directly, without padding.
    """
    place = (card.major, card.minor)
    if dtype not in HALVES:
        return f"FlashAttention computes bf16 and fp16, not {_name(dtype)}; use auto"
    if not (8, 0) <= place <= (12, 1):
        return f"FlashAttention runs on compute capability 8.0 to 12.1, not {card}; use auto"
    if head_size % 8 or head_size > 256:
        return (
            f"--kv-channels {head_size}: FlashAttention takes a head of at most 256 channels in "
            "multiples of 8; use auto"
        )
    if ((8, 6) <= place <= (8, 9) or place >= (12, 0)) and 192 < head_size <= 224:
        return (
            f"--kv-channels {head_size}: FlashAttention's backward does not support a head of 193 "
            f"to 224 channels on {card}; use auto"
        )
    return ""


def why_no_operator(lacks: Collection[str], kernel: Kernel, work: Work) -> str:
    """Return why torch's operators of a kernel cannot be called, or "". lacks: see `Card`.

    flash computes documents by one operator or, if that is missing, by the operators of blocks.
    """
    missing = [name for name in WAYS[kernel] if name in lacks]
    if kernel == "flash" and work in ("documents", "cache") and VARLEN not in lacks:
        return ""
    if not missing:
        return ""
    return (
        f"torch {torch.__version__} has no aten::{missing[0]} as Weft calls it "
        "(mpu/torch_private.py); use auto"
    )


def describe(
    requested: str, card: Card, dtype: torch.dtype, head_size: int, works: Collection[Work]
) -> str:
    """Return a log line that names the kernels in use. Raises ValueError as `kernel_of` does."""
    kernels = [kernel_of(requested, card, dtype, head_size, work) for work in works]
    names = " and ".join(dict.fromkeys(NAMES[k].format(flash=card.flash) for k in kernels))
    where = f" on {card}" if card.kind == "cuda" else ""
    return f"attention: {names} ({FLAG} {requested}{where})"


NAMES: dict[Kernel, str] = {
    "cpu": "blocks of csrc/attention.h or of torch's operator for CPUs",
    "flash": "FlashAttention {flash}",
    "cudnn": "cuDNN",
    "efficient": "torch's memory-efficient attention",
    "math": "matrix products",
    "te": "Transformer Engine",
}


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float64: "fp64"}.get(dtype, str(dtype))


def _version(cudnn: int) -> str:
    """Return "9.19.0" for 91900."""
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
