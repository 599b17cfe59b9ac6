#!/bin/sh
# Numerics, then the benchmark, on a machine with CUDA; JSON goes to $OUT if set. Not yet run on a GPU.
#   PYTHON=/path/to/python tests/gpu/run.sh     an environment that has torch with CUDA and Baton's dependencies
# Without PYTHON makes .venv-gpu from pip's index (several GB, minutes).
set -eu
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
    [ -x .venv-gpu/bin/python ] || python3 -m venv .venv-gpu
    PYTHON=.venv-gpu/bin/python
    "$PYTHON" -m pip install -q -e '.[dev]'
fi
exec "$PYTHON" -m tests.gpu
