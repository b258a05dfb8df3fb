"""Hostile and damaged pickles by name, each with a part of the message that refuses it."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import OrderedDict
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.checkpoints.pickles import ARRAY, AsWrittenByOthers, body, key

START = b"\x80\x05"
DTYPE = body(np.dtype("f4"))
DTYPE_CALL = DTYPE[: DTYPE.index(b"R") + 1]
EMPTY_ARRAY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


def dict_of(value: bytes) -> bytes:
    return START + b"}" + key("a") + value + b"s."


def buffer_array(
    shape: bytes, order: bytes = key("C"), dtype: bytes = DTYPE, data: bytes = b"C\x10" + bytes(16)
) -> bytes:
    return dict_of(b"cnumpy._core.numeric\n_frombuffer\n(" + data + dtype + shape + order + b"tR")


def doubled(levels: int, value: bytes, double: Callable[[bytes, bytes], bytes]) -> bytes:
    """Nested containers that hold the one below twice, through the memo: 2^levels paths in a few bytes."""
    for level in range(levels):
        value = double(value + b"q" + bytes([level]), b"h" + bytes([level]))
    return value


HOSTILE: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps({"a": AsWrittenByOthers(os.system, "touch canary")}, 4), "global posix.system is not"),
    "os.system, text": (dict_of(b"cos\nsystem\n" + key("touch canary") + b"\x85R"), "global os.system is not"),
    "eval": (pickle.dumps(AsWrittenByOthers(eval, "1"), 5), "global builtins.eval is not"),
    "Popen": (pickle.dumps({"a": AsWrittenByOthers(subprocess.Popen, ["true"])}, 3), "subprocess.Popen is not"),
    "getattr": (pickle.dumps({"a": AsWrittenByOthers(getattr, 1, "x")}, 4), "global builtins.getattr is not"),
    "numpy.load": (pickle.dumps({"a": AsWrittenByOthers(np.load, "x", None, True)}, 4), "global numpy.load is not"),
    "escape sequence in a name": (dict_of(b"c\x1b[2J\nx\n"), r"\x1b[2J.x is not"),
    "attribute of an allowed name": (dict_of(key("numpy") + key("ndarray.tofile") + b"\x93"), "numpy.ndarray.tofile"),
    "module with a space": (dict_of(key("numpy dtype") + key("") + b"\x93"), "numpy dtype. is not"),
    "global of numbers": (dict_of(b"K\x01K\x02\x93"), "name is not a string"),
    "call of a string": (dict_of(key("x") + b")R"), "REDUCE of something other than"),
    "call without a tuple": (dict_of(b"cnumpy\ndtype\n" + key("f4") + b"R"), "REDUCE of something other than"),
    "ndarray called": (dict_of(b"cnumpy\nndarray\n)R"), "REDUCE of numpy.ndarray with arguments"),
    "_reconstruct of dtype": (dict_of(EMPTY_ARRAY.replace(b"ndarray", b"dtype")), "_reconstruct with arguments"),
    "global as a weight": (dict_of(b"cnumpy\nndarray\n"), '"a" is neither a dict nor an array'),
    "number as a weight": (pickle.dumps({"a": {"b": 1}}, 4), '"a/b" is neither a dict nor an array'),
    "text as a weight": (pickle.dumps({"a": {"b": "x"}}, 4), '"a/b" is neither'),
    "numpy scalar": (pickle.dumps({"a": np.float32(1)}, 4), "multiarray.scalar is not"),
    "list of arrays": (pickle.dumps({"a": [ARRAY]}, 4), "opcode EMPTY_LIST"),
    "OrderedDict": (pickle.dumps(OrderedDict(a=ARRAY), 4), "collections.OrderedDict is not"),
    "array alone": (pickle.dumps(ARRAY, 4), "not a dict"),
    "no arrays": (pickle.dumps({"a": {}}, 4), "no arrays"),
    "object array": (pickle.dumps({"a": np.array([None, 1])}, 4), "dtype with arguments"),
    "structured array": (pickle.dumps({"a": np.zeros(2, "f4,i4")}, 4), "dtype with arguments"),
    "dates": (pickle.dumps({"a": np.zeros(2, "M8[s]")}, 4), "dtype with arguments"),
    "big-endian": (pickle.dumps({"a": ARRAY.astype(">f4")}, 5), "byte order '>'"),
    "subclass": (dict_of(EMPTY_ARRAY.replace(b"ndarray", b"matrix")), "numpy.matrix is not"),
    "out-of-band buffer": (pickle.dumps({"a": ARRAY}, 5, buffer_callback=[].append), "opcode NEXT_BUFFER"),
    "protocol 0": (pickle.dumps({"a": ARRAY}, 0), "does not begin with a protocol"),
    "protocol 2": (pickle.dumps({"a": ARRAY}, 2), "save it again with pickle.dump(params, file, protocol=4)"),
    "protocol 6": (b"\x80\x06}.", "protocol 6 is not known"),
    "two protocols": (START + START + b"}.", "second protocol"),
    "empty file": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" + bytes(100), "does not begin"),
    "bytes after the end": (pickle.dumps({"a": ARRAY}, 4) + b"\n", "1 bytes follow the end"),
    "two pickles": (pickle.dumps({"a": ARRAY}, 4) * 2, "bytes follow the end"),
    "two values": (START + b"}}.", "ends with 2 values"),
    "no value": (START + b".", "ends with 0 values"),
    "mark left": (START + b"(}.", "ends with 1 values"),
    "underflow": (START + b"s", "value that is not there"),
    "underflow below a mark": (START + b"}(s", "value that is not there"),
    "no mark": (START + b"}u.", "MARK that is not there"),
    "odd items": (START + b"}(" + key("a") + b"u.", "without a value"),
    "memo never written": (START + b"h\x00.", "never written"),
    "memo written twice": (START + b"}q\x00q\x00.", "written twice"),
    "memo number": (START + b"}p-1\n.", "is not a number"),
    "memo far away": (START + b"}r\xff\xff\xff\xff.", "memo entry 4294967295"),
    "frame in a frame": (START + 2 * (b"\x95" + (20).to_bytes(8, "little")) + bytes(40), "frame within a frame"),
    "frame past the end": (START + b"\x95" + (1 << 63).to_bytes(8, "little") + b"}.", "file is cut"),
    "operation across frames": (START + b"\x95" + (3).to_bytes(8, "little") + b"}X\x09" + bytes(20), "frame has"),
    "key is a number": (pickle.dumps({1: ARRAY}, 4), "has the key int"),
    "key is a tuple": (pickle.dumps({(): ARRAY}, 4), "has the key Tuple"),
    "key is empty": (pickle.dumps({"": ARRAY}, 4), "has the key ''"),
    "key with a slash": (pickle.dumps({"a/b": ARRAY}, 4), "without a slash"),
    "key with an escape": (pickle.dumps({"\x1b[2J": ARRAY}, 4), r"'\x1b[2J'"),
    "key is not UTF-8": (START + b"}X\x01\x00\x00\x00\xffNs.", "not UTF-8"),
    "key twice": (START + b"}(" + 2 * (key("a") + b"N") + b"u.", '"a" appears twice'),
    "dict in itself": (START + b"}q\x00" + key("a") + b"h\x00s.", "contains itself"),
    "dict in its tuple": (START + b"}q\x00" + key("a") + b"h\x00\x85s.", "not a new dict"),
    "dict changed later": (START + b"}q\x00\x85h\x00" + key("a") + b"Ns.", "not a new dict"),
    "items on a number": (START + b"K\x01" + key("a") + b"Ns.", "not a new dict"),
    "state on a dict": (START + b"}}\x85b.", "BUILD of something other than"),
    "state on a dtype, twice": (dict_of(DTYPE + DTYPE[len(DTYPE_CALL) :]), "BUILD of something other than"),
    "dtype without state": (buffer_array(b"K\x04\x85", dtype=DTYPE_CALL), "used without its state"),
    "dtype with flags": (
        dict_of(body(np.dtype(ml_dtypes.bfloat16)).replace(b"K\x40t", b"K\x41t")),
        "BUILD of something other than",
    ),
    "array without state": (dict_of(EMPTY_ARRAY), "used without its state"),
    "array with half a state": (
        dict_of(EMPTY_ARRAY + b"(K\x01K\x04\x85tb"),
        "state has a form that numpy does not write",
    ),
    "shape too large": (buffer_array(b"K\x05\x85"), "has 16 bytes where 20 would be right"),
    "shape too small": (buffer_array(b"K\x03\x85"), "has 16 bytes where 12 would be right"),
    "negative sizes": (buffer_array(b"J\xff\xff\xff\xffJ\xfc\xff\xff\xff\x86"), "shape is not"),
    "size is a bool": (buffer_array(b"\x88K\x04\x86"), "shape is not"),
    "too many dimensions": (buffer_array(b"(" + 16 * b"K\x01" + b"K\x04t"), "shape is not"),
    "sizes wrap around": (
        buffer_array(b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"K\x04\x86", data=b"C\x00"),
        "too large",
    ),
    "vast beside zero": (
        buffer_array(b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"K\x00\x86", data=b"C\x00"),
        "too large",
    ),
    "vast integer": (buffer_array(b"\x8a\xff" + bytes(255) + b"\x85"), "integer of 255 bytes"),
    "order unknown": (buffer_array(b"K\x04\x85", order=key("A")), "_frombuffer with arguments"),
    "axes are no permutation": (
        buffer_array(b"K\x02K\x02\x86", order=key("K") + b"K\x00K\x00\x86"),
        "not a permutation",
    ),
    "payload past the end": (START + b"\x8e" + (1 << 62).to_bytes(8, "little") + b"x", "file is cut"),
    "buffer past the end": (START + b"\x96" + ((1 << 64) - 1).to_bytes(8, "little") + b"x", "file is cut"),
    "text past the end": (START + b"\x8d" + (1 << 40).to_bytes(8, "little") + b"x", "longer than the limit of"),
    "long text": (START + b"X\x00\x10\x00\x00" + bytes(4096) + b".", "longer than the limit of"),
    "endless line": (START + b"c" + b"a" * 10_000, "no line of at most"),
    "deep dicts": (START + 100_000 * (b"}" + key("a")), "values on the stack"),
    "deep nesting, complete": (START + 200 * (b"}" + key("a")) + b"}" + 200 * b"s" + b".", "nested deeper"),
    "deep tuples": (START + b")" + 100_000 * b"\x85" + b".", "nested deeper"),
    "deep marks": (START + 100_000 * b"(", "nested deeper"),
    "wide stack": (START + 100_000 * b"N", "values on the stack"),
    "dicts that double": (
        START + doubled(40, b"}", lambda one, two: b"}(" + key("a") + one + key("b") + two + b"u") + b".",
        "more than 50000 names",
    ),
    "tuples that double, as a key": (
        START + b"}" + doubled(50, b")", lambda one, two: one + two + b"\x86") + b"Ns.",
        "has the key Tuple",
    ),
    "tuples that double, as a shape": (
        buffer_array(doubled(50, b")", lambda one, two: one + two + b"\x86")),
        "shape is not",
    ),
    "tuples that double, as arguments": (
        dict_of(b"cnumpy\ndtype\n" + doubled(50, b")", lambda one, two: one + two + b"\x86") + b"R"),
        "dtype with arguments",
    ),
    "a long path": (START + 20 * (b"}" + key("a" * 100)) + b"}" + 20 * b"s" + b".", "longer than 512"),
    "endless work": (START + 112 * (b"(" + 9000 * b"}" + b"t"), "more than 1000000 operations"),
    "endless text": (START + (b"(" + 9000 * (b"X\xff\x01\x00\x00" + 511 * b"a") + b"t"), "bytes of strings"),
}
