#!/usr/bin/env bash
# Makes the environment and checks everything, on the CPU; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
make_environment requirements.txt requirements-prepare.txt requirements-dev.txt
make_tpu_compiler
cd "$root"
export PATH=$venv/bin:$PATH JAX_PLATFORMS=cpu PYTHONPATH=$venv/libtpu
ruff check
ruff format --check
pyright
pytest -n 2 "$@"
