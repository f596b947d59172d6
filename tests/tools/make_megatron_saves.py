#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make tests/data/megatron_core: saves by megatron-core's own classes, optimizer's state and all.

    pip install psutil megatron-core==0.16.1
    pip download --no-deps megatron-core==0.12.1 && unzip -d OLD megatron_core-0.12.1-*.whl
    python tests/tools/make_megatron_saves.py OLD

OLD holds the version that still wrote fully_sharded_model_space. Each archive is deterministic but
for what megatron-core itself draws at random (names of temporary files).
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RUN = Path(__file__).with_name("megatron_core_run.py")
DATA = Path(__file__).parent.parent / "data" / "megatron_core"
RUNS = {  # archive: flags; the losses of 20 further steps are kept of the first
    "plain": ["--dump"],
    "tp2_pp2": [
        *"--format dp_reshardable --also fully_reshardable dp_zero_gather_scatter".split(),
        *"--tp 2 --pp 2 --dtype bf16 --more 0".split(),
    ],
    "old_tp2_dp2": [
        *"--format fully_sharded_model_space --also dp_zero_gather_scatter".split(),
        *"--tp 2 --dp 2 --dtype bf16 --more 0 --megatron".split(),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", help="folder with megatron-core 0.12.1")
    parser.add_argument("--only", choices=RUNS)
    args = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as at:
        first = Path(at) / "plain"
        for name, flags in RUNS.items():
            if args.only and name not in ("plain", args.only):
                continue
            out = Path(at) / name
            more = ["--data", str(first / "text")] if name != "plain" else []
            old = [args.old] if flags[-1:] == ["--megatron"] else []
            subprocess.run([sys.executable, RUN, out, *more, *flags, *old], check=True)
            with tarfile.open(DATA / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for path in sorted(out.rglob("*")):
                    here = path.relative_to(out)
                    if path.is_file() and "cache" not in here.parts:
                        info = archive.gettarinfo(path, str(here))
                        info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
                        with open(path, "rb") as file:
                            archive.addfile(info, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
