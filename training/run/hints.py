# SPDX-License-Identifier: Apache-2.0
"""Add to an error of the first step which flag avoids the operation that failed.

Libraries look at a GPU, at their own versions and at a compiler when they are first called: a
dtype, a head size or a kernel that they do not have ends the first step. The traceback shows the
layer that made the call, and so which flag chooses another one. Later steps make the same calls.
On a CPU every operation is there: an error is the model's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

import torch

from mpu.comm.transport import CommunicationError
from training.run.stop import StopSignal
from training.settings.config import Config

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cuda",)
# of a kernel that was launched some time before: the traceback is another's
LATE = ("illegal memory access", "device-side assert")


@contextmanager
def hinting(config: Config, device: torch.device, signal: StopSignal) -> Iterator[None]:
    """Run the block; an error before `signal.stepped` gets a note (PEP 678) with what avoids it.

    None for a mistake of the user's (ValueError), and where another rank is the cause.
    """
    try:
        yield
    except (ValueError, CommunicationError):
        raise
    except Exception as error:
        late = signal.stepped or any(words in str(error) for words in LATE)
        hint = "" if late or device.type not in DEVICES else what_avoids(error, config)
        if hint:
            error.add_note(f"If a library has no kernel for this GPU or dtype, try {hint}.")
        raise


def what_avoids(error: Exception, config: Config) -> str:
    """Return what to do where an operation of a layer fails, "" where no flag avoids it."""
    calls = [
        (frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name)
        for frame, _ in walk_tb(error.__traceback__)
    ]
    hints = list(_hints(config))
    for file, function in reversed(calls):
        for place, name, hint in hints:
            if file.startswith(place) and name in ("", function):
                return hint
    return ""


def _hints(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (file or folder, function, "" for any, what avoids its operations)."""
    p, bf16 = config.parallel, config.run.dtype == torch.bfloat16
    largest = "no --qk-clip" if config.optimizer.qk_clip else "no --log-max-attention-logit"
    yield "mpu/layers/attention/max_logits.py", "", largest
    other = "auto" if p.attention_backend != "auto" else "unfused"
    yield "mpu/layers/attention/", "", f"--attention-backend {other}"
    yield "mpu/layers/norm_backends.py", "", "--norm-backend weft"
    yield "mpu/optim/adam_backends.py", "", "--optimizer-backend torch"
    yield "mpu/optim/newton_schulz.py", "", "--optimizer adam"
    yield "mpu/layers/linear_cross_entropy.py", "", "no --fused-linear-cross-entropy"
    yield "mpu/layers/dispatch.py", "", "another --moe-token-dispatcher-type"
    if bf16:
        sizes = "--hidden-size and --moe-ffn-hidden-size in multiples of 8"
        yield "mpu/layers/experts.py", "", f"{sizes}, or a run without --bf16"
    yield "mpu/layers/float8/", "accumulate", "--fp8-wgrad-bf16, or no --fp8-format"
    yield "mpu/layers/float8/", "", "another --fp8-recipe, or no --fp8-format"
    if bf16 and p.main_grads_dtype != "bf16":
        yield "mpu/layers/linear.py", "accumulate", "--main-grads-dtype bf16"
    without = "pip uninstall triton, without which torch's slower operations are used"
    yield "mpu/kernels/", "", without
