"""The order of collectives is the same on all hosts.

XLA's CPU runtime starts the collectives of a program in program order, but a loop or conditional that contains
collectives counts as started when its first instruction is. A collective beside it, which neither needs its result nor
provides its input, then runs concurrently, and two hosts may pair different collectives. So a data dependency has to
order them. Programs for CPU unroll their layers; a scan over them, which CPU hosts never run, would be such a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime import DiffusionConfig, Engine, RowRequest, SamplingConfig
from runtime.planner.hlo import Instruction, read_collective, read_module
from tests import golden_cases
from tests.runtime.decoding import block_rows

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

# Partitions of the first replica group; None stands for any.
Group = tuple[int, ...] | None


def nested(instruction: Instruction) -> Sequence[str]:
    return [*instruction.called.values(), *instruction.branches]


def concurrent(text: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of instructions with collectives, one of them nested, that no data dependency orders.

    Collectives of different groups of devices use different connections and cannot be paired with each other. The
    devices of a permutation may be any.
    """
    computations = read_module(text).computations

    @functools.cache
    def inside(computation: str) -> frozenset[Group]:
        return frozenset().union(*map(groups, computations.get(computation, ())))

    def groups(one: Instruction) -> frozenset[Group]:
        if one.operation.startswith("collective-permute"):
            return frozenset([None])
        if one.operation.startswith(COLLECTIVES):
            return frozenset([read_collective(one).group or None])
        return frozenset().union(*map(inside, nested(one)))

    for instructions in computations.values():
        needs: dict[str, frozenset[str]] = {}
        found: list[Instruction] = []
        for one in instructions:
            needs[one.name] = frozenset(one.operands).union(*(needs.get(name, ()) for name in one.operands))
            if not groups(one):
                continue
            for other in found:
                flat = all(each.operation.startswith(COLLECTIVES) for each in (one, other))
                together = groups(one) & groups(other) or None in groups(one) | groups(other)
                if together and not flat and other.name not in needs[one.name]:
                    yield other.name, one.name
            found.append(one)


def test_pairs_without_a_dependency_are_found() -> None:
    text = """HloModule example

%body (carry: f32[4]) -> f32[4] {
  %carry = f32[4]{0} parameter(0)
  ROOT %sum.1 = f32[4]{0} all-reduce(%carry), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%condition (carry: f32[4]) -> pred[] {
  %carry.1 = f32[4]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (given: f32[4]) -> f32[4] {
  %given = f32[4]{0} parameter(0)
  %loop = f32[4]{0} while(%given), condition=%condition, body=%body
  %beside = f32[4]{0} all-reduce(%given), replica_groups={{0,1},{2,3}}, to_apply=%add
  %across = f32[4]{0} all-reduce(%given), replica_groups={{0,2},{1,3}}, to_apply=%add
  %after = f32[4]{0} all-reduce(%loop), replica_groups={{0,1},{2,3}}, to_apply=%add
  %both = f32[4]{0} add(%beside, %after)
  ROOT %all = f32[4]{0} add(%both, %across)
}
"""
    assert list(concurrent(text)) == [("loop", "beside")]


def engine_for_cpu(mesh: str, folder: Path = golden_cases.FOLDER) -> Engine:
    return golden_cases.engine(mesh, folder, scan=False)


def assert_ordered(engine: Engine) -> None:
    """Check all programs that an engine has compiled so far."""
    texts = engine.program_texts()
    assert not {name: found for name, text in texts.items() if (found := list(concurrent(text)))}
    assert any("all-reduce" in text for text in texts.values())


@pytest.mark.parametrize(
    ("mesh", "number"),
    [
        ("data=2", 1),
        *[
            pytest.param(mesh, number, marks=pytest.mark.slow)
            for mesh in ("data=2", "data=2,sequence=2,tensor=2")
            for number in range(len(block_rows.MODES))
            if (mesh, number) != ("data=2", 1)
        ],
    ],
)
def test_no_collectives_of_a_denoise_program_are_concurrent(mesh: str, number: int) -> None:
    engine = engine_for_cpu(mesh)
    engine.generate_tokens(*block_rows.ragged_rows(), block_rows.mode(number))
    assert_ordered(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,sequence=2,tensor=2"])
@pytest.mark.parametrize("golden", golden_cases.golden_folders({}), ids=lambda golden: golden.folder.name)
def test_no_collectives_of_a_family_are_concurrent(golden: golden_cases.Golden, mesh: str) -> None:
    engine = engine_for_cpu(mesh, golden.folder)
    for name in list(golden.cases)[:3]:
        engine.generate_tokens(*golden.inputs(name), golden.config(name))
    assert_ordered(engine)


DRAFTED: dict[str, tuple[str, DiffusionConfig]] = {
    "sampled": ("dream_tiny", block_rows.BASE),
    "frechet": ("dream_tiny", block_rows.BASE.replace(block_length=6, parallel="frechet", algorithm="maskgit_plus")),
    "guided": ("llada_tiny", DiffusionConfig(12, steps=8, algorithm="low_confidence", block_length=6, cfg_scale=1.5)),
    "dual": ("dream_tiny", block_rows.BASE.replace(block_length=6, cache="dual", refresh_blocks=2)),
    "prefix": ("dream_tiny", block_rows.BASE.replace(block_length=6, cache="prefix", suffix_window=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,sequence=2,tensor=2"])
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        (name, axis)
        for name in DRAFTED
        for axis in ("none", "data")
        if DRAFTED[name][1].cache == "none" or axis == "none"
    ],
)
def test_no_collectives_of_passes_with_drafts_are_concurrent(name: str, mesh: str, axis: str) -> None:
    folder, config = DRAFTED[name]
    engine = engine_for_cpu(mesh, golden_cases.FOLDER.parent / folder)
    config = config.replace(draft_steps=3, draft_axis=axis, log_probabilities=True)
    engine.generate_tokens(*block_rows.ragged_rows(), config)
    assert_ordered(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,sequence=2,tensor=2"])
def test_no_collectives_beside_the_search_for_a_threshold(mesh: str) -> None:
    """Log-probabilities and ``low_confidence`` reduce logits that do not need the search's result.

    So does the best token besides the mask token.
    """
    sampled: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "log_probabilities": True}
    autoregressive = engine_for_cpu(mesh, golden_cases.FOLDER.parent / "qwen3_tiny")
    autoregressive.generate_tokens([[5, 6, 7]] * 2, None, SamplingConfig(**sampled))
    llada = engine_for_cpu(mesh, golden_cases.FOLDER.parent / "llada_tiny")
    llada.generate_tokens([[5, 6, 7]] * 2, None, llada.published(**sampled, algorithm="low_confidence", steps=4))
    dream = engine_for_cpu(mesh)
    dream.generate_tokens([[5, 6, 7]] * 2, None, DiffusionConfig.fast_dllm(4, temperature=0.7, top_p=0.9))
    for engine in (autoregressive, llada, dream):
        assert_ordered(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,sequence=2,tensor=2"])
def test_no_collectives_of_passes_with_prompt_lookup_are_concurrent(mesh: str) -> None:
    engine = engine_for_cpu(mesh, golden_cases.FOLDER.parent / "qwen3_tiny")
    config = SamplingConfig(12, temperature=0.7, top_p=0.9, prompt_lookup=3, log_probabilities=True)
    engine.generate_tokens(*block_rows.ragged_rows(), config)
    assert_ordered(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,sequence=2,tensor=2"])
def test_no_collectives_of_a_model_and_its_draft_model_are_concurrent(mesh: str) -> None:
    folder = golden_cases.FOLDER.parent / "qwen3_tiny"
    engine = Engine.load(folder, mesh, draft=folder)
    config = SamplingConfig(12, temperature=0.7, top_p=0.9, draft_tokens=3, log_probabilities=True)
    engine.generate_tokens(*block_rows.ragged_rows(), config)
    # Rows that come later are read in chunks.
    requests = [RowRequest([5, 6, 7, *range(20, 20 + more)], config, more) for more in range(6)]
    assert sum(len(found) for found in engine.scheduler(requests, 2).run()) == len(requests)
    assert_ordered(engine)
