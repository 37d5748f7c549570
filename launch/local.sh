#!/usr/bin/env bash
# Makes the environment and trains on this machine: launch/local.sh --config latte_tiny [--SECTION.FIELD VALUE …]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
make_environment requirements.txt
exec "$venv/bin/latte" train "$@"
