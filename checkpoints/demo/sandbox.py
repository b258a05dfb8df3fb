"""Runs a generated function against its tests in a restricted child process.

The child has limits on processor time, memory, file size and number of processes. Its builtins have no imports and no
files, and an audit hook ends it if it opens, imports, connects to or starts anything. This prevents harm by mistakes of
a small model; it is not a defence against an attacker.
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

CPU_SECONDS = 2
WALL_SECONDS = 20.0
MEMORY_BYTES = 256 << 20

Outcome = Literal["passed", "wrong", "error", "syntax", "forbidden", "limit"]
_OUTCOMES: tuple[Outcome, ...] = ("passed", "wrong", "error", "syntax", "forbidden", "limit")

# The child writes this once its limits hold: what happens later is due to the generated code.
_BEGUN = "begun"

_ALLOWED = (
    "abs all any ascii bin bool bytes callable chr complex dict divmod enumerate filter float format "
    "frozenset getattr hasattr hash hex int isinstance issubclass iter len list map max min next oct ord pow "
    "range repr reversed round set slice sorted str sum tuple type zip None True False Exception "
    "ArithmeticError AssertionError AttributeError IndexError KeyError LookupError NameError OverflowError "
    "RuntimeError StopIteration TypeError ValueError ZeroDivisionError"
)

_CHILD = f"""
import builtins, json, os, resource, sys
work = json.load(sys.stdin)
allowed = {{name: getattr(builtins, name) for name in {_ALLOWED!r}.split()}}
allowed["print"] = lambda *args, **named: None
allowed["object"], allowed["__name__"] = object, "task"
write, leave, verdict = os.write, os._exit, work["verdict"]
def finish(outcome):
    write(1, (verdict + outcome).encode())
    leave(0)
code = []
try:
    for text in (work["code"], *work["tests"]):
        code.append(compile(text, "task", "exec"))
except (SyntaxError, ValueError, MemoryError, RecursionError):
    finish("syntax")
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
harmless = ("exec", "object.__getattr__", "builtins.id")
def audit(event, arguments):
    if event not in harmless:
        finish("forbidden")
space = {{"__builtins__": allowed}}
del builtins, json, os, resource, work
sys.addaudithook(audit)
write(1, (verdict + "{_BEGUN}").encode())
try:
    for part in code:
        exec(part, space)
except AssertionError:
    finish("wrong")
except MemoryError:
    finish("limit")
except BaseException:
    finish("error")
finish("passed")
"""


def run_tests(code: str, tests: Sequence[str]) -> Outcome:
    """Execute `code`, then each test, in a child process.

    Args:
      code: a function's source.
      tests: assert statements.

    Returns:
      `passed`; `wrong` when an assert failed; `error` when something raised; `syntax` when it does not compile;
      `forbidden` when it opened, imported or started something; `limit` when it took too much time or memory.

    Raises:
      RuntimeError: the child failed before it executed the code, for example because it may not set its limits.
    """
    verdict = secrets.token_hex(8)  # unpredictable, so output of the tested code is not taken for a verdict
    work = json.dumps({"code": code, "tests": list(tests), "verdict": verdict})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=work, capture_output=True, text=True, timeout=WALL_SECONDS, env={}, cwd="/", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "limit"
    # A signal before that is a limit that the compilation of the code reached.
    if verdict not in done.stdout and done.returncode >= 0:
        raise RuntimeError(f"the sandbox failed before it ran the code (exit code {done.returncode}): {done.stderr}")
    outcome = done.stdout.rpartition(verdict)[2] if verdict in done.stdout else ""
    return next((known for known in _OUTCOMES if outcome == known), "limit")
