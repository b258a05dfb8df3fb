#!/usr/bin/env bash
# Commands for the hosts of a TPU VM slice, all at once, with one log.
#
#   export TPU_NAME=my-slice ZONE=us-central1-a          # and PROJECT, if it is not gcloud's own
#   launch/cluster/tpu-vm.sh setup diffumesh-0.1.0-py3-none-any.whl
#   launch/cluster/tpu-vm.sh run doctor
#   launch/cluster/tpu-vm.sh run generate --checkpoint=gs://BUCKET/model --mesh=data=4,tensor=4 --prompt='...' --json
#   launch/cluster/tpu-vm.sh follow                      # a run that goes on without this script: show it from its start
#   launch/cluster/tpu-vm.sh stop                        # SIGTERM: finish work in flight
#
# Of host 0, standard output goes to standard output; everything else goes to standard error and to LOG (diffumesh.log)
# with the name of its host in front. A run that asks for a restart (exit code 42) is started again MAX_RESTARTS times
# at most, and not after `stop`. `stop` writes LOG.stop, so call it in the same folder with the same LOG. The exit
# code is the worst of all hosts. DRY_RUN=1 prints the gcloud commands instead.
#
# The command is detached from its connection: each host keeps its log and its exit code in ~/.diffumesh-runs, and holds a
# lock, so that a second run is refused (exit code 2). A lost connection is made again, RECONNECTS times in a row at most
# with RECONNECT_SECONDS between two attempts, and goes on where the other one ended; after that, the exit code is 255.
set -uo pipefail

LOG=${LOG:-diffumesh.log}
MAX_RESTARTS=${MAX_RESTARTS:-5}
RECONNECTS=${RECONNECTS:-20}
RECONNECT_SECONDS=${RECONNECT_SECONDS:-15}
ENVIRONMENT="\$HOME/diffumesh"
EXTRAS=${EXTRAS:-tpu,gcs,serve} # of the package, which setup installs
SECRET=diffumesh-hosts.secret # with which the hosts authenticate each other; setup writes it to every home folder

# The programs below run on the hosts. Each host has a folder of its own, even where they share a home.
# shellcheck disable=SC2016
HERE='umask 077; name=$(hostname); place=$HOME/.diffumesh-runs/$name; mkdir -p "$place"; exec 8>>"$place/lock"
'
# Detached: run "$@" as the run in the folder $1. The log marks each line with the host and the stream.
# shellcheck disable=SC2016
JOB='run=$1; shift
mkdir "$run" 2>/dev/null || exit 0 # started through a connection that was lost before it said so
name=$(hostname)
exec 4>>"$run/log"
mark() { sed -u "s/^/$1[$name] /" >&4; }
if flock -w 60 8; then # the processes of a run before this one may still be ending
  ln -sfn "$run" "${run%/*}/current"
  find "${run%/*}" -mindepth 1 -maxdepth 1 -type d -mtime +7 -exec rm -r {} +
  { "$@" 2>&3 3>&- 4>&- | mark "out "; exit "${PIPESTATUS[0]}"; } 3>&1 | mark "log "
  code=${PIPESTATUS[0]}
else
  echo "another run is under way on this host" | mark "log "
  code=2
fi
[ -z "$(tail -c 1 "$run/log")" ] || echo >&4 # the last line of the program may have no end
echo "exit [$name] $code" >&4
echo "$code" >"$run/code"
'
# Print the log of the run in $run after its first $seen lines, until the run has ended: each line with its number in
# front and END behind it. gcloud starts this again, in the same stream, when a connection is lost.
END=$(printf '\036')
# shellcheck disable=SC2016
FOLLOW='over=
echo
while [ -z "$over" ]; do
  if [ -e "$run/code" ]; then
    over=ended
  elif flock -n 8; then # no process of the run holds it
    flock -u 8
    sleep 1
    if [ ! -e "$run/code" ] && flock -n 8; then over=lost; fi
  fi
  lines=$(cat "$run/log" 2>/dev/null | wc -l)
  if [ "$lines" -gt "$seen" ]; then
    tail -n "+$((seen + 1))" "$run/log" | head -n "$((lines - seen))" | sed "s/\$/$(printf "\036")/" |
      nl -ba -w1 -s" " -v"$((seen + 1))" || exit
    seen=$lines
  fi
  [ -n "$over" ] || sleep 0.5
done
if [ "$over" = lost ]; then
  end=$(printf "\036")
  echo "$((seen + 1)) log [$name] the processes of the run have disappeared$end"
  echo "$((seen + 2)) exit [$name] 42$end"
fi
exit 0'

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0" >&2
  exit 2
}

on_all_hosts() { on_hosts all "$1"; }

# Run command $2 on the hosts that $1 names: all, or the number of one.
on_hosts() {
  # A connection that is dead without having been closed ends after a minute.
  local command=(gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"}
    --worker="$1" --ssh-flag="-o ServerAliveInterval=15" --ssh-flag="-o ServerAliveCountMax=4" --command="$2")
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
    python3 -m uv pip install --quiet --python $ENVIRONMENT/bin/python './${wheel}[$EXTRAS]' &&
    $ENVIRONMENT/bin/diffumesh --version"
}

# Start run $1 with the other arguments, unless it has been started, and print the name of each host.
start_command() {
  local id=$1
  shift
  printf '%s' "$HERE" "run=\$place/$id
    [ ! -e \"\$HOME/$SECRET\" ] || export DIFFUMESH_HOSTS_SECRET_FILE=\"\$HOME/$SECRET\"
    nohup setsid bash -c $(printf '%q' "$JOB") job \"\$run\" \"$ENVIRONMENT/bin/diffumesh\" $(printf '%q ' "$@") \
      </dev/null >/dev/null 2>&1 &
    for ((tries = 0; tries < 100; tries++)); do
      [ ! -d \"\$run\" ] || { echo \"begun [\$name]\"; exit 0; }
      sleep 0.1
    done
    echo \"\$name: \$run cannot be made\" >&2; exit 1"
}

# Follow run $1, whose lines in LOG begin after line $2, from the first line of each host that is not there yet.
follow_command() {
  local seen
  seen=$(tail -n "+$(($2 + 1))" "$LOG" 2>/dev/null | awk 'match($0, /^(out |log |exit )\[[^]]*\]/) {
    host = substr($0, RSTART, RLENGTH); sub(/^[^[]*\[/, "", host); sub(/\]$/, "", host); lines[host]++ }
    END { for (host in lines) printf "%s) seen=%d ;; ", host, lines[host] }')
  printf '%s' "$HERE" "run=\$(readlink -f \"\$place/$1\"); seen=0; case \$name in ${seen}esac
" "$FOLLOW"
}

# A host has marked its lines with its name and stream; they are separated here. A line that was cut, or that has been
# passed on, is left out. One process for each host does this, so they take turns.
pass_on() {
  local line number last=0
  while IFS= read -r line; do
    number=${line%% *}
    if [[ $line != *"$END" || ! $number =~ ^[0-9]+$ || $number -le $last ]]; then continue; fi
    last=$number line=${line#* } line=${line%"$END"}
    {
      flock 7
      case $line in
        "out "*) printf '%s\n' "${line#*] }" ;;
        *) printf '%s\n' "${line#log }" >&2 ;;
      esac
      printf '%s\n' "$line" >&7
    } 7>>"$LOG"
  done
}

end_connections() {
  local group
  for group in $(jobs -p); do kill -- "-$group" 2>/dev/null; done
}

# Follow run $1 on all hosts, until each has ended or its connection is lost. Through one connection for all hosts, a
# line of one could arrive within a line of another.
follow_all() {
  local command worker count
  command=$(follow_command "$1" "$2")
  count=$(wc -w <<<"$hosts")
  trap end_connections EXIT
  set -m # each host's connection is a process group, which ends with this script
  for ((worker = 0; worker < count; worker++)); do
    on_hosts "$worker" "$command" | pass_on &
  done
  set +m
  wait
}

# Wait before connecting again for the $1th time; fail if that has been tried often enough.
try_again() {
  if [[ $1 -gt $RECONNECTS ]]; then
    echo "no connection to all hosts; the run may go on: \`follow\` shows it, \`stop\` ends it" >&2
    return 1
  fi
  echo "a connection is lost, and the run goes on; connecting again ($1 of $RECONNECTS)" >&2
  sleep "$RECONNECT_SECONDS"
}

# Run a command on all hosts until each of them has printed that the run has begun; set hosts to their names.
find_hosts() {
  local said failures=0
  until said=$(on_all_hosts "$1"); do
    try_again $((++failures)) || return 255
  done
  hosts=$(sed -n 's/^begun \[\(.*\)\]$/\1/p' <<<"$said" | sort -u)
  [[ -n $hosts ]]
}

# Pass on the lines of run $1, which begin after line $2 of LOG, until all hosts have ended; return the worst exit code.
attach() {
  local failures=0 lines host waiting
  while :; do
    lines=$(wc -l <"$LOG")
    follow_all "$1" "$2"
    waiting=
    for host in $hosts; do
      tail -n "+$(($2 + 1))" "$LOG" |
        awk -v end="exit [$host] " 'index($0, end) == 1 { found = 1 } END { exit !found }' || waiting=$host
    done
    if [[ -z $waiting ]]; then return "$(tail -n "+$(($2 + 1))" "$LOG" | worst_code)"; fi
    if [[ $(wc -l <"$LOG") -gt $lines ]]; then failures=0; fi
    try_again $((++failures)) || return 255
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
  local restart id code before busy check="$HERE flock -n 8 || echo \"busy [\$name]\"; exit 0"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    on_all_hosts "$check"
    on_all_hosts "$(start_command ID "$@")"
    on_all_hosts "$(follow_command ID 0)"
    return 0
  fi
  busy=$(on_all_hosts "$check") || return
  busy=$(sed -n 's/^busy \[\(.*\)\]$/\1/p' <<<"$busy" | sort | paste -sd ' ' -)
  if [[ -n $busy ]]; then
    echo "error: a run is under way on $busy: \`follow\` shows it, \`stop\` ends it" >&2
    return 2
  fi
  rm -f "$LOG.stop"
  trap 'echo "the run goes on: \`follow\` shows it, \`stop\` ends it" >&2; exit 130' INT
  for ((restart = 0; ; restart++)); do
    touch "$LOG"
    before=$(wc -l <"$LOG")
    id=$(date +%s)-$$-$restart
    find_hosts "$(start_command "$id" "$@")" || return 255
    attach "$id" "$before"
    code=$?
    if [[ $code -ne 42 || $restart -ge $MAX_RESTARTS ]]; then return "$code"; fi
    if [[ -e $LOG.stop ]]; then
      echo "stopped: not started again" >&2
      return "$code"
    fi
    echo "exit code 42: starting again (restart $((restart + 1)) of $MAX_RESTARTS)" >&2
  done
}

follow() {
  local begun="$HERE [ ! -e \"\$place/current\" ] || echo \"begun [\$name]\"; exit 0"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    on_all_hosts "$begun"
    on_all_hosts "$(follow_command current 0)"
    return 0
  fi
  touch "$LOG"
  hosts=
  local code=0
  find_hosts "$begun" || code=$?
  if [[ $code -eq 255 ]]; then return 255; fi
  if [[ -z $hosts ]]; then
    echo "error: there has been no run on these hosts" >&2
    return 2
  fi
  attach current "$(wc -l <"$LOG")"
}

[[ $# -ge 1 ]] || usage
: "${TPU_NAME:?the name of the slice}" "${ZONE:?the zone it is in}"
task=$1
shift
if [[ ${DRY_RUN:-0} != 1 && ($task == run || $task == follow) ]] && ! command -v flock >/dev/null; then
  echo "error: there is no flock here: use Linux, such as the Cloud Shell, or install it (brew install flock)" >&2
  exit 2
fi
case $task in
  setup) [[ $# -eq 1 && -f $1 ]] || usage && setup "$1" ;;
  run) [[ $# -ge 1 ]] || usage && run "$@" ;;
  follow) follow ;;
  stop)
    [[ ${DRY_RUN:-0} == 1 ]] || touch "$LOG.stop"
    # Once: a second signal ends the run at once, and gcloud repeats the command when a connection is lost. The oldest
    # Python that runs it is the supervisor; the shells around it are left alone.
    on_all_hosts "$HERE mark=\$place/stop-$(date +%s)-$$; mkdir \"\$mark\" 2>/dev/null || [ ! -d \"\$mark\" ] || exit 0
      pkill -TERM -o -u \$(id -u) -f 'bin/python[^ ]* [^ ]*/bin/diffumesh '"
    ;;
  *) usage ;;
esac
