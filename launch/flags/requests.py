"""The values that flags set for fields that a request does not set, for the server and for batches."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from launch.flags.decoding import steps_follow_tokens
from launch.flags.model import default_name, read_tokenizer
from launch.openai.bodies import Defaults
from runtime import CheckpointFolder, DiffusionConfig, InputError, ModelConfig, SamplingConfig, check_kind, end_tokens


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
      InputError: the folder has no tokenizer, the model does not have what a decoding parameter asks for, or a text is
        not valid UTF-8.
    """
    check_kind(model, config)
    for flag, text in (("served_model_name", model_name or ""), *(("stop", one) for one in stop)):
        if not _is_text(text):
            raise InputError(f"--{flag}={text!r:.200} is not valid UTF-8")
    name = model_name or default_name(folder)
    if not _is_text(f"{folder.path}{name}"):
        raise InputError(
            f"--checkpoint={folder.name!r:.200}: the folder's path is not valid UTF-8; rename the folder, or pass a "
            "link to it whose path is"
        )
    tokenizer = read_tokenizer(folder)
    return Defaults(
        model_name=name,
        model=model,
        tokenizer=tokenizer,
        config=config,
        steps_follow_tokens=steps_follow_tokens(values, folder, model.family),
        end_token_ids=end_tokens(model, folder, tokenizer),
        seed=seed,
        chat=chat,
        samples=samples,
        stop=tuple(stop),
    )


def _is_text(text: str) -> bool:
    """Whether a text can be written as UTF-8. An argument that is not valid UTF-8 has lone surrogates in Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
