"""Checks of the engine's options that have a fixed set of values. They run before any file is read."""

from __future__ import annotations

from checkpoints.opening import VERIFY
from runtime.models.attention import ATTENTION_IMPLEMENTATIONS
from runtime.models.config import STORED_DTYPES
from runtime.models.kv_cache import CACHE_DTYPES
from runtime.models.quantization import QUANTIZATIONS
from sharding.errors import InputError

_CHOICES = {
    "dtype": STORED_DTYPES,
    "attention": ATTENTION_IMPLEMENTATIONS,
    "kv_cache": CACHE_DTYPES,
    "quantize": QUANTIZATIONS,
    "verify": VERIFY,
}


def check_options(**options: str | None) -> None:
    """Check options of :meth:`runtime.engine.Engine.load` by name. None means the default.

    Raises:
      InputError: a value is not one of the allowed ones.
    """
    for name, value in options.items():
        if value is not None and value not in _CHOICES[name]:
            raise InputError(f"{name} {value!r} is not one of {', '.join(_CHOICES[name])}", field=name)
