"""Comparison of hosts before a run, and which hosts the messages name."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from rich.console import Console

from checkpoints import DEMO, CheckpointFolder
from checkpoints.fingerprint import folder_fingerprint
from launch import generate
from launch.hosts.faults import HostsDifferError
from launch.hosts.host import Host
from launch.hosts.preflight import agree_on_programs, differences, flag_facts, table, version_facts
from runtime.execution.programs import ProgramCache

NAMES = [f"host {number}" for number in range(4)]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["a", "a", "a", "a"], []),
        (["b", "a", "a", "a"], ["host 0"]),
        (["a", "a", "b", "a"], ["host 2"]),
        (["a", "b", "b", "a"], ["host 1, host 2"]),  # without a majority, the others are compared with host 0
        (["a", "a", "b", "c"], ["host 2", "host 3"]),
    ],
)
def test_differences(said: list[str], named: list[str]) -> None:
    found = differences([{"jax": one, "same": "x"} for one in said], NAMES)
    assert [one.text.split(" on ")[1].removesuffix(", and a") for one in found] == named
    assert [", ".join(NAMES[process_index] for process_index in one.hosts) for one in found] == named


def test_what_one_host_was_not_given() -> None:
    assert differences([{"--steps": "8"}, {}, {}, {}], NAMES) == [
        ("--steps is 8 on host 0, and (not given) on the others", [0])
    ]


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_hosts_compare_the_packages_below_jax(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    below = [f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt", *(f"nvidia-{name}-cu{cuda[4:]}" for name in ("cudnn", "nccl"))]
    there = dict.fromkeys(["jax", "jaxlib", *below], "1.2")

    def version(package: str) -> str:
        if package not in there:
            raise metadata.PackageNotFoundError(package)
        return there[package]

    monkeypatch.setattr(metadata, "version", version)
    facts = version_facts()
    assert {name: facts[name] for name in facts if name not in ("python", "code")} == there
    there[f"nvidia-nccl-cu{cuda[4:]}"] = "1.3"
    (found,) = differences([facts, version_facts()], NAMES)
    assert found.text.startswith(f"nvidia-nccl-cu{cuda[4:]} is 1.3 on host 1")


def test_hosts_that_say_the_same_share_a_column() -> None:
    facts = [{"jax": "1"}] * 3 + [{"jax": "2"}]
    made = table(facts, [{"free, GB": float(number)} for number in range(4)], NAMES)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    text = console.export_text()
    assert "hosts 0-2" in text
    assert "0 to 2" in text
    assert len(made.columns) == 3


def test_texts_of_hosts_are_no_markup_and_no_control_sequences() -> None:
    """A prompt like this one ended every start on several hosts."""
    facts = [{"--prompt": "a [/b] c [i]", "\x1b[2Jkey": "\x9b2J"}, {"--prompt": "[bold]"}]
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(facts, [{"[u]": 1.0}, {}], ["host 0 (\x1b]0;x\x07)", "host 1 ([/i])"]))
    text = console.export_text()
    for shown in (
        "a [/b] c [i]",
        "\\x1b[2Jkey",
        "\\x9b2J",
        "[bold]",
        "[u]",
        "host 0 (\\x1b]0;x\\x07)",
        "host 1 ([/i])",
    ):
        assert shown in text
    assert all(one.isprintable() or one == "\n" for one in text)


def test_flags_that_count() -> None:
    values = flags.FlagValues()
    generate.define_flags(values)
    values(["generate", "--steps=8", "--compile_cache=", "--process_id=1", "--watch", "--prompt=" + "x" * 1000])
    facts = flag_facts(values)
    assert set(facts) == {"--steps", "--watch", "--prompt"}, "a watched run has other steps"
    assert len(facts["--prompt"]) < 300


class Pair(Host):
    """Simulates two hosts; a test sets what the other one sends."""

    count = 2

    def __init__(self, other: str | None) -> None:
        super().__init__()
        self.other, self.marks, self.said = other, 0, []  # type: ignore[var-annotated]

    def mark(self) -> None:
        self.marks += 1

    def gather(self, topic: str, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, self.other or value]


def run_program(host: Host) -> int:
    """Run a program three times through the engines' program cache, and return the number of compilations."""
    cache = ProgramCache()
    cache.before_run = agree_on_programs(host)
    for _ in range(3):
        cache.get("double", lambda: jax.jit(lambda x: 2 * x).lower(jnp.zeros(3)))
    return cache.compiled


def test_hosts_agree_on_a_program_before_it_is_compiled() -> None:
    host = Pair(None)
    assert run_program(host) == 1
    assert len(host.said) == 1
    assert host.marks == 3
    again = Pair(None)
    run_program(again)
    assert again.said == host.said, "the digest of a program does not change when it is lowered again"


def test_a_different_program_never_runs() -> None:
    with pytest.raises(HostsDifferError, match="host 1") as found:
        run_program(Pair("another"))
    assert found.value.hosts == [1]


def test_a_host_alone_agrees_with_itself() -> None:
    assert run_program(Host()) == 1


def test_fingerprint_sees_a_change_of_weights_and_of_configuration(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors")
    for name in names:
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    folder = CheckpointFolder(tmp_path, "copy")
    before = folder_fingerprint(folder)
    assert before == folder_fingerprint(folder)
    seen = {before}
    for name in names:
        data = bytearray((DEMO / name).read_bytes())
        data[-2] ^= 1
        (tmp_path / name).write_bytes(data)
        seen.add(folder_fingerprint(folder))
    assert len(seen) == 4
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to("nowhere")
    assert folder_fingerprint(folder) in seen, "neither is a file"
