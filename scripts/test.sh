#!/bin/bash
# All tests, in the environment of the quickstart. Arguments go to pytest, e.g. `bash scripts/test.sh tests/unit`.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
