"""What runs on the devices. Public names are imported lazily: importing this package touches no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError
    from checkpoints.fingerprint import fingerprint
    from checkpoints.folder import CheckpointFolder
    from runtime.decoding.parameters import MAX_STEPS, DiffusionConfig, SamplingConfig
    from runtime.engine import Engine
    from runtime.execution.executor import Executor
    from runtime.execution.left_padding import read_rows
    from runtime.execution.offline import OfflineScheduler
    from runtime.execution.pool import PoolShape, step_limit
    from runtime.execution.requests import (
        CanvasChanged,
        Event,
        FirstToken,
        PrefixGrown,
        RequestFinished,
        RequestHandle,
        RowFinished,
        RowInserted,
        RowsScored,
    )
    from runtime.execution.result import GenerationResult, GenerationStats
    from runtime.execution.row_request import RowRequest, RowResult
    from runtime.execution.rows import MAX_SAMPLES, check_request, row_seed, row_seeds
    from runtime.execution.scheduler import PoolLimits, Scheduler, SchedulerPolicy, SchedulerStats
    from runtime.execution.step_plan import ScorePass, StepOutcome, StepPlan
    from runtime.models.config import ConfigError, ModelConfig
    from runtime.text.completions import Completion, TextStream, cut_completion
    from runtime.text.tokenizer import TextTokenizer, encode_prompts, end_tokens
    from sharding.errors import InputError, MeshError
    from sharding.mesh import MeshSpec

__all__ = [
    "MAX_SAMPLES",
    "MAX_STEPS",
    "CanvasChanged",
    "CheckpointError",
    "CheckpointFolder",
    "Completion",
    "ConfigError",
    "DiffusionConfig",
    "Engine",
    "Event",
    "Executor",
    "FirstToken",
    "GenerationResult",
    "GenerationStats",
    "InputError",
    "MeshError",
    "MeshSpec",
    "ModelConfig",
    "OfflineScheduler",
    "PoolLimits",
    "PoolShape",
    "PrefixGrown",
    "RequestFinished",
    "RequestHandle",
    "RowFinished",
    "RowInserted",
    "RowRequest",
    "RowResult",
    "RowsScored",
    "SamplingConfig",
    "Scheduler",
    "SchedulerPolicy",
    "SchedulerStats",
    "ScorePass",
    "StepOutcome",
    "StepPlan",
    "TextStream",
    "TextTokenizer",
    "check_request",
    "cut_completion",
    "encode_prompts",
    "end_tokens",
    "fingerprint",
    "read_rows",
    "row_seed",
    "row_seeds",
    "step_limit",
]

_HOMES = {
    "CanvasChanged": "runtime.execution.requests",
    "CheckpointError": "checkpoints.errors",
    "CheckpointFolder": "checkpoints.folder",
    "Completion": "runtime.text.completions",
    "ConfigError": "runtime.models.config",
    "DiffusionConfig": "runtime.decoding.parameters",
    "Engine": "runtime.engine",
    "Event": "runtime.execution.requests",
    "Executor": "runtime.execution.executor",
    "FirstToken": "runtime.execution.requests",
    "GenerationResult": "runtime.execution.result",
    "GenerationStats": "runtime.execution.result",
    "InputError": "sharding.errors",
    "MAX_SAMPLES": "runtime.execution.rows",
    "MAX_STEPS": "runtime.decoding.parameters",
    "MeshError": "sharding.errors",
    "MeshSpec": "sharding.mesh",
    "ModelConfig": "runtime.models.config",
    "OfflineScheduler": "runtime.execution.offline",
    "PoolLimits": "runtime.execution.scheduler",
    "PoolShape": "runtime.execution.pool",
    "PrefixGrown": "runtime.execution.requests",
    "RequestFinished": "runtime.execution.requests",
    "RequestHandle": "runtime.execution.requests",
    "RowFinished": "runtime.execution.requests",
    "RowInserted": "runtime.execution.requests",
    "RowRequest": "runtime.execution.row_request",
    "RowResult": "runtime.execution.row_request",
    "RowsScored": "runtime.execution.requests",
    "SamplingConfig": "runtime.decoding.parameters",
    "Scheduler": "runtime.execution.scheduler",
    "SchedulerPolicy": "runtime.execution.scheduler",
    "SchedulerStats": "runtime.execution.scheduler",
    "ScorePass": "runtime.execution.step_plan",
    "StepOutcome": "runtime.execution.step_plan",
    "StepPlan": "runtime.execution.step_plan",
    "TextStream": "runtime.text.completions",
    "TextTokenizer": "runtime.text.tokenizer",
    "check_request": "runtime.execution.rows",
    "cut_completion": "runtime.text.completions",
    "encode_prompts": "runtime.text.tokenizer",
    "end_tokens": "runtime.text.tokenizer",
    "fingerprint": "checkpoints.fingerprint",
    "read_rows": "runtime.execution.left_padding",
    "row_seed": "runtime.execution.rows",
    "row_seeds": "runtime.execution.rows",
    "step_limit": "runtime.execution.pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
