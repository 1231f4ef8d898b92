# Sourced by the other scripts: creates .venv with the pinned CPU packages if it is missing or outdated, and activates it.
# A new machine needs only Python 3.13, 3.12 or 3.11 and access to a package index. PYTHON names an interpreter; otherwise
# the newest of these that runs is taken, but an environment that is there keeps the Python that made it.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/interpreter.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
made= made_again=
if [ -x .venv/bin/python ]; then made=$(minor_version .venv/bin/python) || made=; fi
if [ -n "${PYTHON:-}" ]; then
  python=$(newest_python "$PYTHON") || exit 1
  if [ -n "$made" ] && [ "$made" != "$(minor_version "$python")" ]; then
    echo ".venv was made by Python $made, and PYTHON=$PYTHON is another one: it is made again" >&2
    made_again=1
  fi
fi
if [ -n "$made_again" ] || [ ! -f .venv/ready ] || [ requirements-cpu.txt -nt .venv/ready ] || [ pyproject.toml -nt .venv/ready ]; then
  if [ -L .venv ]; then
    # venv --clear would empty the folder behind the link, which others use, and then fail
    echo ".venv is a link to an environment that does not fit requirements-cpu.txt, pyproject.toml or PYTHON here; expected one" \
      "of this checkout: remove the link, or touch .venv/ready if its packages are right" >&2
    exit 1
  fi
  if [ -z "${PYTHON:-}" ]; then
    # an outdated environment keeps its Python: another one would come with another Megatron-core
    base=
    if [ -n "$made" ]; then base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null) || base=; fi
    python=$(first_running "$base" ${made:+"python$made"}) || python=$(newest_python) || exit 1
  fi
  echo "installing into .venv with Python $(minor_version "$python") (only once; takes some minutes)" >&2
  echo "where the package index has no CPU build of torch for this Python, it is a CUDA build of 5 GB, which works, too" >&2
  "$python" -m venv --clear .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-cpu.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
  touch .venv/ready
fi
. .venv/bin/activate
