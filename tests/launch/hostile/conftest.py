"""A server whose checkpoint contains code that must not run. After every test it must still answer correctly."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from launch.serving.limits import Limits
from runtime import Engine
from tests.launch.hostile.sending import CONFIG, GOOD, Bomb
from tests.launch.served import PATIENCE, Served, served
from tests.launch.tiny import write_tiny_checkpoint


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that contains code that must not run."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    code = f"open({str(folder / 'it_ran')!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    for name, more in (
        ("config.json", {"AutoModel": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}),
    ):
        old = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(old | {"auto_map": more, "trust_remote_code": True}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "it_ran")))
    return folder


@pytest.fixture(scope="package")
def there(folder: Path) -> Iterator[Served]:
    limits = Limits(body=1 << 18, read_seconds=1.0, request_seconds=PATIENCE)
    engine = Engine.load(folder, "tensor=1", devices=jax.devices()[:1])
    with served(engine, CONFIG, canvas=(128,), limits=limits, names=("127.0.0.1", "localhost")) as one:
        yield one


@pytest.fixture(scope="package")
def right(there: Served) -> str:
    return there.engine.generate([GOOD["prompt"]], CONFIG.replace(seed=7))[0].text


@pytest.fixture(autouse=True)
def _still_right(there: Served, right: str, folder: Path) -> Iterator[None]:
    yield
    assert not (folder / "it_ran").exists()
    answer = there.post("/v1/completions", GOOD)
    assert answer.json()["choices"][0]["text"] == right
    assert there.get("/health").json()["status"] == "ready"
