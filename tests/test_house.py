"""Rules that no linter checks: modules and functions are short, and private names are not used from outside."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("sharding", "checkpoints", "runtime", "launch", "diffumesh", "benchmarks", "tests")
MAX_MODULE_LINES = 450
# The engine is the public interface; other modules do the work.
MAX_LINES = {"runtime/engine.py": 300}
MAX_FUNCTION_LINES = 60
# A command reads as a story: helpers are in the packages below launch.
MAX_COMMAND_LINES = 150
# Modules that parse JSON which this program itself wrote, and so need not check for duplicate keys or depth.
OWN_JSON = {
    "benchmarks/compile_phases.py": "arguments of a child process, in checkouts of any age",
    "benchmarks/gpu_passes/pass_generations.py": "commands from the process that started it, in checkouts of any age",
    "benchmarks/serve/generate_loop.py": "commands from the process that started it",
    "checkpoints/conversion.py": "texts that the processes of a conversion exchange",
    "checkpoints/manifest.py": "a text that was just made, in its parsed form",
    "checkpoints/processes.py": "texts that the processes of a conversion exchange",
    "launch/batches/facts.py": "values as they are read back from a file",
    "launch/hosts/host.py": "values as another host would receive them",
    "launch/serving/turns.py": "messages between the hosts of a server",
    "runtime/text/render_process.py": "requests from the process that started it, which imports nothing from here",
}

# Names with an underscore that belong to other projects, and why each is used.
FOREIGN_NAMES = {
    "os._exit": "documented: ends a process without waiting for its threads",
    "hashlib._Hash": "the type of a digest has no public name",
    "torch._foreach_copy_": "PyTorch's own optimizers copy lists of tensors so",
    "torch._foreach_lerp_": "PyTorch's own optimizers average lists of tensors so",
    "jax._src": "what JAX finds out about a cluster, and what its pickles call, has no public name",
    "np._core.multiarray._reconstruct": "pickles of numpy arrays name it",
    "np._core.numeric._frombuffer": "pickles of numpy arrays name it",
    "pickle._Pickler": "the pickler in Python writes other frames than the one in C",
}


@functools.cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Text and syntax tree of every module by its path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


def too_long(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Return the module, if it has too many lines, and those of its functions that do."""
    is_command = Path(name).parent == Path("launch")
    if text.count("\n") > MAX_LINES.get(name, MAX_COMMAND_LINES if is_command else MAX_MODULE_LINES):
        yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                yield f"{name}: {node.name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, with those of classes and attributes that methods set on ``self``."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def foreign_private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return line and text of every use of a private name that another module defines.

    Uses are attributes, imports, and names in calls such as ``setattr(place, "_name", value)`` or
    ``monkeypatch.setattr("module._name", value)``.
    """
    own = defined_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=module):
                for alias in node.names:
                    if any(map(is_private, f"{module}.{alias.name}".split("."))):
                        yield node.lineno, f"{module}.{alias.name}"
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function), args=[_, ast.Constant(value=str(name)), *_]
            ) if function in ("getattr", "setattr", "delattr", "hasattr") and is_private(name) and name not in own:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[ast.Constant(value=str(path)), *_]) if (
                any(map(is_private, path.split(".")))
            ):
                yield node.lineno, ast.unparse(node)


def is_allowed(used: str) -> bool:
    """Whether a name is one of ``FOREIGN_NAMES``, within one, or on the way to one."""
    return any(f"{used}.".startswith(f"{name}.") or name.startswith(f"{used}.") for name in FOREIGN_NAMES)


def test_modules_and_functions_are_short() -> None:
    found = [one for name, (text, tree) in modules().items() for one in too_long(name, text, tree)]
    assert not found
    assert set(MAX_LINES) <= set(modules())
    assert {"x.py", "x.py: f"} == set(too_long("x.py", *parsed("def f():\n" + 450 * "    1\n")))
    assert not list(too_long("x.py", *parsed("def f():\n" + 59 * "    1\n")))
    assert list(too_long("launch/x.py", *parsed(151 * "1\n"))) == ["launch/x.py"]


def test_json_from_outside_is_read_by_the_strict_reader() -> None:
    found = {
        name
        for name, (_, tree) in modules().items()
        if not name.startswith("tests/")
        and {"json.load", "json.loads"}
        & {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    }
    assert found == set(OWN_JSON)


def test_private_names_stay_private() -> None:
    found = [
        f"{name}:{line}: {used}"
        for name, (_, tree) in modules().items()
        for line, used in foreign_private_names(tree)
        if not is_allowed(used)
    ]
    assert not found, "\n".join(found)


def test_private_names_are_found() -> None:
    def names(text: str) -> list[str]:
        return [name for _, name in foreign_private_names(ast.parse(text))]

    for text in ("engine._runner", "from a import _b", "from a._b import c", "patch.setattr(a, '_b', 1)", "a._b.c()"):
        assert len(names(text)) == 1, text
    for text in ("self._runner", "a.__name__", "_b = 1\na._b", "def _f(): ...\na._f()", "class A:\n  _b = 1\na._b"):
        assert not names(text), text


def parsed(text: str) -> tuple[str, ast.Module]:
    return text, ast.parse(text)


def test_every_package_has_an_exhaustive_layers_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    exhaustive = {name for one in contracts if one.get("exhaustive") for name in one["containers"]}
    folders = [path.parent for path in map(Path, modules()) if path.name == "__init__.py" and path.parts[0] != "tests"]
    packages = {".".join(folder.parts) for folder in folders if len(list((ROOT / folder).glob("*.py"))) > 1}
    assert packages == exhaustive
