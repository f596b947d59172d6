# SPDX-License-Identifier: Apache-2.0
"""Read --nccl-communicator-config-path: Megatron's file of NCCL settings, by group.

    dp:                    tp, cp, dp, dp_cp, pp, embd, ep or expt_dp
      min_ctas: 4          minimum and maximum of thread blocks for a collective of the group
      max_ctas: 16
      cga_cluster_size: 2
      net_name: IB
      is_high_priority_stream: true

The names are those of Megatron-LM's parallel_state.get_nccl_options and of ncclConfig_t.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from training.files.untrusted import parse_json, read_plain
from training.settings.config import UsageError

FLAG = "--nccl-communicator-config-path"
LARGEST = 1 << 16  # bytes
GROUPS = {  # {Megatron's name: ours}
    name: name for name in ("tp", "cp", "dp", "dp_cp", "pp", "embd", "ep")
} | {"expt_dp": "edp"}  # fmt: skip
KINDS: dict[str, type] = {
    "min_ctas": int, "max_ctas": int, "cga_cluster_size": int, "net_name": str,
    "is_high_priority_stream": bool,
}  # fmt: skip


@lru_cache
def nccl_groups(path: str | None) -> Mapping[str, Mapping[str, Any]]:
    """Return {axis: settings}. Raises UsageError naming the file, the group and the rule."""
    if path is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, settings in _read(path).items():
        where = f"{FLAG} {path}: {name}"
        if name not in GROUPS:
            raise UsageError(f"{where} is not a group: the groups are {', '.join(GROUPS)}")
        if not isinstance(settings, dict):
            raise UsageError(f"{where} must be a table of settings")
        for key, value in settings.items():
            if key not in KINDS:
                raise UsageError(f"{where}: {key!r} is none of {', '.join(KINDS)}")
            if type(value) is not KINDS[key]:
                raise UsageError(f"{where}: {key} is {value!r}, not of type {KINDS[key].__name__}")
            if isinstance(value, int) and not 0 <= value <= 64:
                raise UsageError(f"{where}: {key} {value} must be 0 to 64")
        if settings.get("min_ctas", 0) > settings.get("max_ctas", 64):
            raise UsageError(
                f"{where}: min_ctas {settings['min_ctas']} is more than max_ctas "
                f"{settings['max_ctas']}"
            )
        found[GROUPS[name]] = settings
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        text = read_plain(path, LARGEST).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{FLAG} {path} cannot be read: {error}") from None
    try:
        import yaml
    except ImportError:  # JSON is YAML, too
        try:
            found = parse_json(text, path)
        except ValueError as error:
            raise UsageError(
                f"{FLAG} {path}: reading YAML needs PyYAML (pip install pyyaml), and {error}"
            ) from None
    else:
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{FLAG} {path} is not YAML: {str(error).splitlines()[0]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{FLAG} {path} must be a table of groups")
    return found
