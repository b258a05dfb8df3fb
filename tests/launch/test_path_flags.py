"""``--flag=~/file`` is a file in the home folder, although the shell leaves the ``~`` there."""

from __future__ import annotations

import importlib

import pytest
from absl import flags


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("batch", name) for name in ("input", "output_dir", "profile_dir", "dump_hlo")),
        *(("generate", name) for name in ("prompt_file", "history_html")),
        *(("plan", name) for name in ("plot", "dump_hlo")),
        ("serve", "api_key_file"),
    ],
)
def test_the_home_folder(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = flags.FlagValues()
    importlib.import_module(f"launch.{command}").define_flags(values)
    values([command, f"--{name}=~/some/file"])
    assert values[name].value in ("/home/me/some/file", ["/home/me/some/file"])


@pytest.mark.parametrize("path", ["~no-such-user/file", "a/~/file", "file~", "file"])
def test_any_other_path_stays_as_it_is(path: str) -> None:
    values = flags.FlagValues()
    importlib.import_module("launch.batch").define_flags(values)
    values(["batch", f"--output_dir={path}"])
    assert values.output_dir == path
