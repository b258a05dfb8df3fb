"""Compare all hosts before any device is used: versions, code, flags, inputs and devices must be the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.hosts.faults import HostsDifferError, host_name
from launch.hosts.host import Host
from launch.hosts.messages import printable
from launch.hosts.place import define_place_flags
from launch.hosts.supervisor import BEGUN

Facts = dict[str, str]

_CUDA_PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_PACKAGES = ("diffumesh", "jax", "jaxlib", "libtpu", *_CUDA_PACKAGES, "flax", "numpy", "transformers", "tokenizers")
_SOURCES = ("launch", "runtime", "checkpoints", "sharding")
_MAX_FLAG_TEXT = 200

# Flags in which hosts may differ, besides the flags of their position: output and local files.
_OWN_FLAGS = ("compile_cache", "history_html", "json")


def code_digest() -> str:
    """Return a digest of the source code on this host, which differs if the hosts have different code."""
    root = Path(__file__).parent.parent.parent
    state = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            state.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:12]


def version_facts() -> Facts:
    """Return the versions of Python, the code and the packages on this host."""
    return {"python": platform.python_version(), "code": code_digest()} | package_facts(_PACKAGES)


def package_facts(packages: Iterable[str]) -> Facts:
    """Return the versions of these packages on this host, without those that are not installed."""
    facts = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def flag_facts(values: flags.FlagValues) -> Facts:
    """Return the flags that do not have their default values, except those in which hosts may differ."""
    own = flags.FlagValues()
    define_place_flags(own)
    return {
        f"--{name}": text if len(text) <= _MAX_FLAG_TEXT else f"{text[:_MAX_FLAG_TEXT]}... {digest(text)}"
        for name in sorted(values)
        if name not in own and name not in _OWN_FLAGS and values[name].value != values[name].default
        for text in [str(values[name].value)]
    }


def memory_facts() -> dict[str, float]:
    """Return the free memory and disk space of this host in gigabytes; hosts may differ in them."""
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    try:
        home = Path.home()
    except RuntimeError:  # the user has no home folder
        home = Path("/")
    free = shutil.disk_usage(home if home.exists() else Path("/")).free
    return {
        "free memory, GB": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "free disk, GB": round(free / 1e9, 1),
    }


def device_facts() -> tuple[Facts, dict[str, float]]:
    """Return facts about this host's devices: those that must be the same on every host, and those that may differ."""
    devices = jax.local_devices()
    same = {"devices": f"{len(devices)} x {devices[0].device_kind}", "all devices": str(jax.device_count())}
    stats = [stats for device in devices if (stats := device.memory_stats())]
    free = [one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats if "bytes_limit" in one]
    return same, {"free device memory, GB": round(min(free) / 1e9, 2)} if free else {}


def digest(text: str | bytes) -> str:
    """Return a short digest, for comparisons and messages."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


class Difference(NamedTuple):
    """A fact in which hosts differ from the majority (without a majority, from host 0).

    Attributes:
      text: a sentence that names the hosts, the fact and its values.
      hosts: process indices of the hosts.
    """

    text: str
    hosts: list[int]


def differences(facts: Sequence[Facts], names: Sequence[str]) -> list[Difference]:
    """Find the facts in which hosts differ.

    Args:
      facts: the facts of each host, by process index.
      names: the name of each host, for the sentences.
    """
    found = []
    for key in dict.fromkeys(key for one in facts for key in one):
        said = [one.get(key, "(not given)") for one in facts]
        counts = Counter(said).most_common(2)
        if len(counts) < 2:
            continue
        common = counts[0][0] if counts[0][1] > counts[1][1] else said[0]
        for value in dict.fromkeys(value for value in said if value != common):
            hosts = [process_index for process_index, own in enumerate(said) if own == value]
            who = ", ".join(names[process_index] for process_index in hosts)
            found.append(Difference(f"{key} is {value} on {who}, and {common} on the others", hosts))
    return found


def table(facts: Sequence[Facts], free: Sequence[Mapping[str, float]], names: Sequence[str]) -> Table:
    """Return a table with a column for each group of hosts with equal facts; free memory is shown as a range."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for host, one in enumerate(facts):
        groups.setdefault(tuple(sorted(one.items())), []).append(host)
    made = Table(box=box.SIMPLE_HEAD, title=f"{len(facts)} hosts")
    made.add_column("")
    for hosts in groups.values():
        made.add_column(_cell(names[hosts[0]] if len(hosts) == 1 else _ranges(hosts)), overflow="fold")
    for key in dict.fromkeys(key for one in facts for key in one):
        made.add_row(_cell(key), *(_cell(facts[hosts[0]].get(key, "")) for hosts in groups.values()))
    for key in dict.fromkeys(key for one in free for key in one):
        made.add_row(
            _cell(key), *(_span([free[host][key] for host in hosts if key in free[host]]) for hosts in groups.values())
        )
    return made


def _cell(text: str) -> Text:
    """Return a cell that shows a host's text literally: brackets are no markup, and control characters are escaped."""
    return Text(printable(text))


def _span(values: Sequence[float]) -> str:
    if not values or min(values) == max(values):
        return f"{values[0]:g}" if values else ""
    return f"{min(values):g} to {max(values):g}"


def _ranges(hosts: Sequence[int]) -> str:
    """Describe hosts as ranges, such as ``hosts 0-3, 5``."""
    parts: list[list[int]] = []
    for host in hosts:
        if parts and host == parts[-1][-1] + 1:
            parts[-1].append(host)
        else:
            parts.append([host])
    return "hosts " + ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def check(host: Host, values: flags.FlagValues, inputs: Mapping[str, str], show: Callable[[Table], None]) -> None:
    """Compare all hosts, before devices are used and again when each host knows its devices.

    Args:
      host: this host.
      values: the flags.
      inputs: digests of this host's inputs by name, for example of the checkpoint.
      show: prints the table, on host 0 only.

    Raises:
      HostsDifferError: hosts differ; the message names them and the difference.
    """
    if host.count == 1:
        return
    same = version_facts() | flag_facts(values) | dict(inputs)
    said = host.gather("preflight", [platform.node(), same, memory_facts()])
    names = [host_name(process_index, name) for process_index, (name, _, _) in enumerate(said)]
    facts = [same for _, same, _ in said]
    free = [free for _, _, free in said]
    if problems := differences(facts, names):
        show(table(facts, free, names))
        raise _differ("the hosts do not agree:\n  ", "\n  ", problems)
    found = host.gather(BEGUN, device_facts())
    facts = [before | after for before, (after, _) in zip(facts, found, strict=True)]
    show(table(facts, [before | after for before, (_, after) in zip(free, found, strict=True)], names))
    if problems := differences(facts, names):
        raise _differ("the hosts do not agree:\n  ", "\n  ", problems)


def _differ(beginning: str, separator: str, problems: Sequence[Difference]) -> HostsDifferError:
    hosts = (process_index for problem in problems for process_index in problem.hosts)
    return HostsDifferError(beginning + separator.join(problem.text for problem in problems), hosts)


def agree(host: Host, topic: str, facts: Facts, beginning: str) -> None:
    """Compare facts of all hosts during a run. Every host makes this call.

    Args:
      host: this host.
      topic: the name of the comparison, the same on all hosts.
      facts: facts of this host by name.
      beginning: the beginning of the message if they differ.

    Raises:
      HostsDifferError: hosts differ; the message names them and the difference.
    """
    if host.count > 1:
        _compare(host.gather(topic, facts), beginning)


def _compare(facts: Sequence[Facts], beginning: str) -> None:
    names = [host_name(process_index, None) for process_index in range(len(facts))]
    if problems := differences(facts, names):
        raise _differ(beginning, "; ", problems)


def agree_on_programs(host: Host) -> Callable[[Any], None]:
    """Make the function to call before each run of a program: hosts compare a new program before it is compiled.

    Returns:
      A function that takes the lowered program if it is new, and None otherwise.
    """

    def before_run(lowered: jax.stages.Lowered | None) -> None:
        host.mark()
        if lowered is None or host.count == 1:
            return
        prints = host.gather("program", digest(lowered.as_text()))
        _compare([{"the program": one} for one in prints], "the hosts are about to run different programs: ")

    return before_run


def print_table(made: Table) -> None:
    """Print a table on standard error."""
    console = Console(stderr=True)
    Console(stderr=True, width=console.width if sys.stderr.isatty() else 160).print(made)
