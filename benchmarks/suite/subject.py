"""The model that a suite measures, on the devices that flags select."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from benchmarks.models import define_model_flags, forward_flops, model_config, model_sizes
from benchmarks.records import NotRunError
from benchmarks.roofline import Roofline
from benchmarks.suite.sheet import Sheet
from benchmarks.timed_passes import Request, TimedPass, time_pass
from checkpoints import DEMO
from launch.process.startup import define_device_flags
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.execution.pool_shape import uses_cache
from runtime.execution.result import GenerationResult
from runtime.models.attention import ATTENTION_IMPLEMENTATIONS
from runtime.models.config import STORED_DTYPES, ModelConfig
from runtime.planner.workload import Workload
from sharding.errors import InputError

DEVICES = {"auto": None, "cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
# Share of the measured roofline that calls are expected to reach, for estimates of their time.
_EXPECTED = 0.3


def define_subject_flags(values: flags.FlagValues) -> None:
    """Define the flags of the model and the devices."""
    define_device_flags(values)
    values["compile_cache"].value = ""  # measure compilation, not the cache
    flags.DEFINE_enum("device", "auto", tuple(DEVICES), "Where to run.", flag_values=values)
    flags.DEFINE_string("checkpoint", None, "Model folder, URL or Hub name. Default: the demo.", flag_values=values)
    define_model_flags(values, None)
    flags.DEFINE_enum(
        "dtype", None, STORED_DTYPES, "Dtype of the weights. Default: as stored; float32 on CPU.", flag_values=values
    )
    flags.DEFINE_string("mesh", None, "Mesh, such as tensor=8. Default: chosen by the planner.", flag_values=values)
    flags.DEFINE_enum("attention", "auto", ATTENTION_IMPLEMENTATIONS, "Attention implementation.", flag_values=values)


def check_subject(values: flags.FlagValues) -> None:
    """Check the flags before a device is used, and choose the device.

    Raises:
      InputError: the flags name two models.
    """
    if values.random is not None and values.checkpoint is not None:
        raise InputError("--checkpoint and --random cannot be combined")
    if values.random is None and values.checkpoint is None:
        values.checkpoint = str(DEMO)
    if values.random is None:
        sizes = [name for name in model_size_flags() if values[name].value is not None]
        if sizes:
            raise InputError(f"--{sizes[0]} requires --random; a checkpoint has its own sizes")
    import jax

    if DEVICES[values.device] is not None and values.devices is None:
        jax.config.update("jax_platforms", DEVICES[values.device])


def model_size_flags() -> list[str]:
    """Return the names of the flags for model sizes."""
    found = flags.FlagValues()
    define_model_flags(found)
    return [name for name in found if name != "random"]


def command(module: str, values: flags.FlagValues, *more: str) -> list[str]:
    """Return the command that runs another module with the same model and devices."""
    names = ["device", "devices", "checkpoint", "random", "dtype", "mesh", "attention", *model_size_flags()]
    given = [f"--{name}={values[name].value}" for name in names if values[name].value is not None]
    return [sys.executable, "-m", module, *given, *more]


def attached_devices(values: flags.FlagValues) -> list[Any]:
    """Return the devices to run on.

    Raises:
      InputError: there are no devices of the requested kind.
    """
    import jax

    try:
        return list(jax.devices())
    except RuntimeError as error:
        raise InputError(f"--device={values.device}: {str(error)[:300]}") from error


def open_engine(values: flags.FlagValues, devices: Sequence[Any], mesh: str | None = None) -> Engine:
    """Load the model onto the devices; ``mesh`` defaults to the flag."""
    mesh = mesh or values.mesh
    if values.random is None:
        return Engine.load(
            values.checkpoint, mesh, values.dtype, attention=values.attention, devices=devices, verify="none"
        )
    dtype = values.dtype or ("float32" if devices[0].platform == "cpu" else "bfloat16")
    config = model_config(model_sizes(values), dtype)
    return Engine.random(config, mesh, dtype, attention=values.attention, devices=devices)


def model_name(values: flags.FlagValues) -> str:
    """Return the model's name for a record, without local paths."""
    name: str = values.random or values.checkpoint
    return Path(name).name if Path(name).is_dir() else name


def prompt_ids(config: ModelConfig, batch: int, length: int) -> np.ndarray:
    """Return random tokens ``[B, P]`` without masks, the same in every call."""
    allowed = np.delete(np.arange(config.vocab_size), [max(0, config.mask_token_id)])
    return np.asarray(np.random.default_rng(0).choice(allowed, (batch, length)), np.int32)


def request_of(config: ModelConfig, new_tokens: int, steps: int) -> DiffusionConfig | SamplingConfig:
    """Return the configuration of a greedy generation. ``steps`` applies to masked diffusion."""
    if config.objective == "autoregressive":
        return SamplingConfig(max_new_tokens=new_tokens)
    return DiffusionConfig(max_new_tokens=new_tokens, steps=steps, algorithm="entropy")


@dataclass
class Subject:
    """A loaded model, and the sheet for its measurements.

    Attributes:
      values: the flags.
      sheet: the sheet for its measurements.
      engine: the model.
      roofline: measured peak rates of one device.
    """

    values: flags.FlagValues
    sheet: Sheet
    engine: Engine
    roofline: Roofline

    @property
    def devices(self) -> list[Any]:
        """Devices of the mesh."""
        mesh = self.engine.layout.mesh
        assert mesh is not None, "an engine has a mesh"
        return list(mesh.devices.flat)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every pass reads on one device: all but the embedding table."""
        return self.engine.layout.bytes_read_per_pass(self.engine.dtype)

    def expected_seconds(self, batch: int, canvas: int, forwards: int = 1) -> float:
        """Return the expected seconds of forward passes, from the roofline."""
        flops = forward_flops(self.engine.config, batch, canvas, 0) / len(self.devices)
        reading = self.weight_bytes / self.roofline.bandwidth
        return forwards * max(flops / self.roofline.flops, reading) / _EXPECTED

    def mfu(self, flops: float, milliseconds: float) -> float:
        """Return the model FLOPs utilisation, relative to the measured matrix product."""
        return round(flops / (milliseconds / 1e3) / (self.roofline.flops * len(self.devices)), 4)

    def mbu(self, bytes_read: float, milliseconds: float) -> float:
        """Return the memory bandwidth utilisation of one device, relative to the measured copy."""
        return round(bytes_read / (milliseconds / 1e3) / self.roofline.bandwidth, 4)

    def check_shape(self, batch: int, canvas: int, cached: bool = False) -> None:
        """Check that the rows fit into one batch.

        Raises:
          NotRunError: the model has fewer positions, or the devices less memory, or the mesh does not divide them.
        """
        config, spec = self.engine.config, self.engine.layout.spec
        if canvas > config.max_positions:
            raise NotRunError(f"the model has {config.max_positions} positions")
        if batch % spec.data:
            raise NotRunError(f"{batch} rows do not divide over data={spec.data}")
        if self.engine.batch_size(batch, canvas, cached) < batch:
            raise NotRunError(
                f"memory allows {self.engine.batch_size(batch, canvas, cached)} rows at a time (estimated)"
            )

    def generation(
        self, engine: Engine, batch: int, prompt: int, request: DiffusionConfig | SamplingConfig, found: dict[str, Any]
    ) -> Callable[[], Callable[[], None]]:
        """Return a function that prepares a timed generation. The last result is stored in ``found["result"]``."""

        def prepare() -> Callable[[], None]:
            self.check_shape(batch, prompt + request.max_new_tokens, uses_cache(request))
            ids = prompt_ids(engine.config, batch, prompt)

            def call() -> None:
                found["result"] = engine.generate_tokens(ids, config=request)

            return call

        return prepare

    def measure_pass(
        self,
        section: str,
        name: str,
        engine: Engine,
        prepare: Callable[[], tuple[Workload, Mapping[str, Request]]],
        facts: Callable[[Workload, TimedPass], Mapping[str, Any]],
        *,
        seconds: float,
    ) -> None:
        """Measure one kind of pass, and add the measurement to the sheet.

        Args:
          section: see :class:`Measurement`.
          name: see :class:`Measurement`.
          engine: the engine that generates.
          prepare: makes the workload and the requests that :func:`benchmarks.timed_passes.time_pass` takes. It may
            raise :class:`InputError`.
          facts: returns further facts about the measurement.
          seconds: expected seconds of one call of each request.
        """

        def work() -> None:
            trials = self.sheet.trials(seconds)
            workload, requests = prepare()
            self.check_shape(workload.batch, workload.prompt + workload.new_tokens, workload.has_cache)
            ids = prompt_ids(engine.config, workload.batch, workload.prompt)
            timed = time_pass(engine, ids, requests, trials, warmup=1)
            self.sheet.timing(section, name, timed.timing, facts(workload, timed))

        self.sheet.attempt(section, name, work)


def rates(result: GenerationResult, milliseconds: float) -> dict[str, Any]:
    """Return the facts of a generation: tokens per second, forward passes, and tokens per pass."""
    stats = result.stats
    return {
        "tokens_per_second": round(stats.tokens / (milliseconds / 1e3), 2),
        "forwards": stats.forwards,
        "tokens_per_forward": round(stats.tokens / max(1, stats.forwards), 3),
        "compiled_when_timed": stats.compiled_programs,
    }
