#!/usr/bin/env bash
# Makes the virtual environment that the Makefile's targets use: finds a Python, installs exactly
# what requirements.lock names, and this package in editable form. Safe to repeat; does nothing
# when nothing changed.
#
#   PYTHON=…  the interpreter to use (3.12 or newer)      VENV=…  where to make it (.venv)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
LOCK=requirements.lock
UV_VERSION=0.13.9
STAMP=$VENV/.installed
# The kernels are compiled by the installation: new sources need a new one.
mapfile -t KERNELS < <(find kernels -name '*.py' -o -path 'kernels/src/*' -type f | LC_ALL=C sort)
WANTED=$({ cat "$LOCK" pyproject.toml setup.py tools/setup.sh "${KERNELS[@]}"; pwd; } |
  sha256sum | cut -d' ' -f1)

if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANTED" ]; then
  exit 0
fi

say() { echo "setup: $*" >&2; }

# A version manager's shim may exist and still refuse to run: only an interpreter that starts counts.
runs() {
  "$1" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12) or sys.version_info >= (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    runs "$PYTHON" || { say "PYTHON=$PYTHON does not run, or is not Python 3.12 or 3.13"; return 1; }
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3.12 python3.13 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3.13 \
    "$HOME"/.local/share/uv/python/cpython-3.1[23]*/bin/python3.1[23] \
    /usr/local/bin/python3.1[23] /opt/python/cp31[23]-*/bin/python3; do
    if runs "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  say "no Python 3.12 or 3.13 found here: asking uv to fetch one"
  local uv
  uv=$(command -v uv) || {
    # Any Python that runs can hold uv.
    local any
    any=$(for p in python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
      "$p" -c 'import venv' >/dev/null 2>&1 && echo "$p" && break
    done)
    [ -n "$any" ] || { say "no Python at all: install Python 3.12, or give PYTHON=/path/to/python3.12"; return 1; }
    "$any" -m venv "$VENV-uv" && "$VENV-uv/bin/python" -m pip install --quiet "uv==$UV_VERSION" >&2
    uv=$VENV-uv/bin/uv
  }
  "$uv" python install --quiet 3.12 >&2 && "$uv" python find --managed-python 3.12 ||
    { say "uv could not fetch Python 3.12: install it, or give PYTHON=/path/to/python3.12"; return 1; }
}

# uv installs about five times as fast as pip. It does not read pip's configuration, so an index
# that is set there is handed to it; where uv cannot install, pip does.
install_with_uv() {
  local uv index
  uv=$(command -v uv) || {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" >&2 || return 1
    uv=$VENV/bin/uv
  }
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=$("$VENV/bin/python" -m pip config get global.index-url 2>/dev/null) || index=${PIP_INDEX_URL:-}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi
  fi
  "$uv" pip install --quiet --python "$VENV/bin/python" --require-hashes -r "$LOCK" >&2
}

install_with_pip() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$LOCK" >&2
}

rm -f "$STAMP"
if ! runs "$VENV/bin/python"; then
  python=$(find_python)
  say "making $VENV with $("$python" --version)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
fi
say "installing $(grep -c '==' "$LOCK") locked packages (some minutes and 5 GB at first)"
install_with_uv || { say "uv could not install them: trying pip"; install_with_pip; }
# setuptools is locked too: no build environment with unlocked packages is needed.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . >&2
rm -rf "$VENV-uv"
echo "$WANTED" >"$STAMP"
say "ready: $VENV/bin/megalatent"
