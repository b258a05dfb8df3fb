"""Walks over a pickle's opcodes and finds the arrays that the file would build, without building anything.

No name is imported or looked up, nothing is called, and the bytes of arrays are skipped. The values on the stack are
symbols (:mod:`checkpoints.legacy.symbols`).

A container has to be complete before another value contains it, as in every file that pickle writes. It is an error to
set items of a dict that is already in another value, or to use a dtype or an array without its state. So there are no
cycles, and a value that is shared through the memo never changes.

Opcodes: ``Lib/pickletools.py`` of CPython.
"""

from __future__ import annotations

import math
import mmap
import pickletools  # only for the names of opcodes in messages
from collections.abc import Callable
from typing import NoReturn

from checkpoints.legacy.symbols import (
    DTYPE_CODES,
    DTYPES,
    EXTENSION_DTYPES,
    GLOBALS,
    REMEDY,
    Array,
    Bytes,
    Dict,
    DType,
    Global,
    LegacyPickleError,
    LegacyTensor,
    Tuple,
    is_dtype_layout,
)

# The largest models in this format have a few thousand tensors, with some 50 operations each. The bounds limit the cost
# of a hostile file to some hundred MiB and a few seconds.
MAX_OPERATIONS = 1_000_000
MAX_STACK = 10_000  # pickle sets the items of a dict in batches of 1000
MAX_DEPTH = 64
MAX_MEMO = 300_000
MAX_TEXT_BYTES = 512
MAX_ALL_TEXT_BYTES = 4 << 20
MAX_PATH_LENGTH = 512
MAX_NODES = 50_000
MAX_DIMENSIONS = 16
MAX_TENSOR_BYTES = 1 << 48


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Walker:
    """Walks over the opcodes of one pickle. ``place`` is the offset of the current one."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.place = 0
        self.cursor = 0
        self.frame_end: int | None = None
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.text_bytes = 0
        self.is_done = False

    def fail(self, problem: str, remedy: str = REMEDY, place: int | None = None) -> NoReturn:
        raise LegacyPickleError(f"{self.name}, byte {self.place if place is None else place}: {problem}; {remedy}")

    def take(self, count: int) -> int:
        """Skip ``count`` bytes and return their offset. No opcode may reach past its frame or the file."""
        start, end = self.cursor, self.size if self.frame_end is None else self.frame_end
        if count > end - start:
            what = "file" if self.frame_end is None else "frame"
            self.fail(
                f"expected {count} more bytes, but the {what} has only {end - start}", "the file is cut or damaged"
            )
        self.cursor = start + count
        return start

    def take_line(self) -> str:
        end = self.data.find(b"\n", self.cursor, self.cursor + MAX_TEXT_BYTES + 1)
        if end < 0:
            self.fail(f"no line of at most {MAX_TEXT_BYTES} bytes")
        return self.decode(end - self.cursor, 1)

    def take_number(self) -> int:
        line = self.take_line()
        if not (line.isascii() and line.isdigit() and len(line) < 10):
            self.fail(f"memo entry {ascii(line)[:80]} is not a number", "the file is damaged")
        return int(line)

    def decode(self, length: int, skip: int = 0) -> str:
        if length > MAX_TEXT_BYTES:
            self.fail(f"a string of {length} bytes is longer than the limit of {MAX_TEXT_BYTES}")
        self.text_bytes += length
        if self.text_bytes > MAX_ALL_TEXT_BYTES:
            self.fail(f"more than {MAX_ALL_TEXT_BYTES} bytes of strings")
        start = self.take(length + skip)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8", "the file is damaged")

    def run(self) -> dict[str, LegacyTensor]:
        if self.size < 2 or self.data[0] != 0x80:
            self.fail("the file does not begin with a protocol number")
        for _ in range(MAX_OPERATIONS):
            if self.cursor == self.frame_end:
                self.frame_end = None
            self.place = self.cursor
            code = self.data[self.take(1)]
            if code not in OPCODES:
                self.fail(f"opcode {_OPCODE_NAMES.get(code, 'unknown')} (0x{code:02x}) is not read")
            width, operation = OPCODES[code]
            start = self.take(width)
            operation(self, int.from_bytes(self.data[start : self.cursor], "little"))
            if self.is_done:
                return self.collect()
        self.fail(f"more than {MAX_OPERATIONS} operations")

    # The stack

    def push(self, value: object) -> None:
        if len(self.stack) >= MAX_STACK:
            self.fail(f"more than {MAX_STACK} values on the stack")
        self.stack.append(value)

    def top(self) -> object:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            self.fail("an operation needs a value that is not there", "the file is damaged")
        return self.stack[-1]

    def pop(self) -> object:
        self.top()
        return self.stack.pop()

    def pop_some(self, count: int) -> list[object]:
        return [self.pop() for _ in range(count)][::-1]

    def pop_marked(self) -> list[object]:
        if not self.marks:
            self.fail("an operation needs a MARK that is not there", "the file is damaged")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def use(self, value: object) -> int:
        """Put ``value`` into another value, after which it may not change; return its depth."""
        if isinstance(value, Dict):
            value.is_used = True
        elif isinstance(value, DType) and not value.has_state:
            self.fail(f"dtype {value.name} is used without its state")
        elif isinstance(value, Array) and value.tensor is None:
            self.fail("an array is used without its state")
        depth = value.depth if isinstance(value, Dict | Tuple) else 0
        if depth >= MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")
        return depth

    # Operations. ``number`` is the opcode's fixed-width argument, 0 if it has none.

    def protocol(self, number: int) -> None:
        if self.place:
            self.fail("a second protocol number")
        if number < 3:
            self.fail(
                f"pickle protocol {number} holds arrays as text",
                "load it where you trust it and save it again with pickle.dump(params, file, protocol=4)",
            )
        if number > 5:
            self.fail(f"pickle protocol {number} is not known", "protocols 3, 4 and 5 are read")

    def frame(self, number: int) -> None:
        if self.frame_end is not None:
            self.fail("a frame within a frame", "the file is damaged")
        start = self.cursor
        self.take(number)
        self.cursor, self.frame_end = start, start + number

    def stop(self, number: int) -> None:
        if self.cursor != self.size:
            self.fail(f"{self.size - self.cursor} bytes follow the end of the pickle")
        if self.marks or len(self.stack) != 1:
            self.fail(f"the pickle ends with {len(self.stack)} values and {len(self.marks)} marks")
        self.is_done = True

    def mark(self, number: int) -> None:
        if len(self.marks) >= MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")
        self.marks.append(len(self.stack))

    def long_int(self, number: int) -> None:
        if number > 8:
            self.fail(f"an integer of {number} bytes, and sizes have at most 8")
        start = self.take(number)
        self.push(int.from_bytes(self.data[start : self.cursor], "little", signed=True))

    def make_tuple(self, values: list[object]) -> None:
        self.push(Tuple(tuple(values), 1 + max(map(self.use, values), default=0)))

    def set_items(self, values: list[object]) -> None:
        target = self.top()
        if not isinstance(target, Dict) or target.is_used:
            self.fail("SETITEMS on a value that is not a new dict")
        if len(values) % 2:
            self.fail("a key without a value", "the file is damaged")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str) or not key or "/" in key or not key.isprintable():
                shown = ascii(key)[:80] if isinstance(key, str) else type(key).__name__.strip("_")
                self.fail(f"a dict has the key {shown}, and keys are printable names without a slash")
            if key in target.items:
                self.fail(f'the key "{key}" appears twice in a dict')
            if value is target:
                self.fail("a dict contains itself")
            target.depth = max(target.depth, 1 + self.use(value))
            target.items[key] = value, self.place

    def memoize(self, number: int) -> None:
        if number in self.memo:
            self.fail(f"memo entry {number} is written twice", "the file is damaged")
        if number >= MAX_MEMO:
            self.fail(f"memo entry {number}, and at most {MAX_MEMO} are kept")
        self.memo[number] = self.top()

    def recall(self, number: int) -> None:
        if number not in self.memo:
            self.fail(f"memo entry {number} is read and was never written", "the file is damaged")
        self.push(self.memo[number])

    def find_global(self, names: list[object]) -> None:
        module, name = names
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail("a global's name is not a string", "the file is damaged")
        if (module, name) not in GLOBALS:
            shown = ascii(f"{module}.{name}")[1:-1][:200]
            self.fail(f"the global {shown} is not read, and nothing is ever imported or called")
        self.push(Global(f"{module}.{name}", GLOBALS[module, name]))

    def reduce(self, function: object, arguments: object) -> None:
        if not isinstance(function, Global) or not isinstance(arguments, Tuple):
            self.fail("REDUCE of something other than a known function with a tuple of arguments")
        values = arguments.values
        match function.meaning, *values:
            # (align, copy) is (False, True); older numpy writes (0, 1).
            case "dtype", str() as code, 0, 1 if code in DTYPE_CODES:
                self.push(DType(DTYPE_CODES[code]))
            case "dtype", Global(meaning=name), 0, 1 if name in EXTENSION_DTYPES:
                self.push(DType(name))
            case "FrozenDict", Dict() as content:
                self.push(content)
            case "empty array", *_ if self.is_empty_array(values):
                self.push(Array())
            case "array of buffer", Bytes() as data, DType() as dtype, Tuple() as shape, "C" | "F" as order:
                self.push(Array(self.tensor(data, dtype, shape, str(order))))
            case "array of buffer", Bytes() as data, DType() as dtype, Tuple() as shape, "K", Tuple() as axes:
                self.push(Array(self.tensor(data, dtype, shape, "K", axes)))
            case "JAX array", Global(meaning="empty array"), Tuple() as empty, Tuple() as state, Dict() as aval if (
                self.is_empty_array(empty.values) and self.is_aval(aval)
            ):
                self.push(Array(self.tensor_of_state(state)))
            case _:
                self.fail(f"REDUCE of {function.name} with arguments that numpy, JAX and Flax do not write")

    def build(self, state: object) -> None:
        target = self.top()
        match target, state:
            case DType(has_state=False, name=name), Tuple(
                values=(3, str() as byte_order, None, None, None, int() as size, int() as alignment, int() as flags)
            ) if is_dtype_layout(name, size, alignment, flags):
                if byte_order != "<" and (byte_order != "|" or DTYPES[name].itemsize > 1):
                    self.fail(f"an array has byte order {ascii(byte_order)[:20]}", "save it little-endian")
                target.has_state = True
            case Array(tensor=None), Tuple():
                target.tensor = self.tensor_of_state(state)
            case _:
                self.fail("BUILD of something other than a new dtype or array with the state that numpy writes")

    # Arrays

    def is_empty_array(self, values: tuple[object, ...]) -> bool:
        """Whether these are the arguments with which NumPy makes an empty array: (ndarray, (0,), b"b")."""
        match values:
            case (Global(meaning="ndarray"), Tuple(values=(0,)), Bytes(length=1) as code):
                return self.data[code.offset] == ord("b")
        return False

    def is_aval(self, aval: Dict) -> bool:
        """Whether a dict is one that JAX pickles with an array's values. Older versions write ``named_shape``."""
        return all(
            (key == "weak_type" and isinstance(value, bool))
            or (key == "named_shape" and isinstance(value, Dict) and not value.items)
            for key, (value, _) in aval.items.items()
        )

    def tensor_of_state(self, state: Tuple) -> LegacyTensor:
        match state.values:
            case (1, Tuple() as shape, DType() as dtype, bool() as is_fortran, Bytes() as data):
                return self.tensor(data, dtype, shape, "F" if is_fortran else "C")
        self.fail("an array's state has a form that numpy does not write")

    def tensor(self, data: Bytes, dtype: DType, shape: Tuple, order: str, axes: Tuple | None = None) -> LegacyTensor:
        sizes = [size for size in shape.values if isinstance(size, int) and _is_int(size) and size >= 0]
        if len(sizes) != len(shape.values) or len(sizes) > MAX_DIMENSIONS:
            self.fail(f"an array's shape is not up to {MAX_DIMENSIONS} sizes", "the file is damaged")
        itemsize = DTYPES[dtype.name].itemsize
        # Zeros are left out of the product, because NumPy limits the other sizes of an empty array too.
        if math.prod(size for size in sizes if size) * itemsize > MAX_TENSOR_BYTES:
            self.fail(f"an array of shape {sizes} is too large", "the file is damaged")
        if math.prod(sizes) * itemsize != data.length:
            self.fail(
                f"an array of shape {sizes} and dtype {dtype.name} has {data.length} bytes where "
                f"{math.prod(sizes) * itemsize} would be right",
                "the file is damaged",
            )
        permutation = None
        if axes is not None:
            permutation = tuple(axis for axis in axes.values if isinstance(axis, int) and _is_int(axis))
            if len(permutation) != len(axes.values) or sorted(permutation) != list(range(len(sizes))):
                self.fail("an array's axes are not a permutation", "the file is damaged")
            sizes = [sizes[axis] for axis in permutation]
        return LegacyTensor("", tuple(sizes), dtype.name, data.offset, data.length, order, permutation)

    def collect(self) -> dict[str, LegacyTensor]:
        root = self.stack[0]
        if not isinstance(root, Dict):
            self.fail("the pickle is not a dict")
        found: dict[str, LegacyTensor] = {}
        nodes = 0

        def visit(content: Dict, prefix: str) -> None:
            nonlocal nodes
            for key, (value, place) in content.items.items():
                nodes += 1
                path = prefix + key
                # Shared dicts multiply: a few bytes can encode 2^64 paths.
                if nodes > MAX_NODES or len(path) > MAX_PATH_LENGTH:
                    self.fail(f"more than {MAX_NODES} names, or one longer than {MAX_PATH_LENGTH}", place=place)
                if isinstance(value, Dict):
                    visit(value, path + "/")
                elif isinstance(value, Array) and value.tensor is not None:
                    tensor = value.tensor
                    found[path] = LegacyTensor(
                        path, tensor.shape, tensor.dtype, tensor.offset, tensor.nbytes, tensor.order, tensor.axes
                    )
                else:
                    self.fail(f'"{path}" is neither a dict nor an array', place=place)

        visit(root, "")
        if not found:
            self.fail("the pickle holds no arrays")
        return found


_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

# From opcode to the width of its argument in bytes, and its operation.
OPCODES: dict[int, tuple[int, Callable[[_Walker, int], None]]] = {
    0x80: (1, _Walker.protocol),
    0x95: (8, _Walker.frame),
    ord("."): (0, _Walker.stop),
    ord("("): (0, _Walker.mark),
    ord("N"): (0, lambda walker, _: walker.push(None)),
    0x88: (0, lambda walker, _: walker.push(True)),
    0x89: (0, lambda walker, _: walker.push(False)),
    ord("K"): (1, _Walker.push),
    ord("M"): (2, _Walker.push),
    ord("J"): (4, lambda walker, number: walker.push(number - (number >> 31 << 32))),
    0x8A: (1, _Walker.long_int),
    0x8C: (1, lambda walker, number: walker.push(walker.decode(number))),
    ord("X"): (4, lambda walker, number: walker.push(walker.decode(number))),
    0x8D: (8, lambda walker, number: walker.push(walker.decode(number))),
    ord("C"): (1, lambda walker, number: walker.push(Bytes(walker.take(number), number))),
    ord("B"): (4, lambda walker, number: walker.push(Bytes(walker.take(number), number))),
    0x8E: (8, lambda walker, number: walker.push(Bytes(walker.take(number), number))),
    0x96: (8, lambda walker, number: walker.push(Bytes(walker.take(number), number))),
    ord(")"): (0, lambda walker, _: walker.make_tuple([])),
    0x85: (0, lambda walker, _: walker.make_tuple(walker.pop_some(1))),
    0x86: (0, lambda walker, _: walker.make_tuple(walker.pop_some(2))),
    0x87: (0, lambda walker, _: walker.make_tuple(walker.pop_some(3))),
    ord("t"): (0, lambda walker, _: walker.make_tuple(walker.pop_marked())),
    ord("}"): (0, lambda walker, _: walker.push(Dict())),
    ord("s"): (0, lambda walker, _: walker.set_items(walker.pop_some(2))),
    ord("u"): (0, lambda walker, _: walker.set_items(walker.pop_marked())),
    ord("q"): (1, _Walker.memoize),
    ord("r"): (4, _Walker.memoize),
    ord("p"): (0, lambda walker, _: walker.memoize(walker.take_number())),
    0x94: (0, lambda walker, _: walker.memoize(len(walker.memo))),
    ord("h"): (1, _Walker.recall),
    ord("j"): (4, _Walker.recall),
    ord("g"): (0, lambda walker, _: walker.recall(walker.take_number())),
    ord("c"): (0, lambda walker, _: walker.find_global([walker.take_line(), walker.take_line()])),
    0x93: (0, lambda walker, _: walker.find_global(walker.pop_some(2))),
    ord("R"): (0, lambda walker, _: walker.reduce(*walker.pop_some(2))),
    ord("b"): (0, lambda walker, _: walker.build(*walker.pop_some(1))),
}


def walk(data: mmap.mmap, name: str) -> dict[str, LegacyTensor]:
    """Find all arrays of a memory-mapped pickle, by path, in file order. ``name`` is the file's name, for messages.

    Raises:
      LegacyPickleError: the pickle is damaged, or contains something other than nested dicts of arrays.
    """
    return _Walker(data, name).run()
