#!/bin/bash
# Tests, in the environment of the quickstart (CONTRIBUTING.md says what each level holds):
#   bash scripts/test.sh                 ruff, mypy, and the default tests, in five minutes on two idle cores
#   bash scripts/test.sh --full          ruff, mypy, and the tests that are neither slow nor integration tests
#   bash scripts/test.sh --all           ruff, mypy, and all tests; what is not installed here is skipped with its reason
#   bash scripts/test.sh --integration   only the tests that need an environment or a service of their own, without slow ones
#   bash scripts/test.sh tests/unit      ruff, mypy, and pytest with these arguments, whatever marks the tests have
# Arguments after --all or --integration go to pytest, too. Without arguments, and with --full, tests/functional, which computes, runs
# beside the other tests, which wait more than they compute, and some files of its own; their output follows at the end.
# In the same way the integration tests of vLLM run beside the others, which the tests of the other supported Python and
# Megatron-core follow (scripts/test_other_python.sh).
set -euo pipefail
. "$(dirname "$0")/environment.sh"
services="slurm or vllm or nemo or smollm or wandb or chromium or npm or recipes"
beside=(tests/functional/test_{nemo_rl,prune_layers,safe_unpickling,served_teachers,shared_teachers,stream,vllm_engine}.py)
if [ "${1:-}" = --integration ]; then
  shift
  if [ $# != 0 ]; then
    exec python -m pytest -m "($services) and not slow" "$@"
  fi
  # looking through all tests for those with a mark takes a minute; the marks are named in the files that have them
  mapfile -t files < <(grep -rlE "mark\.(${services// or /|})\b" --include='test_*.py' tests | sort)
  output=$(mktemp)
  # servers of vLLM start for half of their tests' time, on one core
  python -m pytest -m "vllm and not (slurm or slow)" "${files[@]}" >"$output" 2>&1 &
  others=$!
  trap 'kill "$others" 2>/dev/null || true; rm -f "$output"' EXIT
  status=0 status_of_others=0
  python -m pytest -m "($services) and not (slow or vllm and not slurm)" "${files[@]}" || status=$?
  if [ "$status" = 0 ] || [ "$status" = 5 ]; then
    bash scripts/test_other_python.sh || status=$?
  fi
  wait "$others" || status_of_others=$?
  cat "$output"
  for each in "$status" "$status_of_others"; do
    if [ "$each" != 0 ] && [ "$each" != 5 ]; then
      exit "$each"
    fi
  done
  if [ "$status$status_of_others" = 55 ]; then
    echo "no test is marked '$services'"
  fi
  exit 0
fi
ruff check .
ruff format --check .
if [ "$*" = "" ] || [ "$*" = --full ]; then
  left_out="full or slow or $services"
  if [ "$*" = --full ]; then
    left_out="slow or $services"
  fi
  output=$(mktemp)
  (mypy && exec python -m pytest -m "not ($left_out)" tests/unit tests/e2e "${beside[@]}") >"$output" 2>&1 &
  others=$!
  trap 'kill "$others" 2>/dev/null || true; rm -f "$output"' EXIT
  status=0
  python -m pytest -m "not ($left_out)" tests/functional "${beside[@]/#/--ignore=}" || status=$?
  wait "$others" || status=$?
  cat "$output"
  exit "$status"
fi
mypy
if [ "$1" = --all ]; then
  shift
fi
exec python -m pytest "$@"
