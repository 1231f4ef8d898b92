#!/bin/bash
# Tests, in the environment of the quickstart (CONTRIBUTING.md says what each level holds):
#   bash scripts/test.sh                 ruff, mypy, and the tests that are neither slow nor integration tests
#   bash scripts/test.sh --all           ruff, mypy, and all tests; what is not installed here is skipped with its reason
#   bash scripts/test.sh --integration   only the tests that need an environment or a service of their own
#   bash scripts/test.sh tests/unit      ruff, mypy, and pytest with these arguments, whatever marks the tests have
# Arguments after --all or --integration go to pytest, too.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
services="slurm or vllm or nemo"
if [ "${1:-}" = --integration ]; then
  shift
  status=0
  python -m pytest -m "$services" "$@" || status=$?
  if [ "$status" = 5 ] && [ $# = 0 ]; then
    echo "no test is marked '$services'"
    exit 0
  fi
  exit "$status"
fi
ruff check .
ruff format --check .
mypy
if [ $# = 0 ]; then
  exec python -m pytest -m "not (slow or $services)"
fi
if [ "$1" = --all ]; then
  shift
fi
exec python -m pytest "$@"
