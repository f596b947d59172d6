# SPDX-License-Identifier: Apache-2.0
"""Run common operations on fake tensors directly by torch's meta kernels.

Each dispatch of FakeTensorMode checks for symbolic sizes, constants and different devices, which
takes longer than the rest of a rehearsal. Most operations have none of these: their tensors are on
one device, and a meta kernel computes the result's shape. All others go to FakeTensorMode.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpu.module_tracker import tensors_of
from mpu.torch_private import fake_tensors, in_meta_kernel, meta_kernel_says


def fake_tensor_mode() -> Any:
    """Return a FakeTensorMode that tries meta kernels first, and allows non-fake tensors."""
    fake = fake_tensors()

    class Mode(fake.FakeTensorMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            device = self.device_of(args, kwargs) if meta_kernel_says(func) else None
            if device is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            with in_meta_kernel(self):
                out = func(*args, **kwargs)
            return self.on(device, out)

        def device_of(self, args: Any, kwargs: Mapping[str, Any]) -> torch.device | None:
            """Return the only device of an operation's tensors, else None.

            None also if `device` is passed, or if a tensor is not fake or is a constant.
            """
            if kwargs.get("device") is not None:
                return None
            tensors: list[Any] = [*tensors_of((*args, *kwargs.values()))]
            if any(type(x) is not fake.FakeTensor or x.constant is not None for x in tensors):
                return None
            devices = {x.fake_device for x in tensors}
            return devices.pop() if len(devices) == 1 else None

        def on(self, device: torch.device, out: Any) -> Any:
            """Return a meta kernel's results as fake tensors on a device."""
            if isinstance(out, (list, tuple)):
                return type(out)(self.on(device, x) for x in out)
            new = isinstance(out, Tensor) and not isinstance(out, fake.FakeTensor)
            return fake.FakeTensor(self, out, device) if new else out

    return Mode(allow_non_fake_inputs=True)
