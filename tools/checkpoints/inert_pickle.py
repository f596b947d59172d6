# SPDX-License-Identifier: Apache-2.0
"""Read a pickle as data: follow its opcodes, import nothing, call nothing.

Where unpickling would look up a class or a function and call it, this makes a Record of its name
and arguments. Names of classes that no checkpoint has, and opcodes that none needs, are refused.

A pickle may refer to a part several times, so that a few hundred bytes describe a tree that exceeds
any memory. The size of the result as a tree is limited, so it is cheap to walk, compare or print.
"""

import io
import pickletools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Names that torch, torch.distributed.checkpoint and megatron-core put into a checkpoint's metadata.
KNOWN = re.compile(
    r"torch\.(\w+Storage|Size|u?int\d+|float\d+(_\w+)?|bfloat16|bool|strided)"
    r"|torch\.storage\.\w+Storage|torch\._utils\._rebuild_tensor_v[23]|torch\.device"
    r"|torch\.serialization\._get_layout"
    r"|torch\.distributed\.checkpoint\.(metadata|planner|filesystem)\.\w+"
    r"|megatron\.core\.dist_checkpointing\.[\w.]+"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?(Pure)?PosixPath"
)
CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ANY = re.compile(r"[\w.<>]+")  # for a pickle of which only some numbers are read
LITERAL = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
LITERAL |= {"SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
PUT, GET = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
OPCODES = {*LITERAL, *CONSTANT, *PUT, *GET, *TUPLES, "TUPLE", "MARK", "MEMOIZE", "GLOBAL"}
OPCODES |= {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"}
OPCODES |= {"STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "BINPERSID", "STOP", "PROTO", "FRAME"}
CODES = {opcode.code: opcode for opcode in pickletools.opcodes}
BITS = 512  # most bits of an integer; the count of a run's floating-point operations has about 90
DEPTH = 64  # most levels of nesting
PER_BYTE = 16  # most parts of the tree per byte of the pickle
_MARK = object()


@dataclass(eq=False)
class Record:
    """Represents an object. name: of its class or function. state: that of BUILD, if any."""

    name: str
    args: Any = None  # None: the class or function itself
    state: Any = None


class Table(list[tuple[Any, Any]]):
    """Represents a dict, as (key, value) pairs. Keys may be Records."""

    def named(self) -> dict[str, Any]:
        """Return the pairs whose keys are strings, as a dict."""
        return {key: value for key, value in self if isinstance(key, str)}


def shown(value: Any) -> str:
    """Return a short description of a value; of most containers, the type and length."""
    if isinstance(value, Record):
        return f"a {value.name[:80]}"
    if isinstance(value, (str, bytes)):
        return repr(value[:80])
    if isinstance(value, (tuple, list)):
        if len(value) <= 8 and all(type(part) is int for part in value):
            return str(list(value))
        return f"a {type(value).__name__.lower()} of {len(value)}"
    return str(value)  # a number, a truth value or None


def read_inert(data: bytes, known: re.Pattern[str] = KNOWN) -> Any:
    """Return the contents of a pickle. Raises ValueError if it is not valid, or is not a
    checkpoint's: it names a class that is not `known`, has an integer of more than BITS, or is
    larger or deeper than PER_BYTE and DEPTH allow."""
    try:
        found = _read(data, known)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"it is not a valid pickle ({error})") from None
    _size(found, 1, PER_BYTE * (len(data) + 64), {})
    return found


def _size(value: Any, level: int, most: int, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the numbers of parts and levels of a value at a level, as a tree.

    sizes: results so far, by the value's id. Raises ValueError for more than `most` parts or DEPTH
    levels, which a value that contains itself exceeds.
    """
    if id(value) not in sizes and level <= DEPTH:
        count = levels = 1
        for part in (value.args, value.state) if isinstance(value, Record) else value:
            more = 1, 0
            if isinstance(part, (Record, tuple, list)):
                more = _size(part, level + 1, most, sizes)
            count, levels = count + more[0], max(levels, 1 + more[1])
        if count > most:
            raise ValueError(f"it expands to more than {most:,} values, as parts occur twice")
        sizes[id(value)] = count, levels
    found = sizes.get(id(value))
    if found is None or level + found[1] - 1 > DEPTH:
        raise ValueError(f"it has more than {DEPTH} levels")
    return found


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the opcodes with their arguments, up to the end. Raises ValueError.

    An unknown opcode is refused before its argument is read.
    """
    stream = io.BytesIO(data)
    while code := stream.read(1):
        opcode = CODES.get(code.decode("latin-1"))
        if opcode is None:
            raise ValueError(f"it is not a valid pickle (no opcode is {code!r})")
        if opcode.name not in OPCODES:
            raise ValueError(f"its opcode {opcode.name} is not in a checkpoint's metadata")
        argument = None if opcode.arg is None else opcode.arg.reader(stream)
        if isinstance(argument, int) and argument.bit_length() > BITS:
            raise ValueError(f"it has an integer of {argument.bit_length():,} bits")
        yield opcode.name, argument
        if opcode.name == "STOP":
            return
    raise ValueError("it is not a valid pickle (no end)")


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
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError(f"it names a class by {shown(module)} and {shown(name)}")
        full_name = f"{module}.{name}"
        if not known.fullmatch(full_name):
            raise ValueError(f"it names {full_name[:80]}, which is not in a checkpoint's metadata")
        return Record(full_name)

    def open_list(kind: type[list[Any]]) -> Any:
        if type(stack[-1]) is not kind:
            raise ValueError(f"it is not a valid pickle ({shown(stack[-1])} gets members)")
        return stack[-1]

    for kind, argument in _opcodes(data):
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
            open_list(list).append(value)
        elif kind == "APPENDS":
            values = since_mark()
            open_list(list).extend(values)
        elif kind == "SETITEM":
            value, key = stack.pop(), stack.pop()
            open_list(Table).append((key, value))
        elif kind == "SETITEMS":
            values = since_mark()
            if len(values) % 2:
                raise ValueError("it is not a valid pickle (a key has no value)")
            open_list(Table).extend(zip(values[::2], values[1::2], strict=True))
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
    if len(stack) != 1 or stack[0] is _MARK:
        raise ValueError(f"it is not a valid pickle ({len(stack)} values at its end)")
    return stack[0]
