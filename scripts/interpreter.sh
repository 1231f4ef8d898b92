# Sourced by scripts that make an environment. A command such as python3.12 may be a shim of a version manager that stands
# for no interpreter: only one that runs counts.

# first_running NAME...: prints the first of these interpreters that runs; status 1 if there is none
first_running() {
  local candidate
  for candidate in "$@"; do
    if "$candidate" -c '' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# newest_python [CHOSEN]: prints CHOSEN, or otherwise the newest supported Python that runs; says in one line what is wrong
newest_python() {
  if [ -n "${1:-}" ]; then
    if ! "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
      echo "PYTHON=$1: expected a command that runs Python 3.11, 3.12 or 3.13; name another one, or leave it out" >&2
      return 1
    fi
    echo "$1"
  elif ! first_running python3.13 python3.12 python3.11; then
    echo "no Python was found; expected one of python3.13, python3.12 and python3.11: install one, or name it with PYTHON=" >&2
    return 1
  fi
}

# minor_version PYTHON: such as 3.12
minor_version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}
