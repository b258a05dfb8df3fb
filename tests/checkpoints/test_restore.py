"""Loading in several processes: each reads what its devices hold, and shards equal those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints import load_weights, open_folder
from checkpoints.opening import open_tensors
from runtime import Engine
from runtime.models.families import model_layout, parse_config
from sharding.mesh import MeshSpec
from tests.checkpoints.restore_worker import shard_digests
from tests.checkpoints.small import to_canonical, write_source
from tests.checkpoints.test_processes import run_processes

# Large enough that every head is a chunk of its own: 28 heads like the 7B models, 88 MB.
MODEL = {
    "model_type": "Dream",
    "vocab_size": 2048,
    "hidden_size": 1792,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "mask_token_id": 2047,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 5003,  # prime: no axis divides it
    "n_embd": 768,
    "n_layer": 1,
    "n_head": 12,
    "n_positions": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"), MODEL)


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_canonical(source, tmp_path_factory.mktemp("canonical") / "checkpoint")


def restore_together(checkpoint: Path, mesh: str, count: int) -> list[dict[str, Any]]:
    found = []
    arguments = (f"--checkpoint={checkpoint}", f"--mesh={mesh}", "--dtype=bfloat16")
    for code, output in run_processes("tests.checkpoints.restore_worker", count, 2, *arguments):
        assert code == 0, output
        found.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
    return found


@pytest.mark.parametrize("kind", ["canonical", "huggingface"])
def test_each_of_two_processes_reads_its_half(kind: str, source: Path, checkpoint: Path) -> None:
    folder = checkpoint if kind == "canonical" else source
    hosts = restore_together(folder, "tensor=4", 2)
    stored = hosts[0]["stored"]
    for host in hosts:
        # Both hosts have norms and other small tensors, but no large ones.
        assert 0.5 * stored <= host["read"] < 0.53 * stored
        assert host["read"] <= 1.01 * host["held"]
        assert all(f"host {number} read {one['read'] / 1e9:.3f}" in host["said"] for number, one in enumerate(hosts))


@pytest.mark.parametrize(
    ("mesh", "count"), [("tensor=4", 2), pytest.param("data=2,tensor=4", 4, marks=pytest.mark.slow)]
)
def test_shards_are_those_of_one_process(mesh: str, count: int, source: Path, checkpoint: Path) -> None:
    expected = shard_digests(
        Engine.load(source, mesh=mesh, dtype="bfloat16", devices=jax.devices()[:8][: 2 * count]).weights
    )
    found: dict[str, str] = {}
    for host in restore_together(checkpoint, mesh, count):
        for place, digest in host["shards"].items():
            assert found.setdefault(place, digest) == digest
    assert found == expected


@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4", "tensor=8", "tensor=16", "data=2,tensor=4"])
def test_heads_that_share_a_kv_group_are_read_by_themselves(mesh: str, checkpoint: Path) -> None:
    """With 28 heads on 8 or 16 devices, a device reads 4 of the 7 heads of a group, and no head is read twice."""
    folder, spec = open_folder(checkpoint), MeshSpec.parse(mesh)
    layout = model_layout(parse_config(folder.config), spec, jax.devices()[: spec.size])
    _, loaded = load_weights(folder, layout, "bfloat16")
    assert loaded.bytes_read <= 1.01 * loaded.bytes_stored


@pytest.mark.parametrize("tensor", [2, 4])
def test_fused_projections_and_uneven_vocabularies(tensor: int, tmp_path: Path) -> None:
    """Devices read only their heads of GPT-2's fused q, k and v, and a prime vocabulary about once in total."""
    source = write_source(tmp_path / "source", GPT2)
    folder = open_folder(to_canonical(source, tmp_path / "checkpoint"))
    found = open_tensors(folder)
    heads = found["transformer.h.0.attn.c_attn.weight"]
    heads.read((slice(0, 768), slice(0, 192)))
    assert found.bytes_read.total == heads.bytes / 12
    layout = model_layout(parse_config(folder.config), MeshSpec(tensor=tensor), jax.devices()[:tensor])
    weights, loaded = load_weights(folder, layout, "bfloat16")
    expected, direct = load_weights(open_folder(source), layout, "bfloat16")
    assert loaded.bytes_read < 1.06 * loaded.bytes_stored
    assert direct.bytes_read <= 1.01 * direct.bytes_stored
    for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


def test_bytes_read_are_those_of_the_disk(checkpoint: Path) -> None:
    """The counted bytes equal those that TensorStore reads from the file system, except for a few of metadata."""
    import tensorstore

    def read_so_far() -> int:
        metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    found = open_tensors(open_folder(checkpoint))
    found["model.norm.weight"].whole()  # metadata is read with the first
    counted, asked = found.bytes_read.total, read_so_far()
    for name in ("model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        found[name].read((slice(0, 1792), slice(0, 224)))
    counted, asked = found.bytes_read.total - counted, read_so_far() - asked
    assert counted > 0
    assert counted <= asked <= counted + (256 << 10)
