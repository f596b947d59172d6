# SPDX-License-Identifier: Apache-2.0
"""Rehearse one command line after another in one process: a line of JSON in, a line out.

in   {"world": 8, "argv": [...], "all": false}
out  {"code": 0, "report": {...}, "text": "..."}

The report also has "actions": the most bytes in each action of the last step, as (its words,
bytes). all: every micro-batch runs. Importing torch takes longer than a small rehearsal, and the
fake device must be loaded before it. Each command line runs in a process that is forked from this
one, as a rehearsal replaces functions of torch.
"""

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from forecast.rehearsal import guard


def actions(seen: Any) -> list[list[Any]]:
    """Return the most bytes in each action of the last step of a rehearsal on a GPU."""
    from forecast.device_file import read_device
    from forecast.rehearsal.events import Action, Launch
    from forecast.rehearsal.memory import step
    from forecast.rehearsal.workspaces import of_launch, of_matmuls

    events, found = seen.recorder.events, list[list[Any]]()
    major = read_device(seen.config.rehearse.rehearse_device).major
    live, now = dict[int, Any](), of_matmuls(events[seen.first :], major)
    for i, event in enumerate(events):
        now += step(live, event, seen.recorder.device)
        if i >= seen.first and type(event) is Action:
            found.append([event.words, now])
        elif found:
            own = of_launch(event) if type(event) is Launch else 0
            found[-1][1] = max(found[-1][1], now + own)
    return found


def answer(line: str) -> None:
    """Rehearse the command line of a request, and print the answer."""
    import pretrain_llama
    from forecast.rehearsal import main, run
    from training.settings.pipeline_schedule import micro_batch_counts

    described, asked = main.describe, json.loads(line)

    def describe(seen: Any) -> Any:
        made, text = described(seen)
        on_gpu = seen.recorder.device != "cpu"
        return made | ({"actions": actions(seen)} if on_gpu else {}), text

    main.describe = describe
    if asked["all"]:
        run.few_of = lambda config: micro_batch_counts(config)[0]
    os.environ["WORLD_SIZE"] = str(asked["world"])
    said, path = io.StringIO(), asked["file"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        argv = [*asked["argv"], "--rehearse", "--rehearse-json", path]
        code = main.main(pretrain_llama, argv)
    report = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
    Path(path).unlink(missing_ok=True)
    print(json.dumps({"code": code, "report": report, "text": said.getvalue()}), flush=True)


def serve() -> None:
    """Answer until the input ends."""
    guard.load()
    from forecast.rehearsal import main  # noqa: F401  # once, for all processes
    from forecast.rehearsal.fakes import fake_tensor_mode

    fake_tensor_mode()  # whose first one imports much
    gc.freeze()
    for line in sys.stdin:
        if not os.fork():
            try:
                answer(line)
            finally:
                os._exit(0)  # threads of the trainer may still wait
        os.wait()


if __name__ == "__main__":
    serve()
