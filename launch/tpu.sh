#!/usr/bin/env bash
# Runs a config on a TPU pod until it is done: launch/tpu.sh --config latte_1b (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
python=$(find_python)
exec "$python" "$root/launch/tpu.py" "$@"
