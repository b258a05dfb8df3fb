"""The values that flags set for fields that a request does not set, for the server and for batches."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from launch.flags.decoding import steps_follow_tokens
from launch.flags.model import default_name, read_tokenizer
from launch.openai.bodies import Defaults
from runtime import CheckpointFolder, DiffusionConfig, ModelConfig, SamplingConfig, check_kind, end_tokens


def request_defaults(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    model: ModelConfig,
    config: DiffusionConfig | SamplingConfig,
    *,
    model_name: str | None = None,
    seed: int = 0,
    chat: bool = False,
    samples: int = 1,
    stop: Sequence[str] = (),
) -> Defaults:
    """Return the values of fields that a request does not set.

    Args:
      values: parsed flags, with those of :func:`launch.flags.decoding.define_decoding_flags`.
      folder: the checkpoint.
      model: its architecture.
      config: the decoding parameters, from :func:`launch.flags.decoding.decoding_config`.
      model_name: name of the model in the API; the name of the checkpoint by default.
      seed, chat, samples, stop: as in :class:`launch.openai.bodies.Defaults`.

    Raises:
      InputError: the folder has no tokenizer, or the model does not have what a decoding parameter asks for.
    """
    check_kind(model, config)
    tokenizer = read_tokenizer(folder)
    return Defaults(
        model_name=model_name or default_name(folder),
        model=model,
        tokenizer=tokenizer,
        config=config,
        steps_follow_tokens=steps_follow_tokens(values, folder),
        end_token_ids=end_tokens(model, folder, tokenizer),
        seed=seed,
        chat=chat,
        samples=samples,
        stop=tuple(stop),
    )
