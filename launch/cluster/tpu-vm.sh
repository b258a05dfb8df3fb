#!/usr/bin/env bash
# Commands for the hosts of a TPU VM slice, all at once, with one log.
#
#   export TPU_NAME=my-slice ZONE=us-central1-a          # and PROJECT, if it is not gcloud's own
#   launch/cluster/tpu-vm.sh setup diffumesh-0.1.0-py3-none-any.whl
#   launch/cluster/tpu-vm.sh run doctor
#   launch/cluster/tpu-vm.sh run generate --checkpoint=gs://BUCKET/model --mesh=data=4,tensor=4 --prompt='...' --json
#   launch/cluster/tpu-vm.sh stop                        # SIGTERM: finish work in flight
#
# Of host 0, standard output goes to standard output; everything else goes to standard error and to LOG (diffumesh.log)
# with the name of its host in front. A run that asks for a restart (exit code 42) is started again MAX_RESTARTS times
# at most, and not after `stop`. `stop` writes LOG.stop, so call it in the same folder with the same LOG. The exit
# code is the worst of all hosts. DRY_RUN=1 prints the gcloud commands instead.
set -uo pipefail

LOG=${LOG:-diffumesh.log}
MAX_RESTARTS=${MAX_RESTARTS:-5}
ENVIRONMENT="\$HOME/diffumesh"
SECRET=diffumesh-hosts.secret # with which the hosts authenticate each other; setup writes it to every home folder

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

on_all_hosts() {
  local command=(gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"}
    --worker=all --command="$1")
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}" </dev/null
  fi
}

copy_to_all_hosts() {
  local command=(gcloud compute tpus tpu-vm scp "$1" "$TPU_NAME:" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"}
    --worker=all)
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}" </dev/null
  fi
}

setup() {
  local wheel made
  wheel=$(basename "$1")
  copy_to_all_hosts "$1" || return
  made=$(mktemp -d) || return # readable by its owner alone
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$made/$SECRET" && chmod 600 "$made/$SECRET" &&
    copy_to_all_hosts "$made/$SECRET"
  local copied=$?
  rm -r "$made"
  [[ $copied -eq 0 ]] || return "$copied"
  # The image's own Python may be too old; uv brings one.
  on_all_hosts "python3 -m pip install --quiet --user uv &&
    python3 -m uv venv --quiet --allow-existing --python 3.12 $ENVIRONMENT &&
    chmod 600 $SECRET &&
    python3 -m uv pip install --quiet --python $ENVIRONMENT/bin/python '${wheel}[tpu]' &&
    $ENVIRONMENT/bin/diffumesh --version"
}

run_once() {
  local arguments
  arguments=$(printf '%q ' "$@")
  # Each host marks its lines with its name and stream; they are separated here.
  # shellcheck disable=SC2016
  on_all_hosts "set -o pipefail
    [ ! -e \"\$HOME/$SECRET\" ] || export DIFFUMESH_HOSTS_SECRET_FILE=\"\$HOME/$SECRET\"
    mark() { sed -u \"s/^/\$1[\$(hostname)] /\"; }
    { $ENVIRONMENT/bin/diffumesh $arguments 2>&3 | mark 'out '; } 3> >(mark 'log ')
    code=\$?; sleep 0.2; echo \"exit [\$(hostname)] \$code\"; exit 0" |
    while IFS= read -r line; do
      case $line in
        "out "*) echo "${line#*] }" ;;
        *) echo "${line#log }" >&2 ;;
      esac
      echo "$line" >>"$LOG"
    done
}

# 2 (a user's error) is worse than anything, then what is neither 0 nor 42.
worst_code() {
  awk '/^exit \[/ { found = 1; code = $NF
         rank = code == 0 ? 0 : code == 42 ? 1 : code == 2 ? 3 : 2
         if (rank >= worst) { worst = rank; result = code } }
       END { print found ? result : 255 }'
}

run() {
  local restart code before
  rm -f "$LOG.stop"
  for ((restart = 0; ; restart++)); do
    touch "$LOG"
    before=$(wc -l <"$LOG")
    run_once "$@"
    if [[ ${DRY_RUN:-0} == 1 ]]; then return 0; fi
    code=$(tail -n "+$((before + 1))" "$LOG" | worst_code)
    if [[ $code -ne 42 || $restart -ge $MAX_RESTARTS ]]; then return "$code"; fi
    if [[ -e $LOG.stop ]]; then
      echo "stopped: not started again" >&2
      return "$code"
    fi
    echo "exit code 42: starting again (restart $((restart + 1)) of $MAX_RESTARTS)" >&2
  done
}

[[ $# -ge 1 ]] || usage
: "${TPU_NAME:?the name of the slice}" "${ZONE:?the zone it is in}"
task=$1
shift
case $task in
  setup) [[ $# -eq 1 && -f $1 ]] || usage && setup "$1" ;;
  run) [[ $# -ge 1 ]] || usage && run "$@" ;;
  stop)
    [[ ${DRY_RUN:-0} == 1 ]] || touch "$LOG.stop"
    # The oldest Python that runs it is the supervisor; the shells around it are left alone.
    on_all_hosts "pkill -TERM -o -u \$(id -u) -f 'bin/python[^ ]* [^ ]*/bin/diffumesh '"
    ;;
  *) usage ;;
esac
