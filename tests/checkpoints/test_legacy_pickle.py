"""Legacy pickles: real files are read bit for bit; hostile and damaged ones are refused, and no code in them runs."""

from __future__ import annotations

import os
import pickle
import pickletools
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from checkpoints.legacy import LegacyPickle, LegacyPickleError, index_pickle
from checkpoints.legacy.walker import OPCODES
from tests.checkpoints.hostile_pickles import HOSTILE, START, dict_of
from tests.checkpoints.pickles import (
    ARRAY,
    PROTOCOLS,
    AsWrittenByOthers,
    assert_reads,
    jax_arrays,
    numpy_arrays,
    operations,
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["jax", "numpy", "frozen", "plain python"])
def test_what_pickle_writes_comes_back_bit_for_bit(tmp_path: Path, protocol: int, kind: str) -> None:
    tree: Any = {"params": {"layer_0": jax_arrays() if kind == "jax" else numpy_arrays(), "none": {}}}
    if kind == "frozen":
        tree = FrozenDict({"params": {"jax": jax_arrays(), "numpy": numpy_arrays()}})
    path = tmp_path / "params.pkl"
    with path.open("wb") as file:
        if kind == "plain python":  # other frames than the C implementation's
            pickle._Pickler(file, protocol).dump(tree)
        else:
            pickle.dump(tree, file, protocol)
    assert_reads(path, tree)


def test_many_tensors_share_dtypes_through_the_memo(tmp_path: Path) -> None:
    """More than a batch of 1000 items a dict and more than 256 memo entries: the wide forms of every opcode."""
    tree = FrozenDict({f"name_{number}": jnp.full((2,), number, jnp.bfloat16) for number in range(1500)})
    for protocol in PROTOCOLS:
        (tmp_path / "p").write_bytes(pickle.dumps(tree, protocol))
        assert_reads(tmp_path / "p", tree)


def test_tied_arrays_and_dicts_stand_once_in_the_file(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float32)
    layer = {"kernel": array}
    tree = {"embedding": array, "head": array, "first": layer, "second": layer}
    (tmp_path / "p").write_bytes(pickle.dumps(tree, 4))
    tensors = assert_reads(tmp_path / "p", tree)
    assert len({tensor.offset for tensor in tensors.values()}) == 1
    assert (tmp_path / "p").stat().st_size < 2 * array.nbytes


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_slice_is_read_alone(tmp_path: Path, protocol: int) -> None:
    tree = numpy_arrays()
    (tmp_path / "p").write_bytes(pickle.dumps(tree, protocol))
    with LegacyPickle(tmp_path / "p") as weights:
        for name in ("fortran", "transposed", "strided", "large"):
            for index in ((slice(1, 2),), (slice(0, 0), slice(1, 3)), (slice(None), slice(1, None, 2)), ()):
                read = weights.read(name, index)
                np.testing.assert_array_equal(read, tree[name][index])
                assert read.flags.c_contiguous
                assert read.base is None
        with pytest.raises(LegacyPickleError, match="no array"):
            weights.read("absent")


def test_older_versions_of_numpy_and_jax(tmp_path: Path) -> None:
    from jax._src.array import _reconstruct_array

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    older = AsWrittenByOthers(_reconstruct_array, *array.__reduce__(), {"weak_type": False, "named_shape": {}})
    data = pickle.dumps({"a": older, "b": array}, 3)
    for name in (b"numpy._core.multiarray\n", b"numpy._core.numeric\n"):
        data = data.replace(name, name.replace(b"_core", b"core"))
    data = data.replace(b"\x89\x88\x87", b"K\x00K\x01\x87")  # older numpy: dtype("f4", 0, 1)
    assert b"numpy.core." in data
    assert b"_core" not in data
    assert b"K\x00K\x01\x87" in data
    (tmp_path / "p").write_bytes(data)
    assert_reads(tmp_path / "p", {"a": array, "b": array})


def test_text_forms_of_the_memo_opcodes(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.float32)
    data = b"".join(
        {"BINPUT": b"p%d\n", "BINGET": b"g%d\n"}[opcode.name] % argument if opcode.name in ("BINPUT", "BINGET") else raw
        for opcode, argument, raw in operations(pickle.dumps({"a": array, "b": array}, 3))
    )
    assert b"p0\n" in data
    assert b"g" in [raw[:1] for _, _, raw in operations(data)]
    (tmp_path / "p").write_bytes(data)
    assert_reads(tmp_path / "p", {"a": array, "b": array})


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "hostile.pkl"
    path.write_bytes(data)
    with pytest.raises(LegacyPickleError) as caught:
        index_pickle(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    data, message = HOSTILE[name]
    started = time.process_time()  # whatever else this machine does
    assert message in refused(tmp_path, data)
    assert time.process_time() - started < 20  # the costliest walks a million operations
    assert os.listdir(tmp_path) == ["hostile.pkl"]


def test_a_message_says_where(tmp_path: Path) -> None:
    data = dict_of(b"cos\nsystem\n)R")
    assert f"byte {data.index(b'cos')}: the global os.system" in refused(tmp_path, data)


def test_only_the_known_opcodes_are_read(tmp_path: Path) -> None:
    read = set(OPCODES)
    names = {opcode.name for opcode in pickletools.opcodes if ord(opcode.code) in read}
    calling = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}
    plain = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
        BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT
        SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"""
    assert names == calling | set(plain.split())
    for code in set(range(256)) - read:
        message = refused(tmp_path, START + b"}" + bytes([code]) + bytes(20))
        assert f"(0x{code:02x}) is not read" in message


def test_the_table_of_opcodes_agrees_with_the_standard_library() -> None:
    for opcode in pickletools.opcodes:
        if ord(opcode.code) in OPCODES:
            width = OPCODES[ord(opcode.code)][0]
            size = opcode.arg.n if opcode.arg else 0
            # Negative: a length of so many bytes and what it counts, or a line.
            assert width == {-1: 0, -2: 1, -3: 4, -4: 4, -5: 8}.get(size, size), opcode.name


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps({"a": ARRAY, "b": {"c": jnp.ones(2, jnp.bfloat16)}}, protocol)
        for end in range(len(data)):
            refused(tmp_path, data[:end])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(LegacyPickleError, match="no such file"):
            index_pickle(path)
