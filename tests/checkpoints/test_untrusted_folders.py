"""Code and pickles in a checkpoint's folder are never run, and never downloaded."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime import DiffusionConfig
from tests import golden_cases
from tests.checkpoints.golden_folder import GOLDEN, Bomb, change_config, fails, load, same_weights, split

# ---- nothing in a folder is run ---------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("I was imported")
class EvilModel: pass
class EvilConfig: pass
class EvilTokenizer: pass
"""


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "def": 1, "main": 2, "<|mask|>": 300}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


opened: list[str] = []


def record_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.open") and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


def test_code_and_pickles_in_the_folder_are_never_touched(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = EVIL.format(marker=str(marker))
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "__init__.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(code)
    change_config(
        folder,
        architectures=["DreamModel", "EvilModel"],
        auto_map={"AutoModel": "modeling_evil.EvilModel", "AutoConfig": "configuration_evil.EvilConfig"},
        trust_remote_code=True,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "EvilTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"]},
                "trust_remote_code": True,
                "eos_token": "<|endoftext|>",
            }
        )
    )
    save_tokenizer(folder)
    pickles = ("pytorch_model.bin", "params.pkl", "training_args.bin", "optimizer.pt")
    for name in pickles:
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))

    sys.addaudithook(record_opening)
    opened.clear()
    engine = load(folder)
    assert engine.encode(["def main"])[0].tolist() == [[1, 2]]
    engine.generate(["def main"], DiffusionConfig(max_new_tokens=4, steps=2))
    assert not marker.exists()
    assert any(path.endswith("config.json") for path in opened), "the audit hook sees opened files"
    assert not [path for path in opened if path.endswith((*pickles, "evil.py", "sitecustomize.py"))]
    assert not [name for name in sys.modules if "evil" in name]
    same_weights(engine, golden_cases.engine())


def test_the_bomb_goes_off(tmp_path: Path) -> None:
    """Unpickling this file runs its code, so the other tests would detect unpickling."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_a_pickle_alone_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    fails(folder, "safetensors")
    assert not (tmp_path / "marker").exists()


# ---- URLs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An in-memory file system of fsspec, and a cache folder for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}/model"
    system.makedirs(root)
    yield system, root, f"memory:/{root}"
    system.rm(root, recursive=True)


def upload(system: Any, root: str, folder: Path) -> None:
    for path in folder.iterdir():
        system.pipe_file(f"{root}/{path.name}", path.read_bytes())


def test_a_url_equals_the_folder(remote: Any, folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    system, root, url = remote
    split(folder, tensors)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    upload(system, root, folder)
    same_weights(load(url), golden_cases.engine())
    fetched = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert fetched == {path.name for path in folder.iterdir()} - {"modeling_evil.py", "pytorch_model.bin"}
    assert not (tmp_path / "marker").exists()


def test_urls_without_a_checkpoint(remote: Any) -> None:
    system, root, url = remote
    fails(url + "/deeper", "no such folder")
    fails(url, "config.json")
    system.pipe_file(f"{root}/config.json", (GOLDEN / "config.json").read_bytes())
    fails(url, "weights")


def test_a_url_whose_weights_have_changed(remote: Any, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """A model that is saved again at the same URL with the same size is downloaded again."""
    system, root, url = remote
    save_file(tensors, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    upload(system, root, folder)
    same_weights(load(url), golden_cases.engine())
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size == size
    upload(system, root, folder)
    same_weights(load(url), load(folder))


def test_a_url_whose_files_were_replaced(remote: Any, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Several files with an index are replaced by one file: the old index is not used."""
    system, root, url = remote
    split(folder, tensors)
    upload(system, root, folder)
    load(url)
    for path in folder.glob("model*"):
        path.unlink()
        system.rm(f"{root}/{path.name}")
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    upload(system, root, folder)
    same_weights(load(url), load(folder))
