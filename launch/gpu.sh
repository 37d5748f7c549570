#!/usr/bin/env bash
# Trains on GPUs: those of this host, or of a Slurm allocation when called inside one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: launch/gpu.sh --config NAME_OR_PATH [--dry-run] [--SECTION.FIELD VALUE …]

Makes the environment and trains on the GPUs of this host. Inside a Slurm allocation (sbatch, salloc)
it trains on those of all its nodes, a process each; environment and run directory must be on a file
system that the nodes share.

  --dry-run   print every command and run none

What follows goes to \`latte train\`, which lists the settings with --help."

refuse() {
  echo "latte: $1" >&2
  exit 2
}

# JAX reads the processes' places from Slurm, and gives each the GPU of its number on its node; so
# each must see all GPUs of the node.
slurm_command() {
  local gpus=${SLURM_GPUS_ON_NODE:-} nodes=${SLURM_JOB_NUM_NODES:-1}
  [ -n "$gpus" ] || refuse "the Slurm job $SLURM_JOB_ID has no GPUs; ask for them, as in --gpus-per-node=8"
  command=(srun --kill-on-bad-exit=1 --nodes="$nodes" --ntasks="$((nodes * gpus))"
    --ntasks-per-node="$gpus" --gpu-bind=none --export=ALL,LATTE_PROCESSES=auto "${command[@]}")
}

dry_run=
arguments=()
for word in "$@"; do
  case $word in
    -h | --help) echo "$usage" && exit ;;
    --dry-run) dry_run=1 ;;
    *) arguments+=("$word") ;;
  esac
done
[[ " ${arguments[*]-} " == *" --config"[\ =]* ]] ||
  refuse "--config is missing; name a config of configs/ or the path of a .py file"

command=("$venv/bin/latte" train "${arguments[@]}")
if [ "${SLURM_JOB_ID:-}" ]; then
  slurm_command
elif [ -z "$dry_run" ]; then
  nvidia-smi -L >/dev/null 2>&1 ||
    refuse "no NVIDIA GPU answers to \`nvidia-smi -L\` here; launch/local.sh trains on the CPU"
fi
if [ "$dry_run" ]; then
  echo "make_environment requirements.txt requirements-cuda.txt"
  echo "${command[*]@Q}"
  exit
fi
make_environment requirements.txt requirements-cuda.txt
exec "${command[@]}"
