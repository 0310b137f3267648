#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes on one card: prints a table, writes JSON.
# Without a GPU it says so for every check and exits with 77. Options: see tools/gpu_check.py.
#
#   PYTHON=…  the interpreter; default: the virtual environment of `make setup`, else python3
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD
exec "$PYTHON" -m tools.gpu_check "$@"
