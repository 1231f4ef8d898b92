#!/bin/bash
# Tests, in the environment of the quickstart (CONTRIBUTING.md says what each level holds):
#   bash scripts/test.sh                 ruff, mypy, and the tests that are neither slow nor integration tests
#   bash scripts/test.sh --all           ruff, mypy, and all tests; what is not installed here is skipped with its reason
#   bash scripts/test.sh --integration   only the tests that need an environment or a service of their own
#   bash scripts/test.sh tests/unit      ruff, mypy, and pytest with these arguments, whatever marks the tests have
# Arguments after --all or --integration go to pytest, too. Without arguments, tests/functional, which computes, runs
# beside the other tests, which wait more than they compute, and some files of its own; their output follows at the end.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
services="slurm or vllm or nemo or smollm"
beside=(tests/functional/test_{bad_inputs,prune_layers,safe_unpickling,vllm_engine}.py)
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
if [ $# = 0 ]; then
  output=$(mktemp)
  (mypy && exec python -m pytest -m "not (slow or $services)" tests/unit tests/e2e "${beside[@]}") >"$output" 2>&1 &
  others=$!
  trap 'kill "$others" 2>/dev/null || true; rm -f "$output"' EXIT
  status=0
  python -m pytest -m "not (slow or $services)" tests/functional "${beside[@]/#/--ignore=}" || status=$?
  wait "$others" || status=$?
  cat "$output"
  exit "$status"
fi
mypy
if [ "$1" = --all ]; then
  shift
fi
exec python -m pytest "$@"
