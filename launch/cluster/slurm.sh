#!/usr/bin/env bash
# A run on one or more multi-GPU hosts under Slurm: one process per host, with all of its GPUs.
#
#   sbatch --nodes=1 launch/cluster/slurm.sh generate --checkpoint=DIR --mesh=data=8 --prompt='...' --json
#   sbatch --nodes=2 launch/cluster/slurm.sh generate --checkpoint=DIR --mesh=data=16 --prompt_file=a.txt --json
#
# Results go to diffumesh-JOB.out, everything else to diffumesh-JOB.err. A run that asks for a restart (exit code 42) is
# requeued at most MAX_RESTARTS times; a run with a user error (2) is not. PYTHON names the interpreter.
#SBATCH --job-name=diffumesh
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --output=diffumesh-%j.out
#SBATCH --error=diffumesh-%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -uo pipefail

PYTHON=${PYTHON:-python3}
MAX_RESTARTS=${MAX_RESTARTS:-5}
if [[ $# -eq 0 ]]; then
  echo "usage: sbatch [--nodes=N] $0 COMMAND [--flags], such as: generate --checkpoint=DIR --prompt='...'" >&2
  exit 2
fi

# Ports for this job, in case two jobs share host 0: an even one for JAX, the next for the supervisors.
export JAX_COORDINATOR_PORT=$((20000 + 2 * (SLURM_JOB_ID % 20000)))

# Since Slurm 22.05, srun does not take this number from sbatch.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}

# The secret with which the hosts of this job authenticate each other; srun passes it on.
if [[ -z ${DIFFUMESH_HOSTS_SECRET_FILE:-} ]]; then
  DIFFUMESH_HOSTS_SECRET=${DIFFUMESH_HOSTS_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
  export DIFFUMESH_HOSTS_SECRET
fi

# A fault on one host ends the run on all hosts, so Slurm does not need to kill the others.
# No --label: with it, Slurm breaks lines of more than 1024 bytes, such as those of --json. Only host 0 prints results.
srun --kill-on-bad-exit=0 "$PYTHON" -m launch.main "$@"
code=$?

if [[ $code -eq 42 && ${SLURM_RESTART_COUNT:-0} -lt $MAX_RESTARTS ]]; then
  echo "exit code 42: requeued (restart $((${SLURM_RESTART_COUNT:-0} + 1)) of $MAX_RESTARTS)" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
