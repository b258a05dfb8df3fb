#!/usr/bin/env bash
# Complete a file in the format of HumanEval+ and write samples for EvalPlus.
#   launch/docs/examples/evalplus.sh DIR [FLAGS of diffumesh batch]
# Without DIR/tasks.jsonl, two tasks with the fields of a HumanEval+ line are written there, to show the formats. With
# EvalPlus installed, its own tasks are written by
#   python -c 'from evalplus.data import get_human_eval_plus as get, write_jsonl; write_jsonl("DIR/tasks.jsonl", get().values())'
# and their samples are checked by
#   evalplus.evaluate --dataset humaneval --samples DIR/results/samples.jsonl
set -euo pipefail
folder=$1
shift
mkdir -p "$folder"
[[ -e $folder/tasks.jsonl ]] || cat > "$folder/tasks.jsonl" <<'TASKS'
{"task_id": "HumanEval/0", "prompt": "def is_even(number):\n", "entry_point": "is_even", "canonical_solution": "", "test": ""}
{"task_id": "HumanEval/1", "prompt": "def add(first, second):\n", "entry_point": "add", "canonical_solution": "", "test": ""}
TASKS
python -m launch.main batch --input="$folder/tasks.jsonl" --output_dir="$folder/results" --format=evalplus \
  --max_new_tokens=32 "$@"
cat "$folder/results/samples.jsonl"
