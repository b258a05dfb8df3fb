"""Installation: the files of the wheel, and an editable install that a user's folders of the same names do not hide."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import hatchling.build
import pytest

import diffumesh
import runtime

ROOT = Path(__file__).parents[1]
PACKAGES = {"checkpoints", "diffumesh", "launch", "runtime", "sharding"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files that ``pip install -e .`` puts into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.build.build_editable(str(folder))
    with zipfile.ZipFile(folder / name) as wheel:
        wheel.extractall(folder)
    return folder


def run_script(site: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a user's folder from another folder, with ``site`` as a site folder of Python."""
    script = folder / "script.py"
    start = f"import site; site.addsitedir({str(site)!r})\n"
    script.write_text(start + textwrap.dedent(code))
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=site, env=environment, timeout=120
    )


def make_folders(folder: Path, names: Sequence[str], *, packages: bool = False) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "model.safetensors").touch()
        if packages:
            (folder / name / "__init__.py").touch()


def test_editable_install_is_a_path_entry(site: Path) -> None:
    (entry,) = site.glob("*.pth")
    assert [Path(line) for line in entry.read_text("utf-8").splitlines()] == [ROOT]
    assert not list(site.glob("*.py")), "an import hook"


def test_folders_beside_a_script_are_in_nobodys_way(site: Path, tmp_path: Path) -> None:
    make_folders(tmp_path, sorted(PACKAGES))
    found = run_script(
        site,
        tmp_path,
        """
        import checkpoints, diffumesh, launch.main, sharding.mesh
        from runtime import Engine
        assert diffumesh.Engine is Engine
        print(checkpoints.__file__)
        print(sharding.mesh.__file__)
        """,
    )
    assert found.stderr == ""
    assert found.stdout.splitlines() == [str(ROOT / "checkpoints" / "__init__.py"), str(ROOT / "sharding" / "mesh.py")]


@pytest.mark.parametrize("name", ["checkpoints", "runtime"])
def test_a_package_of_the_same_name_is_named(site: Path, tmp_path: Path, name: str) -> None:
    make_folders(tmp_path, [name], packages=True)
    found = run_script(site, tmp_path, "import diffumesh")
    assert found.returncode == 1
    message = found.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: diffumesh requires its own package {name} ({ROOT / name})"), message
    assert str(tmp_path / name / "__init__.py") in message


def test_wheel_has_the_packages_and_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / hatchling.build.build_wheel(str(tmp_path))) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        scripts = wheel.read(f"diffumesh-{diffumesh.__version__}.dist-info/entry_points.txt").decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES, "benchmarks and tests stay outside"
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], capture_output=True, text=True, check=True).stdout
    assert {name for name in names if ".dist-info/" not in name} >= set(tracked.splitlines())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "launch.main:run" in scripts
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_source_distribution_has_what_builds_and_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / hatchling.build.build_sdist(str(tmp_path))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "benchmarks/report.py"} <= names
    assert {f"{package}/__init__.py" for package in PACKAGES} <= names


def test_diffumesh_has_every_public_name() -> None:
    assert diffumesh.__version__ == metadata.version("diffumesh")
    assert diffumesh.DiffusionConfig is runtime.DiffusionConfig
    assert {"Engine", "convert", "estimate_workload"} <= set(diffumesh.__all__)
    for name in diffumesh.__all__:
        assert getattr(diffumesh, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = diffumesh.Motor


def test_importing_diffumesh_imports_no_framework() -> None:
    code = "import sys, diffumesh; print([one for one in ('jax', 'numpy') if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("command", ["launch.main", "launch.generate", "launch.serve"])
def test_commands_say_that_they_do_not_run_on_windows(command: str) -> None:
    code = f"runpy.run_module({command!r}, run_name='__main__', alter_sys=True)"
    found = on_windows(code)
    said = "error: diffumesh runs on Linux and macOS; on Windows, use WSL\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", said)


def test_the_library_says_that_it_does_not_run_on_windows() -> None:
    said = on_windows("import diffumesh").stderr.splitlines()[-1]
    assert said == "ImportError: diffumesh runs on Linux and macOS; on Windows, use WSL"


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where Python says that this is Windows, and has no fcntl."""
    there = "import runpy, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; "
    return subprocess.run([sys.executable, "-c", there + code], capture_output=True, text=True, cwd=ROOT, timeout=60)
