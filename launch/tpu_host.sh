#!/usr/bin/env bash
# One host's part of a pod's run; tpu.py calls it over SSH:
#   install           makes the environment
#   start ARGUMENT…   starts `latte ARGUMENT…`, detached, unless it runs
#   status            prints: running, done, stopped, failed, refused, crashed, lost or none;
#                     the lines of its log; its arguments
#   follow LINE       prints the log from a line on, each after its number from there, until the
#                     run ends
#   stop SECONDS      lets the run save and end; kills it after so long
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# lock, held while any process of the run lives; pid; log; arguments; result, once it has ended.
state=$root-run

install() {
  find_python >/dev/null 2>&1 || install_python
  make_environment requirements.txt requirements-tpu.txt
}

# The TPU images are Ubuntu 22.04: Python 3.10, and of 3.11 a release candidate. A host that has
# just booted may still be updating itself, hence the wait for apt's lock.
install_python() {
  local apt=(sudo DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600)
  sudo add-apt-repository --yes ppa:deadsnakes/ppa
  "${apt[@]}" update
  "${apt[@]}" install python3.12 python3.12-venv
}

is_running() {
  [ -e "$state/lock" ] && ! flock --nonblock "$state/lock" true
}

start() {
  mkdir -p "$state"
  exec 9>"$state/lock"
  flock --nonblock 9 || return 0
  rm -f "$state/result"
  echo "$*" >"$state/arguments"
  # The run inherits the lock, and is the leader of its own process group.
  nohup setsid bash "${BASH_SOURCE[0]}" supervise "$@" >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
}

supervise() {
  local status=0 before
  before=$(wc -l <"$state/log")
  trap : TERM # the run is asked to end, and this waits for it
  cd "$root"
  # JAX knows from the slice which hosts there are; tests, which have none, set it empty.
  export LATTE_PROCESSES=${LATTE_PROCESSES-auto}
  "$venv/bin/latte" "$@" || status=$?
  meaning "$status" "$before" >"$state/result.partial"
  mv "$state/result.partial" "$state/result"
}

# meaning STATUS BEFORE: how `latte train` ended. The last words in the log, after the BEFORE lines
# of earlier starts, tell a run that is over from one that was asked to stop, and a failure that
# would come again from a crash, such as another host's.
meaning() {
  local last
  last=$(tail --lines="+$(($2 + 1))" "$state/log" |
    grep -E '^(latte: |Traceback |asked to stop)' | tail -n 1 || true)
  case "$1:$last" in
    0:asked*) echo stopped ;;
    0:*) echo done ;;
    1:latte*" stops, and the same command goes on from the last checkpoint") echo crashed ;;
    1:latte*) echo failed ;;
    2:latte*) echo refused ;;
    *) echo crashed ;;
  esac
}

status() {
  local word=none
  if [ -e "$state/result" ]; then
    word=$(cat "$state/result")
  elif is_running; then
    word=running
  elif [ -e "$state/lock" ]; then
    word=lost
  fi
  if [ "$word" = none ]; then
    echo none 0
  else
    echo "$word $(wc -l <"$state/log") $(cat "$state/arguments")"
  fi
}

follow() {
  tail --pid="$(cat "$state/pid")" --sleep-interval=1 --lines="+$1" --follow "$state/log" |
    grep --line-buffered --line-number '' || true
}

stop() {
  is_running || return 0
  local group
  group=-$(cat "$state/pid")
  kill -TERM -- "$group" || true
  flock --timeout "$1" "$state/lock" true || kill -KILL -- "$group"
  flock --timeout 30 "$state/lock" true
}

"$@"
