# SPDX-License-Identifier: Apache-2.0
"""The failure channel's messages: their kinds, and the types of their fields.

Control characters are removed from text that came over the wire, so it may be printed.
"""

from typing import Any, NamedTuple

from training.faults.wire import PRINTED, Connection
from training.files.untrusted import printable

FORMAT: dict[str, dict[str, type]] = {
    "beat": {"action": str},  # of a rank
    "failed": {"action": str, "why": str, "wait": float},  # wait: seconds for a better explanation
    "status": {"said": str},  # of a rank without progress: HangWatch.status, in JSON
    "stack": {"text": str},  # of a rank, after a report
    "place": {"said": str},  # where a rank's process is, rank 0's too: Dump.address, in JSON
    "unheard": {"address": str, "seconds": float},  # no acknowledgement from there for these
    "bye": {},
    "alive": {"action": str},  # rank 0's beat, with rank 0's action
    "report": {"text": str},  # of rank 0 to a rank that hangs
    "cause": {"rank": int, "action": str, "why": str, "quick": int, "address": str},
}
QUEUE = 1 << 18  # bytes that may be queued for a peer that does not read
LARGEST = 1e9  # an upper bound on valid numbers


class Message(NamedTuple):
    """One message: its kind and the fields that FORMAT names."""

    kind: str
    fields: dict[str, Any]


def send(connection: Connection, kind: str, **fields: Any) -> None:
    """Queue a message, unless too much is queued for a peer that does not read."""
    names = FORMAT[kind]
    assert fields.keys() == names.keys(), f"{kind} has {sorted(names)}, not {sorted(fields)}"
    if connection.waiting() < QUEUE:
        texts = {n: printable(v, most=PRINTED) for n, v in fields.items() if isinstance(v, str)}
        connection.send({"kind": kind, **fields, **texts})


def checked(received: dict[str, Any]) -> Message:
    """Return a received dict as a message. Raises ValueError if it does not match FORMAT."""
    kind = received.pop("kind", None)
    names = FORMAT.get(kind) if isinstance(kind, str) else None
    if names is None or received.keys() != names.keys():
        raise ValueError("no message of ours")
    fields: dict[str, Any] = {}
    for name, of in names.items():
        value = received[name]
        if of is str and isinstance(value, str):
            fields[name] = printable(value, most=PRINTED)
        elif of is not str and type(value) in (int, of) and abs(value) < LARGEST:
            fields[name] = of(value)
        else:
            raise ValueError(f"{name} is not a number or a text of ours")
    return Message(kind, fields)


def receive(connection: Connection) -> list[Message]:
    """Return the messages that have arrived; `connection.ended` is "" if more may arrive."""
    return check(connection, connection.read())


def check(connection: Connection, received: list[dict[str, Any]]) -> list[Message]:
    """Return the received dicts as messages; an invalid one ends the connection."""
    messages = []
    for words in received:
        try:
            messages.append(checked(words))
        except ValueError:
            connection.ended = "broken"
            break
    return messages
