"""Run lm-evaluation-harness on a diffumesh model (`pip install -e '.[eval]'`).

  python -m launch.lm_eval_adapter run --model diffumesh --tasks gsm8k \
      --model_args checkpoint=apple/DiffuCoder-7B-Instruct,mesh=tensor=8,max_new_tokens=256,cache=dual

Everything after the module's name is the harness's own command line. Of --model_args, ``checkpoint``, ``mesh`` (axes
separated by semicolons), ``dtype``, ``quantize``, ``kv_cache``, ``lora``, ``slots``, ``seed``, ``mc_samples`` and
``add_bos_token`` are read here. ``batch_size``, ``max_batch_size`` and ``device`` are ignored. The others are decoding
parameters, which override those of a task. Exit code 2 means an invalid parameter.

On several hosts, start the same command on each. They find each other through their environment, as for other commands.
Every host takes part in every request; host 0 prints and writes the results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from absl import flags

from launch.hosts.preflight import digest, package_facts
from launch.process.startup import define_device_flags, fail, run_launcher, start_devices, this_host

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as missing:
    hint = f"the adapter needs lm-evaluation-harness ({missing}): pip install -e '.[eval]' in the checkout"
    if __name__ == "__main__":
        fail(hint)
    raise ImportError(hint) from missing

from launch.harness.model import HarnessModel
from runtime import InputError

# Its version decides what the harness asks, and what the answers count.
_PACKAGES = ("lm_eval",)
# The harness loads data and computes metrics without any progress of the devices, which may take hours.
_STALL_SECONDS = 1 << 20


def check_tasks(arguments: Sequence[str]) -> None:
    """Check that a command line of the harness which evaluates a model names tasks.

    Raises:
      InputError: it names none. The harness itself would end with a traceback.
    """
    if not arguments or arguments[0] in ("ls", "validate") or {"-h", "--help"} & set(arguments):
        return
    found = _parse(arguments)
    if arguments[1:] and not found.tasks and found.config is None:
        raise InputError("give --tasks=NAME,NAME; python -m launch.lm_eval_adapter ls tasks lists them")


def may_use_cache(arguments: Sequence[str]) -> bool:
    """Whether a command line of the harness, or the file that it names, may name a database of answers."""
    found = _parse(arguments)
    return found.use_cache is not None or found.config is not None


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    # allow_abbrev as in the harness, which also takes all options from a file.
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tasks", "-t", nargs="*")
    parser.add_argument("--config", "-C")
    parser.add_argument("--use_cache", "-c")
    return parser.parse_known_args(arguments)[0]


def main(values: flags.FlagValues) -> None:
    """Run the harness with its own command line."""
    check_tasks(sys.argv[1:])
    inputs = {"arguments": digest("\0".join(sys.argv[1:]))} | package_facts(_PACKAGES)
    start_devices(values, inputs, end_within=1.0)
    if this_host().count > 1 and may_use_cache(sys.argv[1:]):
        # Else the hosts would write the same database. Without one, the model sets it later.
        os.environ["LOCAL_RANK"] = str(this_host().process_index)
    cli_evaluate()
    # A host that has all answers in its database of --use_cache asks the model nothing. Others, which lack some, wait
    # for it, and here all notice that.
    this_host().gather("end of the harness", None)


def run() -> None:
    """Register the model ``diffumesh`` and run the harness, on one host or as one of several."""
    register_model("diffumesh")(HarnessModel)
    # All arguments are the harness's, so the cluster is described by the environment alone.
    run_launcher(main, define_device_flags, __doc__ or "", [sys.argv[0], f"--stall_timeout={_STALL_SECONDS}"])


if __name__ == "__main__":
    run()
