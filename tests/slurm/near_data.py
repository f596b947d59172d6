# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/data.md that copy a pair to a disk of each node."""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def lines() -> str:
    """Return them, as a job script has them."""
    before, _, rest = PAGE.read_text().partition("```bash\nexport DATA NEAR\n")
    assert before and rest, f"{PAGE} has no such block"
    return "set -euo pipefail\nexport DATA NEAR\n" + rest.partition("```")[0]
