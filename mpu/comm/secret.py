# SPDX-License-Identifier: Apache-2.0
"""Read the run's secret, which its ranks know and nobody else (docs/reliability.md)."""

import os
import stat

SHORTEST, LONGEST = 16, 4096  # bytes


def run_secret(text: str | None, path: str | None) -> bytes:
    """Return the secret of WEFT_SECRET (text) or in the file WEFT_SECRET_FILE (path).

    Returns b"" where neither is set. Raises ValueError, and OSError where the file cannot be read.
    """
    if text is not None and path is not None:
        raise ValueError("WEFT_SECRET and WEFT_SECRET_FILE are both set: set one of them")
    if path is not None:
        secret, name = _content(path).strip(), f"WEFT_SECRET_FILE {path}"
    elif text is not None:
        secret, name = os.fsencode(text).strip(), "WEFT_SECRET"
    else:
        return b""
    if not SHORTEST <= len(secret) <= LONGEST:
        raise ValueError(
            f"{name} has {len(secret)} bytes: it must have {SHORTEST} to {LONGEST}, for instance "
            "those of `openssl rand -hex 32`"
        )
    return secret


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO does not keep it waiting
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"WEFT_SECRET_FILE {path} is not a file")
        if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"WEFT_SECRET_FILE {path} may be read or written by others: it must be yours and "
                "have mode 600 or 400"
            )
        return os.read(fd, LONGEST + 2)
    finally:
        os.close(fd)
