"""Models of diffumesh in lm-evaluation-harness (`pip install -e '.[eval]'`).

  python -m launch.lm_eval_adapter run --model diffumesh --tasks gsm8k \
      --model_args checkpoint=apple/DiffuCoder-7B-Instruct,mesh=tensor=8,max_new_tokens=256,cache=dual

Everything after the module's name is the harness's own command line. Of --model_args, ``checkpoint``, ``mesh`` (axes
separated by semicolons), ``dtype``, ``quantize``, ``kv_cache``, ``slots``, ``seed`` and ``mc_samples`` are read here;
the others are decoding parameters, which override those of a task. The adapter runs in one process on the devices of
one machine. Exit code 2 means an invalid parameter.
"""

from __future__ import annotations

from launch.process.startup import fail
from launch.process.streams import prepare_streams

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as missing:
    hint = f"the adapter needs lm-evaluation-harness ({missing}): pip install 'diffumesh[eval]'"
    if __name__ == "__main__":
        fail(hint)
    raise ImportError(hint) from missing

from launch.harness.model import HarnessModel
from runtime import InputError


def run() -> None:
    """Register the model ``diffumesh`` and run the harness."""
    prepare_streams()
    register_model("diffumesh")(HarnessModel)
    try:
        cli_evaluate()
    except InputError as error:
        fail(str(error))


if __name__ == "__main__":
    run()
