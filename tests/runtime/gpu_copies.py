"""Looks for copies of weights in programs for the GPU that is here, which chooses the kernels; run by itself."""

from __future__ import annotations

import sys

import jax

from tests.runtime.test_layer_copies import GPU, PROGRAMS, copies, gpu_options, lowered


def main() -> None:
    found = 0
    for program in PROGRAMS:
        for quantization in ("none", "int8"):
            layout, lowering = lowered(program, jax.devices("gpu"), "bfloat16", quantization, GPU)
            lines = copies(layout, lowering.compile(compiler_options=gpu_options(layout)).as_text() or "")
            print(f"{program}, weights {quantization}: {len(lines)} copies", *lines, sep="\n  ", flush=True)
            found += len(lines)
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
