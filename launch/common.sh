# Sourced by the scripts beside it: makes .venv, with the pinned packages, where it is missing or old.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3 python; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "latte: Python 3.11 or newer, with its venv module, is needed; on Debian or Ubuntu run" \
    "\`apt-get install python3 python3-venv\`, elsewhere see https://www.python.org/downloads" >&2
  return 2
}

quiet_pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@"
}

# make_environment FILE… installs those requirements and this project. A copy of each file is left
# in the environment once it is installed, so that the next call has nothing to do.
make_environment() {
  local file stamp
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    local python
    python=$(find_python)
    echo "making the environment in $venv (a few minutes, once)"
    "$python" -m venv --clear "$venv"
  fi
  for file in "$@" pyproject.toml; do
    stamp=$venv/installed-$file
    cmp -s "$root/$file" "$stamp" && continue
    if [ "$file" = pyproject.toml ]; then
      quiet_pip --no-deps --no-build-isolation --editable "$root"
    else
      quiet_pip --requirement "$root/$file"
    fi
    cp "$root/$file" "$stamp"
  done
}

# Installs the compiler of TPU kernels, which needs no TPU, where only tests look for it: in the
# environment itself JAX would look for a TPU at every start.
make_tpu_compiler() {
  local file=requirements-tpu-compiler.txt stamp
  stamp=$venv/installed-$file
  cmp -s "$root/$file" "$stamp" && return
  quiet_pip --no-deps --upgrade --target "$venv/libtpu" --requirement "$root/$file"
  cp "$root/$file" "$stamp"
}
