"""The public names of ``runtime``, ``runtime.planner`` and ``checkpoints`` are imported on first use."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import checkpoints
import runtime
import runtime.planner

PACKAGES = [runtime, runtime.planner, checkpoints]
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)


def statements(package: ModuleType) -> list[ast.stmt]:
    """The top-level statements of a package's ``__init__``."""
    assert package.__file__ is not None
    return ast.parse(Path(package.__file__).read_text(encoding="utf-8")).body


def homes(package: ModuleType) -> dict[str, str]:
    """The table that maps each name to the module it is imported from."""
    for node in statements(package):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package.__name__} has no table of names")


def declared(package: ModuleType) -> dict[str, str]:
    """The module of each name that is imported under ``if TYPE_CHECKING:``, for type checkers."""
    blocks = [node for node in statements(package) if isinstance(node, ast.If)]
    (block,) = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


@each_package
def test_every_public_name_is_there(package: ModuleType) -> None:
    for name in package.__all__:
        found = getattr(package, name)
        assert found is getattr(importlib.import_module(homes(package)[name]), name)
        assert not isinstance(found, ModuleType), f"{name}: a module hides the public name"


@each_package
def test_types_and_table_name_the_same(package: ModuleType) -> None:
    assert homes(package) == declared(package)
    assert sorted(homes(package)) == sorted(package.__all__)


@each_package
def test_no_module_has_the_name_of_a_public_name(package: ModuleType) -> None:
    # Once a module is imported, Python sets it as an attribute of its package, which hides an entry of the table.
    (folder,) = package.__path__
    modules = {path.stem for path in Path(folder).iterdir()}
    assert "__init__" in modules
    assert not modules & set(package.__all__)


@each_package
def test_no_other_name_is(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = package.Motor


@each_package
def test_importing_the_package_imports_no_framework(package: ModuleType) -> None:
    code = f"import sys, {package.__name__}; print([one for one in ('jax', 'numpy') if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
