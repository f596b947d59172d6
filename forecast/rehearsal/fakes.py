# SPDX-License-Identifier: Apache-2.0
"""Answer the usual operations on fake tensors by torch's meta kernels alone.

Each dispatch of FakeTensorMode looks for symbolic sizes, constants and devices that differ, which
takes longer than the rest of a rehearsal. The usual operation has none of these: its tensors are on
one device, and a meta kernel says what it returns. All others go to FakeTensorMode.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpu.module_tracker import tensors_of
from mpu.torch_private import fake_tensors, in_meta_kernel, meta_kernel_says


def fake_tensor_mode() -> Any:
    """Return a FakeTensorMode that asks meta kernels first, and takes tensors that are not fake."""
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
            """Return the one device of an operation, None where there is none or a value."""
            if kwargs.get("device") is not None:
                return None
            tensors: list[Any] = [*tensors_of((*args, *kwargs.values()))]
            if any(type(x) is not fake.FakeTensor or x.constant is not None for x in tensors):
                return None
            devices = {x.fake_device for x in tensors}
            return devices.pop() if len(devices) == 1 else None

        def on(self, device: torch.device, out: Any) -> Any:
            """Return what a meta kernel has made as fake tensors of a device."""
            if isinstance(out, (list, tuple)):
                return type(out)(self.on(device, x) for x in out)
            new = isinstance(out, Tensor) and not isinstance(out, fake.FakeTensor)
            return fake.FakeTensor(self, out, device) if new else out

    return Mode(allow_non_fake_inputs=True)
