"""Flags of the HTTP server, and the limits, API keys, request defaults, modes and slots read from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from launch.flags.decoding import decoding_config
from launch.flags.requests import request_defaults
from launch.openai.bodies import Defaults, read_config
from launch.process.path_flags import define_path
from launch.process.real_flags import define_real
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from runtime import (
    EXPOSED_PARAMETERS,
    MAX_PROGRAMS,
    MAX_STEPS,
    CheckpointFolder,
    DiffusionConfig,
    InputError,
    ModelConfig,
    ParameterError,
    PoolShape,
    SamplingConfig,
    check_kind,
    step_limit,
)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_DEFAULT_CANVAS = 512
_DEFAULT_SLOTS = 8
# Decoding flags that a server refuses, because each request sets its own value: flag, and field of the request.
_REQUEST_ONLY = {name: one.http_name for name, one in EXPOSED_PARAMETERS.items() if one.request_only}


def define_server_flags(values: flags.FlagValues) -> None:
    """Define the flags of the HTTP server, its slots and its modes."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def integer(name: str, default: int | None, text: str, low: int, high: int) -> None:
        flags.DEFINE_integer(name, default, text, low, high, flag_values=values)

    def seconds(name: str, default: float, text: str) -> None:
        define_real(name, default, text, 0.01, 1e6, values=values)

    string("host", "127.0.0.1", "Address to listen on. Any other than loopback requires --api_key_file.")
    integer("port", 8000, "Port to listen on; 0 for a free one.", 0, 65535)
    text = "File of API keys, of 16 or more characters, one per line, that only its owner can read."
    define_path("api_key_file", text, values)
    flags.DEFINE_list(
        "allowed_hosts",
        None,
        "Host headers to accept. Default: loopback names if --host is a loopback address, otherwise any.",
        flag_values=values,
    )
    string("served_model_name", None, "Name of the model in the API. Default: its Hub name, or the name of its folder.")
    flags.DEFINE_multi_integer(
        "canvas",
        [],
        f"Maximum positions per row (prompt plus new tokens). Repeat the flag to list the widths to compile for. "
        f"Default: {_DEFAULT_CANVAS}, and several smaller widths",
        2,
        1 << 20,
        flag_values=values,
    )
    integer("slots", _DEFAULT_SLOTS, "Maximum rows to run at once, for each mode.", 1, 1 << 16)
    integer("max_programs", MAX_PROGRAMS, "Maximum number of buckets (shapes to compile for) per mode.", 1, 1 << 10)
    flags.DEFINE_multi_string(
        "mode",
        [],
        "Another set of decoding parameters to serve, such as cache=dual,parallel=threshold",
        flag_values=values,
    )
    integer(
        "max_steps",
        None,
        "Largest number of denoise steps per block. Default: the larger of --canvas and --steps.",
        1,
        MAX_STEPS,
    )
    integer("max_queue", 64, "Rows that may wait; more get 429. An eighth is for clients with none.", 1, 1 << 20)
    integer("max_rows", 32, "Maximum number of completions, or of scored rows, per request.", 1, 1024)
    integer("max_body_bytes", 1 << 20, "Maximum size of a request's body, in bytes.", 1 << 10, 1 << 30)
    integer("max_header_bytes", 16 << 10, "Maximum size of the request line and headers, in bytes.", 1 << 10, 1 << 20)
    integer("max_connections", 1024, "Maximum number of open connections.", 1, 1 << 16)
    seconds("request_timeout", 600.0, "Seconds within which a request must finish.")
    seconds(
        "read_timeout", 10.0, "Seconds within which a client must send the headers, and then the body, of a request."
    )
    seconds("write_timeout", 30.0, "Seconds in which a client must read the next 256 KB of a response, or the rest.")
    seconds("unhealthy_after", 60.0, "Seconds that one step of the engine may take before /health reports a stall.")
    seconds("grace", 30.0, "Grace period: seconds to finish accepted requests after SIGTERM.")


def read_limits(values: flags.FlagValues) -> Limits:
    """Read the limits from flags.

    Raises:
      InputError: a request with the most rows would not fit into the queue.
    """
    if values.max_rows > values.max_queue:
        raise InputError(f"--max_rows={values.max_rows} must not exceed --max_queue={values.max_queue}")
    return Limits(
        body=values.max_body_bytes,
        headers=values.max_header_bytes,
        rows=values.max_rows,
        queue=values.max_queue,
        connections=values.max_connections,
        request_seconds=values.request_timeout,
        read_seconds=values.read_timeout,
        write_seconds=values.write_timeout,
        stall_seconds=values.unhealthy_after,
        grace_period=values.grace,
    )


def read_keys(values: flags.FlagValues) -> Keys:
    """Read the API keys from the file that a flag names.

    Raises:
      InputError: the file is invalid, or the server would be open to the network without keys.
    """
    if values.api_key_file is not None:
        return Keys.read(Path(values.api_key_file))
    if values.host not in LOOPBACK:
        raise InputError(f"--host={values.host} is open to the network: give --api_key_file, or --host=127.0.0.1")
    return Keys()


def allowed_hosts(values: flags.FlagValues) -> Sequence[str]:
    """Return the host names that requests may use; if empty, they may use any name."""
    return values.allowed_hosts or (LOOPBACK if values.host in LOOPBACK else ())


def mark_request_fields(values: flags.FlagValues) -> None:
    """Say in ``--help`` which decoding flags a server refuses, because each request sets its own value."""
    for flag, field in _REQUEST_ONLY.items():
        values[flag].help = f'Not available in serve. Set "{field}" in each request.'


def read_defaults(values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig) -> Defaults:
    """Return the values of fields that a request does not set, from the decoding flags and the checkpoint.

    Raises:
      InputError: there is no tokenizer, or a decoding flag is invalid or only allowed in requests.
    """
    for flag, field in _REQUEST_ONLY.items():
        if values[flag].present:
            raise InputError(f'--{flag} is not available in serve; set "{field}" in each request')
    config = decoding_config(values, folder, model)
    return request_defaults(values, folder, model, config, model_name=values.served_model_name)


def read_modes(texts: Sequence[str], defaults: Defaults) -> list[DiffusionConfig | SamplingConfig]:
    """Return the configuration of each mode: the decoding flags make the first, and each ``--mode`` another.

    Raises:
      InputError: a mode is invalid or does not apply to this model.
    """
    found = [defaults.config]
    for text in texts:
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, sign, value = part.partition("=")
            if not sign or name not in EXPOSED_PARAMETERS or not EXPOSED_PARAMETERS[name].mode:
                names = ", ".join(one.name for one in EXPOSED_PARAMETERS.values() if one.mode)
                raise InputError(
                    f"--mode={text}: expected name=value pairs separated by commas; names: {names}", field="mode"
                )
            fields[name] = EXPOSED_PARAMETERS[name].kind.parse(value)
        try:
            found.append(read_config(fields, defaults))
        except InputError as error:
            raise InputError(f"--mode={text}: {error}", field="mode") from error
        for name in fields:
            # A request for this mode would get the value of the server's flag instead.
            if not EXPOSED_PARAMETERS[name].is_compiled(found[-1]) and fields[name] != getattr(found[0], name):
                raise InputError(
                    f"--mode={text}: {name} is set in each request, not in a mode; leave it out here",
                    field="mode",
                )
    return found


def read_pool_shapes(
    values: flags.FlagValues, model: ModelConfig, configs: Sequence[DiffusionConfig | SamplingConfig]
) -> list[PoolShape]:
    """Return the shape of each mode's pool, given the configurations of the modes.

    Raises:
      InputError: the model does not have what a mode asks for, a canvas is too wide for it, or a request with default
        lengths does not fit.
    """
    for config in configs:
        check_kind(model, config)
    widths = sorted(set(values.canvas)) or [min(_DEFAULT_CANVAS, model.max_positions)]
    if len(widths) > values.max_programs:
        raise InputError(f"--max_programs={values.max_programs} is too few for {len(widths)} widths (--canvas)")
    if widths[-1] > model.max_positions:
        raise InputError(f"--canvas={widths[-1]}: the model allows {model.max_positions} positions")
    for config in configs:
        if isinstance(config, DiffusionConfig) and config.attention_block_length > widths[-1]:
            raise InputError(f"--canvas={widths[-1]} is narrower than a block of {config.attention_block_length}")
    if (tokens := configs[0].max_new_tokens) >= widths[-1]:
        raise InputError(
            f"--canvas={widths[-1]} has no room for a prompt beside {tokens} new tokens: raise --canvas, or lower "
            "--max_new_tokens"
        )
    try:
        for config in configs:
            step_limit(config, widths[-1], values.max_steps)
    except ParameterError as error:
        raise InputError(error.spelled(lambda name: f"--{name}"), field=error.field) from error
    own = tuple(widths) if len(widths) > 1 else None
    return [
        PoolShape(config, widths[-1], values.slots, values.max_steps, own, values.max_programs) for config in configs
    ]
