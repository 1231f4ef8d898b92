# Sourced, in the project's directory, by scripts that run on GPUs: which interpreter they take, and why torch sees no GPU.

# gpu_environment: sets PYTHON to the interpreter of .venv-gpu. Status 1 where there is no .venv-gpu, 2 with one line where
# scripts/setup_gpu.sh has not made it to its end.
gpu_environment() {
  if [ ! -e .venv-gpu ]; then return 1; fi
  if [ ! -x .venv-gpu/bin/python ] || [ ! -f .venv-gpu/ready ]; then
    echo ".venv-gpu is not complete (.venv-gpu/ready is missing): bash scripts/setup_gpu.sh makes it again; one that an" \
      "earlier version of that script has completed is marked by: touch .venv-gpu/ready" >&2
    return 2
  fi
  PYTHON=$PWD/.venv-gpu/bin/python
}

# has_packages PYTHON: whether it runs and has torch and Megatron-core, which are not imported
has_packages() {
  "$1" -c 'import sys; from importlib.util import find_spec
sys.exit(not (find_spec("torch") and find_spec("megatron") and find_spec("megatron.core")))' 2>/dev/null
}

# sees_gpu PYTHON: status 0 if its torch sees a GPU. Otherwise prints the reason in one line; status 1, or 3 without torch
sees_gpu() {
  "$1" - <<'PYTHON_CODE' 2>/dev/null || return $?
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, ".")
try:
    import torch
except Exception as error:
    print(f"torch can't be imported ({' '.join(str(error).split())})")
    sys.exit(3)
from nemo_oprd.runtime.gpus import why_none
if not torch.cuda.is_available():
    print(f"torch {torch.__version__} sees no GPU: {why_none()}")
    sys.exit(1)
PYTHON_CODE
}
