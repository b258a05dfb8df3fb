"""The runtime: models, decoding, execution and planning.

Names are imported on first use, so importing the package does not initialise JAX's devices.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError
    from checkpoints.fingerprint import folder_fingerprint
    from checkpoints.folder import CheckpointFolder
    from checkpoints.local_files import JsonObjectError, lock, parse_json_object, parse_json_objects, replace_file
    from runtime.decoding.autoregressive_parameters import DEFAULT_DRAFT_TOKENS
    from runtime.decoding.compatibility import can_run, compiled_values
    from runtime.decoding.kinds import (
        Boolean,
        Choice,
        Integer,
        IntegerOrWord,
        ParameterError,
        Real,
        Requirement,
        Seeds,
        TokenIds,
        plain_number,
    )
    from runtime.decoding.parameters import (
        AUTOREGRESSIVE_PARAMETERS,
        CACHES,
        EXPOSED_PARAMETERS,
        MAX_SEED,
        MAX_STEPS,
        MAX_TEMPERATURE,
        MIN_TEMPERATURE,
        DiffusionConfig,
        SamplingConfig,
    )
    from runtime.decoding.schema import Parameter, check_given, declared_parameters, dependents, own_names
    from runtime.engine import Engine
    from runtime.execution.background import BackgroundCompiler
    from runtime.execution.buckets import MAX_PROGRAMS, Bucket, Grid
    from runtime.execution.draft_models import DraftModel, check_draft_objectives
    from runtime.execution.executor import Executor, Programs
    from runtime.execution.fair_queue import FairQueue
    from runtime.execution.left_padding import read_rows, unpadded_rows
    from runtime.execution.offline import OfflineScheduler
    from runtime.execution.policy import SchedulerPolicy
    from runtime.execution.pool_shape import PoolShape, step_limit, uses_cache
    from runtime.execution.pool_state import PoolLimits
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
        StopTest,
    )
    from runtime.execution.result import DraftStats, GenerationResult, GenerationStats
    from runtime.execution.row_request import RowRequest, RowResult
    from runtime.execution.rows import (
        MAX_SAMPLES,
        check_ids,
        check_kind,
        check_request,
        check_row,
        default_steps,
        row_seed,
        row_seeds,
        with_model_blocks,
        with_steps_for_masks,
    )
    from runtime.execution.runner import weight_bytes
    from runtime.execution.scheduler import Scheduler
    from runtime.execution.scheduler_stats import SchedulerStats
    from runtime.execution.step_plan import ScorePass, StepOutcome, StepPlan
    from runtime.models.attention import ATTENTION_IMPLEMENTATIONS
    from runtime.models.config import STORED_DTYPES, ConfigError, Family, ModelConfig
    from runtime.models.declarations import ModelLayout, partition_spec, shard_shape, tensor_sizes
    from runtime.models.families import FAMILIES, model_layout, parse_config
    from runtime.models.kv_cache import CACHE_DTYPES
    from runtime.models.quantization import QUANTIZATIONS
    from runtime.planner.default import default_mesh
    from runtime.text.chat_template import RendererStartError
    from runtime.text.completions import Completion, CompletionBuilder, TextStream, read_stop, stop_tests
    from runtime.text.draft_checkpoint import draft_model, open_draft
    from runtime.text.tokenizer import TextTokenizer, UndecodableError, encode_prompts, end_tokens, place_suffix
    from sharding.aot import AOT_ENVIRONMENT
    from sharding.errors import NON_FINITE, InputError, MeshError, NonFiniteError, OutOfMemoryError
    from sharding.mesh import WEIGHT_MEMORY_SHARE, MeshSpec

__all__ = [
    "AOT_ENVIRONMENT",
    "ATTENTION_IMPLEMENTATIONS",
    "AUTOREGRESSIVE_PARAMETERS",
    "CACHES",
    "CACHE_DTYPES",
    "DEFAULT_DRAFT_TOKENS",
    "EXPOSED_PARAMETERS",
    "FAMILIES",
    "MAX_PROGRAMS",
    "MAX_SAMPLES",
    "MAX_SEED",
    "MAX_STEPS",
    "MAX_TEMPERATURE",
    "MIN_TEMPERATURE",
    "NON_FINITE",
    "QUANTIZATIONS",
    "STORED_DTYPES",
    "WEIGHT_MEMORY_SHARE",
    "BackgroundCompiler",
    "Boolean",
    "Bucket",
    "CanvasChanged",
    "CheckpointError",
    "CheckpointFolder",
    "Choice",
    "Completion",
    "CompletionBuilder",
    "ConfigError",
    "DiffusionConfig",
    "DraftModel",
    "DraftStats",
    "Engine",
    "Event",
    "Executor",
    "FairQueue",
    "Family",
    "FirstToken",
    "GenerationResult",
    "GenerationStats",
    "Grid",
    "InputError",
    "Integer",
    "IntegerOrWord",
    "JsonObjectError",
    "MeshError",
    "MeshSpec",
    "ModelConfig",
    "ModelLayout",
    "NonFiniteError",
    "OfflineScheduler",
    "OutOfMemoryError",
    "Parameter",
    "ParameterError",
    "PoolLimits",
    "PoolShape",
    "PrefixGrown",
    "Programs",
    "Real",
    "RendererStartError",
    "RequestFinished",
    "RequestHandle",
    "Requirement",
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
    "Seeds",
    "StepOutcome",
    "StepPlan",
    "StopTest",
    "TextStream",
    "TextTokenizer",
    "TokenIds",
    "UndecodableError",
    "can_run",
    "check_draft_objectives",
    "check_given",
    "check_ids",
    "check_kind",
    "check_request",
    "check_row",
    "compiled_values",
    "declared_parameters",
    "default_mesh",
    "default_steps",
    "dependents",
    "draft_model",
    "encode_prompts",
    "end_tokens",
    "folder_fingerprint",
    "lock",
    "model_layout",
    "open_draft",
    "own_names",
    "parse_config",
    "parse_json_object",
    "parse_json_objects",
    "partition_spec",
    "place_suffix",
    "plain_number",
    "read_rows",
    "read_stop",
    "replace_file",
    "row_seed",
    "row_seeds",
    "shard_shape",
    "step_limit",
    "stop_tests",
    "tensor_sizes",
    "unpadded_rows",
    "uses_cache",
    "weight_bytes",
    "with_model_blocks",
    "with_steps_for_masks",
]

_HOMES = {
    "AOT_ENVIRONMENT": "sharding.aot",
    "ATTENTION_IMPLEMENTATIONS": "runtime.models.attention",
    "AUTOREGRESSIVE_PARAMETERS": "runtime.decoding.parameters",
    "Boolean": "runtime.decoding.kinds",
    "CACHES": "runtime.decoding.parameters",
    "CACHE_DTYPES": "runtime.models.kv_cache",
    "CanvasChanged": "runtime.execution.requests",
    "CheckpointError": "checkpoints.errors",
    "CheckpointFolder": "checkpoints.folder",
    "Choice": "runtime.decoding.kinds",
    "Completion": "runtime.text.completions",
    "CompletionBuilder": "runtime.text.completions",
    "ConfigError": "runtime.models.config",
    "DiffusionConfig": "runtime.decoding.parameters",
    "DraftModel": "runtime.execution.draft_models",
    "DraftStats": "runtime.execution.result",
    "DEFAULT_DRAFT_TOKENS": "runtime.decoding.autoregressive_parameters",
    "EXPOSED_PARAMETERS": "runtime.decoding.parameters",
    "FAMILIES": "runtime.models.families",
    "Engine": "runtime.engine",
    "Event": "runtime.execution.requests",
    "BackgroundCompiler": "runtime.execution.background",
    "Bucket": "runtime.execution.buckets",
    "Executor": "runtime.execution.executor",
    "FairQueue": "runtime.execution.fair_queue",
    "Family": "runtime.models.config",
    "Grid": "runtime.execution.buckets",
    "MAX_PROGRAMS": "runtime.execution.buckets",
    "Programs": "runtime.execution.executor",
    "FirstToken": "runtime.execution.requests",
    "GenerationResult": "runtime.execution.result",
    "GenerationStats": "runtime.execution.result",
    "InputError": "sharding.errors",
    "Integer": "runtime.decoding.kinds",
    "IntegerOrWord": "runtime.decoding.kinds",
    "MAX_SAMPLES": "runtime.execution.rows",
    "MAX_SEED": "runtime.decoding.parameters",
    "MAX_STEPS": "runtime.decoding.parameters",
    "MAX_TEMPERATURE": "runtime.decoding.parameters",
    "MIN_TEMPERATURE": "runtime.decoding.parameters",
    "MeshError": "sharding.errors",
    "NON_FINITE": "sharding.errors",
    "NonFiniteError": "sharding.errors",
    "MeshSpec": "sharding.mesh",
    "ModelConfig": "runtime.models.config",
    "ModelLayout": "runtime.models.declarations",
    "OfflineScheduler": "runtime.execution.offline",
    "OutOfMemoryError": "sharding.errors",
    "Parameter": "runtime.decoding.schema",
    "ParameterError": "runtime.decoding.kinds",
    "PoolLimits": "runtime.execution.pool_state",
    "PoolShape": "runtime.execution.pool_shape",
    "PrefixGrown": "runtime.execution.requests",
    "QUANTIZATIONS": "runtime.models.quantization",
    "Real": "runtime.decoding.kinds",
    "RendererStartError": "runtime.text.chat_template",
    "RequestFinished": "runtime.execution.requests",
    "RequestHandle": "runtime.execution.requests",
    "Requirement": "runtime.decoding.kinds",
    "RowFinished": "runtime.execution.requests",
    "RowInserted": "runtime.execution.requests",
    "RowRequest": "runtime.execution.row_request",
    "RowResult": "runtime.execution.row_request",
    "RowsScored": "runtime.execution.requests",
    "STORED_DTYPES": "runtime.models.config",
    "SamplingConfig": "runtime.decoding.parameters",
    "Scheduler": "runtime.execution.scheduler",
    "SchedulerPolicy": "runtime.execution.policy",
    "SchedulerStats": "runtime.execution.scheduler_stats",
    "ScorePass": "runtime.execution.step_plan",
    "Seeds": "runtime.decoding.kinds",
    "StepOutcome": "runtime.execution.step_plan",
    "StepPlan": "runtime.execution.step_plan",
    "StopTest": "runtime.execution.requests",
    "TextStream": "runtime.text.completions",
    "TextTokenizer": "runtime.text.tokenizer",
    "UndecodableError": "runtime.text.tokenizer",
    "TokenIds": "runtime.decoding.kinds",
    "WEIGHT_MEMORY_SHARE": "sharding.mesh",
    "can_run": "runtime.decoding.compatibility",
    "check_draft_objectives": "runtime.execution.draft_models",
    "check_given": "runtime.decoding.schema",
    "check_ids": "runtime.execution.rows",
    "check_kind": "runtime.execution.rows",
    "check_request": "runtime.execution.rows",
    "check_row": "runtime.execution.rows",
    "compiled_values": "runtime.decoding.compatibility",
    "declared_parameters": "runtime.decoding.schema",
    "default_mesh": "runtime.planner.default",
    "default_steps": "runtime.execution.rows",
    "with_steps_for_masks": "runtime.execution.rows",
    "draft_model": "runtime.text.draft_checkpoint",
    "dependents": "runtime.decoding.schema",
    "encode_prompts": "runtime.text.tokenizer",
    "place_suffix": "runtime.text.tokenizer",
    "end_tokens": "runtime.text.tokenizer",
    "folder_fingerprint": "checkpoints.fingerprint",
    "model_layout": "runtime.models.families",
    "own_names": "runtime.decoding.schema",
    "open_draft": "runtime.text.draft_checkpoint",
    "parse_config": "runtime.models.families",
    "partition_spec": "runtime.models.declarations",
    "plain_number": "runtime.decoding.kinds",
    "read_rows": "runtime.execution.left_padding",
    "read_stop": "runtime.text.completions",
    "row_seed": "runtime.execution.rows",
    "row_seeds": "runtime.execution.rows",
    "shard_shape": "runtime.models.declarations",
    "step_limit": "runtime.execution.pool_shape",
    "stop_tests": "runtime.text.completions",
    "tensor_sizes": "runtime.models.declarations",
    "JsonObjectError": "checkpoints.local_files",
    "lock": "checkpoints.local_files",
    "parse_json_object": "checkpoints.local_files",
    "parse_json_objects": "checkpoints.local_files",
    "replace_file": "checkpoints.local_files",
    "unpadded_rows": "runtime.execution.left_padding",
    "uses_cache": "runtime.execution.pool_shape",
    "weight_bytes": "runtime.execution.runner",
    "with_model_blocks": "runtime.execution.rows",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
