#!/usr/bin/env bash
# Measure the 7.6B shape on one NVIDIA GPU, on a machine that is there for minutes.
#
#   benchmarks/gpu.sh FOLDER [OLD_CHECKOUT]
#
# Records, logs and programs go to FOLDER. PARTS selects parts and their order; each has a limit in seconds, and one that
# fails or is cut short does not stop the others. PYTHON names the interpreter, which needs JAX's CUDA plugin, PyTorch
# and transformers.
set -u -o pipefail

folder=$1
old=${2:-}
python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONUNBUFFERED=1

part() { # part NAME SECONDS COMMAND...
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  echo "== $name"
  timeout -s INT -k 30 "$seconds" "$@" 2>&1 | tee "$folder/$name.log"
  echo "== $name: exit code $? after $((SECONDS - begin)) s"
}

for one in ${PARTS:-check golden passes torch suite}; do
  case $one in
    check)
      nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
      part doctor 60 "$python" -m launch.doctor
      part generate 60 "$python" -m launch.generate --prompt='def is_even(number):' --verbose
      part attention 60 "$python" -m tests.runtime.models.gpu_attention
      part copies 120 "$python" -m tests.runtime.gpu_copies
      ;;
    golden) part golden "${GOLDEN_LIMIT:-3600}" "$python" -m tests.runtime.gpu_golden "${GOLDEN_SECONDS:-3600}" ;;
    passes)
      part passes "${PASSES_LIMIT:-900}" "$python" -m benchmarks.gpu_passes --output_dir="$folder" \
        --trials="${TRIALS:-5}" --profile_dir="$folder/traces" --dump_hlo="$folder/programs" ${old:+--old="$old"}
      ;;
    torch)
      # shellcheck disable=SC2086  # several flags
      part torch "${TORCH_LIMIT:-1800}" "$python" -m benchmarks.compare_torch --random=diffucoder-7b --dtype=bfloat16 \
        --output_dir="$folder" --record=compare_torch_gpu ${TORCH_FLAGS:---batch=1,8 --canvas=512,1024}
      ;;
    suite)
      # shellcheck disable=SC2086  # several flags
      part suite "${SUITE_LIMIT:-1800}" "$python" -m benchmarks.suite --random=diffucoder-7b \
        --budget="${SUITE_BUDGET:-1200}" --output_dir="$folder" ${SUITE_FLAGS:-}
      ;;
    *) echo "no part $one" >&2 && exit 2 ;;
  esac
done
