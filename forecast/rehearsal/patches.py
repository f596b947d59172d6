# SPDX-License-Identifier: Apache-2.0
"""Replace functions of modules and classes, and put them back."""

import inspect
import sys
from typing import Any


class Patches:
    """The replaced attributes, in order. As a context manager it restores them at the end."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute of a module or a class."""
        # static: an ordinary lookup would bind a class method to its class
        old = inspect.getattr_static(owner, name)
        if isinstance(old, property):  # of the owner's own class: setting calls its setter
            old = getattr(owner, name)
        self._before.append((owner, name, old))
        setattr(owner, name, new)

    def everywhere(self, old: Any, new: Any) -> None:
        """Replace a function in every module that has it under its own name."""
        name = str(old.__name__)
        modules: list[Any] = list(sys.modules.values())
        for module in modules:
            if vars(module).get(name) is old:
                self.replace(module, name, new)

    def restore(self) -> None:
        """Restore all replaced attributes."""
        for owner, name, old in reversed(self._before):
            setattr(owner, name, old)
        self._before.clear()

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
