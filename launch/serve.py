"""Serve a model over an OpenAI-compatible HTTP API.

  diffumesh serve                                              the demo checkpoint, on 127.0.0.1:8000
  diffumesh serve --checkpoint=apple/DiffuCoder-7B-cpGRPO --mesh=tensor=8 --canvas=512 --canvas=2048 --slots=16
  diffumesh serve --mode=cache=dual,parallel=threshold ...     slots for requests with these decoding parameters too
  diffumesh serve --host=0.0.0.0 --api_key_file=keys.txt ...   open to the network, with API keys

Routes: /v1/completions, /v1/chat/completions, /v1/score, /v1/models, /health, /metrics, /version, /openapi.json.
Requests share a number of slots on the mesh, and forward passes cover buckets of rows and positions that fit the
current requests. Once /health says ready, no request waits for the compiler; further shapes are compiled while requests
run. In float32, the tokens of a request depend only on the request and its seed. Decoding flags set the defaults of
requests. SIGTERM finishes accepted requests within --grace seconds; a second SIGTERM stops at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from launch.flags.decoding import define_decoding_flags, describe, notices
from launch.flags.model import (
    define_model_flags,
    fingerprints,
    load_engine,
    open_checkpoint,
    open_draft_checkpoint,
    read_mesh,
)
from launch.flags.server import (
    allowed_hosts,
    define_server_flags,
    mark_request_fields,
    read_defaults,
    read_keys,
    read_limits,
    read_modes,
    read_pool_shapes,
)
from launch.hosts.faults import EXIT_RESTART
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
from launch.serving.limits import allow_files
from runtime import Executor, InputError

try:
    from launch.serving.engine import follow
    from launch.serving.http import address, listen
    from launch.serving.reading import Mode
    from launch.serving.server import Server

    _MISSING = None
except ModuleNotFoundError as error:
    _MISSING = error.name

# Seconds after the grace period to flush answers, and to write a trace or programs if they are requested.
_ENDING_SECONDS = 15.0
_PROFILE_SECONDS = 120.0

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = (
    "checkpoint", "mesh", "host", "port", "api_key_file", "canvas", "slots", "mode", "max_new_tokens", "temperature",
    "cache", "parallel", "quantize",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    define_server_flags(values)
    define_model_flags(values)
    define_decoding_flags(values)
    mark_request_fields(values)
    define_device_flags(values)
    define_profiling_flags(values)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh serve``: load the model, and serve it until a signal or a fault."""
    if _MISSING is not None:
        raise InputError(f"the server needs {_MISSING}: pip install -e '.[serve]' in the checkout")
    check_profiling(values)
    limits, keys = read_limits(values), read_keys(values)
    mesh = read_mesh(values)
    folder, model = open_checkpoint(values)
    draft = open_draft_checkpoint(values, folder)
    defaults = read_defaults(values, folder, model)
    configs = read_modes(values.mode, defaults)
    modes = [Mode(config, number) for number, config in enumerate(configs)]
    shapes = read_pool_shapes(values, model, configs)

    # Only host 0 answers HTTP. A port that is in use is found before devices start.
    own = None
    if is_main_process():
        allow_files(limits.connections)
        own = listen(values.host, values.port)
    profiling = values.profile_dir is not None or values.dump_hlo is not None
    end_within = limits.grace_period + _ENDING_SECONDS + profiling * _PROFILE_SECONDS
    start_devices(values, fingerprints(folder, draft), end_within=end_within)
    server = None
    if own is not None:
        server = Server(own, defaults, modes, limits, keys, allowed_hosts(values), this_host(), version())
        server.serving.say = say

    engine = load_engine(values, folder, mesh, values.slots, draft=draft)
    found = notices(values, folder, defaults.model.family, configs, draft=draft)
    for sentence in (describe(defaults.config), *found):
        say(sentence)
    executor = Executor(engine.runner, shapes)
    if server is None or own is None:
        with traced(values):
            follow(executor, this_host())
        return

    slots = ", ".join(f"{pool.count} slots of {pool.width}" for pool in executor.pools)
    ready = f"serving {defaults.model_name} on {address(own)} ({slots})"
    with traced(values):
        server.run(executor, lambda: say(ready))
    if values.dump_hlo is not None:
        write_programs(values, engine.program_texts())
    if late := server.serving.cut_short:
        say(f"{late} requests were not finished within --grace={limits.grace_period:g} s")
        this_host().finish()
        sys.exit(EXIT_RESTART)


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh serve`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
