# SPDX-License-Identifier: Apache-2.0
"""Run tests/run_ranks.py with ranks that record every batch before they train on it: a script.

Each rank appends a line to ledger.R in the job's folder for each step: updates before it, samples
consumed, and its rows as [sample, token, ..., token], in order.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_ranks  # noqa: E402
from run_ranks import pretrain_llama  # noqa: E402

train_step = pretrain_llama.train_step


def write_down(run: Any, batches: list[Any], *rest: Any) -> Any:
    """Take the place of `train_step`."""
    rows = []
    for batch in batches:
        for i, (tokens, labels) in enumerate(
            zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
        ):
            assert tokens[1:] == labels[:-1]
            rows.append([batch.first_sample + i, *tokens, labels[-1]])
    line = json.dumps({"iteration": run.iteration, "consumed": run.consumed, "rows": rows})
    path = Path(run.config.log.log_json).parent / f"ledger.{run.grid.rank}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)
    return train_step(run, batches, *rest)


if __name__ == "__main__":
    pretrain_llama.train_step = write_down
    run_ranks.main()
