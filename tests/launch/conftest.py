"""Fixtures for tests of commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoints import DEMO


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for JAX's persistent compilation cache."""
    folder = tmp_path_factory.mktemp("compiled")
    folder.chmod(0o700)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with random weights and the demo's tokenizer."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    config = transformers.GPT2Config(
        vocab_size=vocab, n_embd=64, n_layer=2, n_head=4, n_positions=128, eos_token_id=0, initializer_range=0.2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
