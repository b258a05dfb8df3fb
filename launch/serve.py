"""Serve a model over HTTP, to the clients of OpenAI's API.

  diffumesh serve                                              the demo checkpoint, on 127.0.0.1:8000
  diffumesh serve --checkpoint=apple/DiffuCoder-7B-cpGRPO --mesh=tensor=8 --canvas=512 --canvas=2048 --slots=16
  diffumesh serve --mode=cache=dual,parallel=threshold ...     a second decoding mode, which requests may select
  diffumesh serve --host=0.0.0.0 --api_key_file=keys.txt ...   open to the network, with API keys

Routes: /v1/completions, /v1/chat/completions, /v1/score, /v1/models, /health, /metrics, /version, /openapi.json.
Requests share a number of slots on the mesh, and forward passes cover buckets of rows and positions that fit the
present requests. Once /health says ready, no request waits for the compiler; further shapes are compiled while requests
run. The tokens of a request depend only on the request and its seed. Decoding flags set the defaults of requests.
SIGTERM finishes accepted requests within --grace seconds; a second SIGTERM stops at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from launch.flags.decoding import decoding_config, define_decoding_flags, describe, steps_follow_tokens
from launch.flags.model import default_name, define_model_flags, load_engine, open_checkpoint, read_tokenizer
from launch.hosts.faults import EXIT_RESTART
from launch.openai.bodies import Defaults, read_config
from launch.process.profiling import check_profiling, define_profiling_flags, traced, write_programs
from launch.process.startup import (
    define_device_flags,
    is_main_process,
    run_launcher,
    say,
    start_devices,
    this_host,
    version,
)
from runtime import (
    EXPOSED_PARAMETERS,
    MAX_PROGRAMS,
    MAX_STEPS,
    CheckpointFolder,
    DiffusionConfig,
    Executor,
    InputError,
    ModelConfig,
    PoolShape,
    SamplingConfig,
    end_tokens,
    folder_fingerprint,
    step_limit,
)

try:
    from launch.serving.engine import follow
    from launch.serving.http import listen
    from launch.serving.keys import Keys
    from launch.serving.limits import Limits
    from launch.serving.reading import Mode
    from launch.serving.server import Server

    _MISSING = None
except ModuleNotFoundError as error:
    _MISSING = error.name

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_DEFAULT_CANVAS = 512
_DEFAULT_SLOTS = 8
# Open files besides connections: weights, devices, logs.
_OTHER_FILES = 128
# Time after the grace period to flush answers and write a trace.
_ENDING_SECONDS = 15.0


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def integer(name: str, default: int | None, text: str, low: int, high: int) -> None:
        flags.DEFINE_integer(name, default, text, low, high, flag_values=values)

    def seconds(name: str, default: float, text: str) -> None:
        flags.DEFINE_float(name, default, text, 0.01, 1e6, flag_values=values)

    string("host", "127.0.0.1", "Address to listen on. Any other than loopback requires --api_key_file.")
    integer("port", 8000, "Port to listen on; 0 for a free one.", 0, 65535)
    string("api_key_file", None, "File of API keys, one per line, readable only by its owner; all routes require one.")
    flags.DEFINE_list(
        "allowed_hosts",
        None,
        "Host names that requests may use. Default: those of this machine on loopback, else any.",
        flag_values=values,
    )
    string("served_model_name", None, "Name of the model in the API. Default: its Hub name, or the name of its folder.")
    flags.DEFINE_multi_integer(
        "canvas",
        [],
        f"Largest number of positions, prompt and new tokens together; repeat it to list the widths to compile. "
        f"Default: {_DEFAULT_CANVAS}, and a ladder of widths up to it.",
        2,
        1 << 20,
        flag_values=values,
    )
    integer("slots", _DEFAULT_SLOTS, "Rows on the devices at a time, for each mode.", 1, 1 << 16)
    integer("max_programs", MAX_PROGRAMS, "Largest number of shapes to compile for each mode.", 1, 1 << 10)
    flags.DEFINE_multi_string(
        "mode",
        [],
        "Another decoding mode that requests may select, such as cache=dual,parallel=threshold; repeatable.",
        flag_values=values,
    )
    integer(
        "max_steps",
        None,
        "Largest number of denoise steps per block. Default: the canvas, or --steps.",
        1,
        MAX_STEPS,
    )
    integer("max_queue", 64, "Rows that may wait; further requests are refused with 429.", 1, 1 << 20)
    integer("max_rows", 32, "Largest number of completions or scored rows of one request.", 1, 1024)
    integer("max_body_bytes", 1 << 20, "Largest body of a request in bytes.", 1 << 10, 1 << 30)
    integer("max_header_bytes", 16 << 10, "Largest head of a request in bytes.", 1 << 10, 1 << 20)
    integer("max_connections", 1024, "Largest number of open connections.", 1, 1 << 16)
    seconds("request_timeout", 600.0, "Seconds within which a request must finish.")
    seconds("read_timeout", 10.0, "Seconds within which a client must send the head, and then the body, of a request.")
    seconds("write_timeout", 30.0, "Seconds for which a client may leave a response unread.")
    seconds("unhealthy_after", 60.0, "Seconds that one step of the engine may take before /health reports a stall.")
    seconds("grace", 30.0, "Grace period: seconds to finish accepted requests after SIGTERM.")
    define_model_flags(values)
    define_decoding_flags(values)
    define_device_flags(values)
    define_profiling_flags(values)


def read_limits(values: flags.FlagValues) -> Limits:
    """Read the limits from flags.

    Raises:
      InputError: a request could never be queued.
    """
    if values.max_rows > values.max_queue:
        raise InputError(f"--max_rows={values.max_rows} of a request do not fit into --max_queue={values.max_queue}")
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


def allow_files(connections: int) -> None:
    """Raise the limit of open files as far as allowed, and check that it suffices for the connections.

    Raises:
      InputError: the limit is too low.
    """
    if sys.platform == "win32":  # no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    # Without a hard limit, the kernel has a limit of its own that it does not report.
    allowed = wanted if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raise InputError(
            f"--max_connections={connections} takes {wanted} open files, and ulimit -n allows {soft}: raise it, or "
            f"--max_connections={max(1, soft - _OTHER_FILES)}"
        )


def read_keys(values: flags.FlagValues) -> Keys:
    """Read the API keys that flags name.

    Raises:
      InputError: the server is open to the network without keys.
    """
    if values.api_key_file is not None:
        return Keys.read(Path(values.api_key_file))
    if values.host not in LOOPBACK:
        raise InputError(f"--host={values.host} is open to the network: give --api_key_file, or --host=127.0.0.1")
    return Keys()


def read_defaults(values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig) -> Defaults:
    """Return the settings of requests that do not set their own: the decoding flags, and the tokenizer's end tokens.

    Raises:
      InputError: there is no tokenizer, or a decoding flag is invalid or only allowed in requests.
    """
    if values["seed"].present:
        raise InputError('--seed: requests set their own, as "seed", or get a random one')
    if values["log_probabilities"].present:
        raise InputError('--log_probabilities: requests set their own, as "logprobs"')
    tokenizer = read_tokenizer(folder)
    end_token_ids = end_tokens(model, folder, tokenizer)
    config = decoding_config(values, folder, model)
    return Defaults(
        model_name=values.served_model_name or default_name(folder),
        model=model,
        tokenizer=tokenizer,
        config=config,
        steps_follow_tokens=steps_follow_tokens(values, folder),
        end_token_ids=end_token_ids,
        seed=0,
        chat=False,
        samples=1,
        stop=(),
    )


def read_modes(texts: Sequence[str], defaults: Defaults) -> list[DiffusionConfig | SamplingConfig]:
    """The decoding modes: the one of the flags, and those of --mode.

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
                raise InputError(f"--mode={text}: expected name=value, separated by commas, of {names}", field="mode")
            fields[name] = EXPOSED_PARAMETERS[name].kind.parse(value)
        try:
            found.append(read_config(fields, defaults))
        except InputError as error:
            raise InputError(f"--mode={text}: {error}", field="mode") from error
    return found


def shapes(
    values: flags.FlagValues, model: ModelConfig, configs: Sequence[DiffusionConfig | SamplingConfig]
) -> tuple[list[PoolShape], list[Mode]]:
    """The shapes of the pools of slots, and the pool of each mode.

    Raises:
      InputError: the model does not allow a canvas, or a request with default lengths does not fit.
    """
    widths = sorted(set(values.canvas)) or [min(_DEFAULT_CANVAS, model.max_positions)]
    if widths[-1] > model.max_positions:
        raise InputError(f"--canvas={widths[-1]}: the model allows {model.max_positions} positions")
    if (tokens := configs[0].max_new_tokens) >= widths[-1]:
        raise InputError(
            f"--canvas={widths[-1]} has no room for a prompt beside {tokens} new tokens: give a wider one, or fewer "
            "--max_new_tokens"
        )
    try:
        for config in configs:
            step_limit(config, widths[-1], values.max_steps)
    except InputError as error:
        raise InputError(f"--{error}") from error
    own = tuple(widths) if len(widths) > 1 else None
    made = [
        PoolShape(config, widths[-1], values.slots, values.max_steps, own, values.max_programs) for config in configs
    ]
    return made, [Mode(config, number) for number, config in enumerate(configs)]


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh serve``: load the model, and serve it until a signal or a fault."""
    if _MISSING is not None:
        raise InputError(f"the server needs {_MISSING}: pip install 'diffumesh[serve]'")
    check_profiling(values)
    limits, keys = read_limits(values), read_keys(values)
    folder, model = open_checkpoint(values)
    defaults = read_defaults(values, folder, model)
    made, modes = shapes(values, model, read_modes(values.mode, defaults))
    if is_main_process():
        allow_files(limits.connections)
    own = listen(values.host, values.port) if is_main_process() else None

    start_devices(values, {"checkpoint": folder_fingerprint(folder)})
    server = None
    if own is not None:
        names = values.allowed_hosts or (LOOPBACK if values.host in LOOPBACK else ())
        server = Server(own, defaults, modes, limits, keys, names, this_host(), version())
    engine = load_engine(values, folder, values.slots)
    say(describe(defaults.config))
    executor = Executor(engine.runner, made)
    this_host().end_within(limits.grace_period + _ENDING_SECONDS)
    if server is None or own is None:
        with traced(values):
            follow(executor, this_host())
        return
    name, port = own.getsockname()[:2]
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}"
    slots = ", ".join(f"{pool.count} slots of {pool.width}" for pool in executor.pools)
    server.serving.say = say
    with traced(values):
        server.run(executor, lambda: say(f"serving {defaults.model_name} on {address} ({slots})"))
    if values.dump_hlo is not None:
        write_programs(values, engine.program_texts())
    if late := server.serving.cut_short:
        say(f"{late} requests were not finished within --grace={limits.grace_period:g} s")
        this_host().finish()
        sys.exit(EXIT_RESTART)


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
