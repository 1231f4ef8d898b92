# Sourced by the other scripts: creates .venv with the pinned CPU packages if it is missing or outdated, and activates it.
# A new machine needs only Python 3.11 and access to a package index.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
if [ ! -f .venv/ready ] || [ requirements-cpu.txt -nt .venv/ready ] || [ pyproject.toml -nt .venv/ready ]; then
  echo "installing into .venv (only once; takes some minutes)" >&2
  python3.11 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-cpu.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
  touch .venv/ready
fi
. .venv/bin/activate
