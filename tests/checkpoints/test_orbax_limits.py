"""Abilities and limits of Orbax's public interface on which :mod:`checkpoints.arrays` relies.

If one of these tests fails with a new version of Orbax, that part of :mod:`checkpoints.arrays` may no longer be needed.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from checkpoints import CheckpointError, orbax
from checkpoints.conversion import convert
from checkpoints.downloads import open_folder
from checkpoints.manifest import TensorEntry
from checkpoints.output import ObjectOutput
from checkpoints.storage import Storage
from checkpoints.writing import Cut, orbax_cuts
from tests.checkpoints.small import MICRO, contents, layout_of, to_canonical, write_source

# A prime vocabulary, which no number of equal chunks divides.
UNEVEN = MICRO | {"vocab_size": 2053, "hidden_size": 112, "mask_token_id": 2052}


def sharded(shape: tuple[int, int], shards: int) -> tuple[np.ndarray, jax.Array]:
    """Make a float32 array whose rows are sharded; return it on the host and on the devices."""
    mesh = Mesh(np.array(jax.devices()[:shards]), ("shard",))
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return data, jax.device_put(data, NamedSharding(mesh, PartitionSpec("shard")))


def stored_chunk(folder: Path, shape: tuple[int, int], shards: int, chunk_bytes: int) -> tuple[int, ...]:
    """Save an array with this package, and return the shape of its stored chunks."""
    data, array = sharded(shape, shards)
    orbax.save_group(folder / "checkpoint", {"x": array}, {"x": chunk_bytes})
    orbax.finalize(folder / "checkpoint")
    return read_chunk(folder, data)


def read_chunk(folder: Path, data: np.ndarray) -> tuple[int, ...]:
    """Compare the stored array with ``data``, and return the shape of its chunks."""
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/checkpoint/state/"}, "path": "x/"}
    opened = tensorstore.open({"driver": "auto", "kvstore": store}, open=True).result()
    np.testing.assert_array_equal(opened.read().result(), data)
    return tuple(opened.chunk_layout.read_chunk.shape)


def test_a_sharded_array_is_stored_in_the_chunks_that_are_asked_for(tmp_path: Path) -> None:
    assert stored_chunk(tmp_path, (64, 96), 2, 8 * 96 * 4) == (8, 96)


def test_an_array_on_one_device_is_cut_along_its_largest_dimension(tmp_path: Path) -> None:
    assert stored_chunk(tmp_path, (64, 96), 1, 8 * 96 * 4) != (8, 96)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_option_for_axes_cuts_an_array_into_single_rows(shards: int, tmp_path: Path) -> None:
    """``shard_axes`` ignores the size of a chunk along the axis, so it does not give the chunks of the digests."""
    from orbax.checkpoint import v1

    options = v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=8 * 96 * 4, shard_axes=(0,))
    data, array = sharded((64, 96), shards)
    context = v1.Context()
    context.array.saving.scoped_storage_options_creator = lambda path, value: options
    with context:
        v1.save(tmp_path / "checkpoint", {"x": array})
    assert read_chunk(tmp_path, data) == (1, 96)


def test_a_dimension_that_does_not_divide_is_not_cut_into_rows(tmp_path: Path) -> None:
    rows, _ = stored_chunk(tmp_path, (61, 96), 1, 8 * 96 * 4)
    assert rows in (1, 61)
    with pytest.raises(ValueError, match="evenly divide"):
        stored_chunk(tmp_path, (61, 96), 2, 8 * 96 * 4)


def test_finishing_renames(tmp_path: Path) -> None:
    """Finalizing renames, which an object store cannot do."""
    renamed: list[Any] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "os.rename":
            renamed.append(arguments)

    orbax.save_group(tmp_path / "checkpoint", {"x": jax.numpy.ones(3)}, {})
    sys.addaudithook(watch)
    orbax.finalize(tmp_path / "checkpoint")
    watching = False
    assert any(str(arguments[1]) == str(tmp_path / "checkpoint") for arguments in renamed)


def test_an_error_of_writing_is_raised_and_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Orbax also logs it, with a traceback of many lines."""
    _, array = sharded((64, 96), 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (array.nbytes // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint: cannot be written .*File too large"):
            orbax.save_group(tmp_path / "checkpoint", {"x": array}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    logging.getLogger("absl").error("after it")
    assert caplog.messages[-1] == "after it"


@pytest.mark.parametrize("step", ["save", "finalize"])
def test_an_error_that_is_not_raised_is_logged(
    step: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orbax.checkpoint import v1

    def failing(*_: object) -> None:
        try:
            raise OSError("the lamp went out")
        except OSError:
            logging.getLogger("absl").exception("in a thread")
        assert "in a thread" not in caplog.messages

    monkeypatch.setattr(v1.partial, step, failing)
    if step == "save":
        orbax.save_group(tmp_path / "checkpoint", {}, {})
    else:
        orbax.finalize(tmp_path / "checkpoint")
    assert caplog.messages.count("in a thread") == 1
    assert "the lamp went out" in caplog.text


def test_how_tensors_are_sharded() -> None:
    def entry(shape: tuple[int, ...], grid: tuple[int, ...]) -> TensorEntry:
        return TensorEntry(shape, "bfloat16", grid, ())

    small, rows, columns = entry((56,), (1,)), entry((3584, 3584), (28, 1)), entry((3584, 18944), (1, 64))
    assert orbax_cuts({"a": small, "b": rows, "c": columns}, 2) == {
        "a": Cut(),
        "b": Cut(0, 2, 128 * 3584 * 2),
        "c": Cut(1, 2, 3584 * 296 * 2),
    }
    # Chunks of at most 8 MB, which divide a chunk of digests.
    assert orbax_cuts({"a": entry((152064, 3584), (64, 1))}, 6) == {"a": Cut(0, 2, 792 * 3584 * 2)}
    assert orbax_cuts({"a": small, "b": rows}, 1) is None
    assert orbax_cuts({"a": rows}, 3) is None
    assert orbax_cuts({"a": entry((5003, 768), (64, 1))}, 2) is None
    assert orbax_cuts({"a": small}, 1) == {"a": Cut()}


@pytest.mark.parametrize("kind", ["uneven", "object store"])
def test_orbax_reads_what_it_did_not_write(kind: str, tmp_path: Path) -> None:
    """Orbax describes the arrays that TensorStore wrote, and restores them with both of its interfaces."""
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    source = write_source(tmp_path / "source", UNEVEN if kind == "uneven" else MICRO)
    if kind == "uneven":
        to_canonical(source, tmp_path / "checkpoint")
    else:
        convert(open_folder(source), layout_of(source), ObjectOutput(Storage.at(tmp_path / "checkpoint")))
    expected = load_file(source / "model.safetensors")
    weights = tmp_path / "checkpoint" / "weights"
    assert (weights / "state" / "ocdbt.process_0" / "d").is_dir()
    new, old = v1.load(weights), v0.PyTreeCheckpointer().restore(weights / "state")
    for found in (new, old):
        assert {name: np.asarray(value).tobytes() for name, value in found.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }
    assert contents(tmp_path / "checkpoint") == {name: value.tobytes() for name, value in expected.items()}
