"""The facts that identify a run of a batch."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from absl import flags

from launch.batches.lines import Batch
from launch.hosts.preflight import code_digest
from launch.openai.bodies import Defaults
from launch.process.startup import version
from runtime import CheckpointFolder, declared_parameters

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja")


def run_facts(
    values: flags.FlagValues, folder: CheckpointFolder, checkpoint: str, batch: Batch, defaults: Defaults
) -> dict[str, Any]:
    """Return the facts that determine the results and identify a run, as JSON values. The mesh is not among them.

    Args:
      values: parsed flags, with those of :func:`launch.flags.model.define_model_flags`.
      folder: the checkpoint.
      checkpoint: the checkpoint's fingerprint.
      batch: the contents of the input file.
      defaults: the defaults that the lines were read with.
    """
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder.path / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((folder.path / name).read_bytes()).digest())
    declared = declared_parameters(type(defaults.config))
    shared = [one for one in declared if not (one.per_row or one.speed_only)]
    decoding = {one.name: getattr(defaults.config, one.name) for one in shared}
    facts = {
        "version": version(),
        "code": code_digest(),
        "checkpoint": checkpoint,
        "model": defaults.model_name,
        "tokenizer": digest.hexdigest()[:16],
        "input": batch.digest,
        # Other versions of the tokenizer's library may make other tokens, and a chat template may use the date.
        "tokens": batch.tokens_digest(),
        "seed": defaults.seed,
        "decoding": decoding,
        "steps_follow_tokens": defaults.steps_follow_tokens,
        "chat": defaults.chat,
        "num_return_sequences": defaults.samples,
        "stop": list(defaults.stop),
        "dtype": values.dtype,
        "quantize": values.quantize,
        "kv_cache": values.kv_cache,
    }
    return dict(json.loads(json.dumps(facts)))
