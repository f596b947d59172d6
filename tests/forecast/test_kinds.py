# SPDX-License-Identifier: Apache-2.0
"""What groups kinds of memory has each kind of the recording once: none is left out of a sum."""

import pytest

from forecast.dry_run import WORKSPACES
from forecast.planner import table
from forecast.recording import KINDS
from tools.draw_memory import GROUPS


@pytest.mark.parametrize("groups", [GROUPS, table.KINDS], ids=["picture", "plan"])
def test_every_kind_is_in_one_group(groups):
    assert sorted(kind for parts in groups.values() for kind in parts) == sorted(
        (*KINDS, WORKSPACES)
    )
