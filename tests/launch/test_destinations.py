"""Files and folders that cannot be written at the end of a command are refused before anything runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from launch.process.destinations import check_folder, check_writable
from runtime import replace_file
from sharding.errors import InputError


def links(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "file").touch()
    (folder / "link_to_pipe").symlink_to("pipe")
    os.mkfifo(folder / "pipe")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("loop/x.html", "symbolic links"),
        ("loop", "symbolic links"),
        ("pipe", "that is a device, a pipe or a socket; name a file"),
        ("link_to_pipe", "that is a device, a pipe or a socket; name a file"),
        ("", "that is a folder; name a file"),
        ("none/x.html", "there is no such folder"),
        ("file/x.html", "there is no such folder"),
        (f"{'x' * 251}.html", "name too long"),
        ("/proc/x.html", "(cannot be written to|cannot write there)"),
    ],
)
def test_files_that_cannot_be(path: str, says: str, tmp_path: Path) -> None:
    links(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"(?i)^--flag={tmp_path / path}: .*{says}"):
        check_writable("flag", str(tmp_path / path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        with pytest.raises(InputError, match="a device, a pipe or a socket"):
            check_writable("flag", "socket")


@pytest.mark.parametrize("name", ["file", "new", "x" * 255, "é" * 127, "link"])
def test_files_that_can_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    check_writable("flag", str(tmp_path / name))
    replace_file(tmp_path / name, [b"new"])
    assert (tmp_path / name).read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", name}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("loop/x", "symbolic links"),
        ("loop", "symbolic links"),
        ("file", "that is a file; name a folder"),
        ("pipe", "that is a file; name a folder"),
        ("none/x", "there is no such folder"),
        ("file/x", "there is no such folder"),
        ("x" * 256, "name too long"),
        ("/proc/profile", "(cannot be written to|cannot write there)"),
        ("/proc", "(cannot be written to|cannot write there)"),
    ],
)
def test_folders_that_cannot_be(path: str, says: str, tmp_path: Path) -> None:
    links(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"(?i)^--flag={tmp_path / path}: .*{says}"):
        check_folder("flag", str(tmp_path / path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_is_created_for_what_follows(tmp_path: Path) -> None:
    for _ in range(2):
        check_folder("flag", str(tmp_path / "new"))
        assert not list((tmp_path / "new").iterdir())
    with pytest.raises(InputError, match="--flag is empty"):
        check_folder("flag", "")
