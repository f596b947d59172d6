# SPDX-License-Identifier: Apache-2.0
"""Read a pickle as data: follow its opcodes, import nothing, call nothing.

Where unpickling would look up a class or a function and call it, this makes a Record of its name
and arguments. Names of classes that no checkpoint has, and opcodes that none needs, are refused.
"""

import pickletools
import re
from dataclasses import dataclass
from typing import Any

# What torch, torch.distributed.checkpoint and megatron-core put into a checkpoint's metadata.
KNOWN = re.compile(
    r"torch\.(\w+Storage|Size|u?int\d+|float\d+(_\w+)?|bfloat16|bool|strided)"
    r"|torch\.storage\.\w+Storage|torch\._utils\._rebuild_tensor_v[23]|torch\.device"
    r"|torch\.serialization\._get_layout"
    r"|torch\.distributed\.checkpoint\.(metadata|planner|filesystem)\.\w+"
    r"|megatron\.core\.dist_checkpointing\.[\w.]+"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?(Pure)?PosixPath"
)
CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ANY = re.compile(r"[\w.<>]+")  # for a pickle of which only some numbers are looked at
LITERAL = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
LITERAL |= {"SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
PUT, GET = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(eq=False)
class Record:
    """What would have been an object. name: of its class or function. state: set after that."""

    name: str
    args: Any = None  # None: the class or function itself
    state: Any = None


class Table(list[tuple[Any, Any]]):
    """What would have been a dict: (key, value) pairs. Keys may be Records."""

    def named(self) -> dict[str, Any]:
        """Return the pairs whose keys are texts."""
        return {key: value for key, value in self if isinstance(key, str)}


def read_inert(data: bytes, known: re.Pattern[str] = KNOWN) -> Any:
    """Return what a pickle describes. Raises ValueError for what is none, or is not a
    checkpoint's: it names a class that is not `known`."""
    try:
        return _read(data, known)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is not a valid pickle ({error})") from None


def _read(data: bytes, known: re.Pattern[str]) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("it is not a valid pickle (no mark)")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def named(module: Any, name: Any) -> Record:
        full_name = f"{module}.{name}"
        if not known.fullmatch(full_name):
            raise ValueError(f"it names {full_name[:80]}, which is not in a checkpoint's metadata")
        return Record(full_name)

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        kind = opcode.name
        if kind in LITERAL:
            stack.append(argument)
        elif kind in CONSTANT:
            stack.append(CONSTANT[kind])
        elif kind == "MARK":
            stack.append(_MARK)
        elif kind == "EMPTY_DICT":
            stack.append(Table())
        elif kind == "EMPTY_LIST":
            stack.append([])
        elif kind == "EMPTY_TUPLE":
            stack.append(())
        elif kind in TUPLES:
            stack[-TUPLES[kind] :] = [tuple(stack[-TUPLES[kind] :])]
        elif kind == "TUPLE":
            stack.append(tuple(since_mark()))
        elif kind == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif kind == "APPENDS":
            values = since_mark()
            stack[-1].extend(values)
        elif kind == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1].append((key, value))
        elif kind == "SETITEMS":
            values = since_mark()
            stack[-1].extend(zip(values[::2], values[1::2], strict=True))
        elif kind == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif kind in PUT:
            memo[argument] = stack[-1]
        elif kind in GET:
            stack.append(memo[argument])
        elif kind == "GLOBAL":
            stack.append(named(*argument.split(" ", 1)))
        elif kind == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif kind in ("NEWOBJ", "REDUCE"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(Record(function.name, arguments))
        elif kind == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif kind == "BINPERSID":
            stack.append(Record("persistent", stack.pop()))
        elif kind == "STOP":
            (result,) = stack
            return result
        elif kind not in ("PROTO", "FRAME"):
            raise ValueError(f"its opcode {kind} is not in a checkpoint's metadata")
    raise ValueError("it is not a valid pickle (no end)")
