# Images of this project. The project's tests have no container engine: they lint this file and check what it names, and
# build the CPU image where an engine is found. Neither image was built yet.
#
#   docker build --target cpu --tag nemo_oprd:cpu .
#   docker build --target gpu --tag nemo_oprd:gpu --build-arg BASE=REGISTRY/pytorch:26.09-py3 .
#
# gpu: BASE is NVIDIA's PyTorch container with its registry (docs/cluster.md), and has no default: the newest tag that the
# driver of the nodes can run. It provides CUDA, cuDNN, NCCL, torch, Transformer Engine and Apex, which are built for each
# other and stay as they are. The build ends where its Transformer Engine is not of the versions in pyproject.toml or its
# cuDNN is older than 9.18, as in 25.11. vLLM has an environment of its own in the image, where the project looks for it.
#   --build-arg NEMO=3.0.0     adds nemo-toolkit[common] of this version
#   --build-arg VLLM=          leaves vLLM out
#   --build-arg NCCL=VERSION   gives vLLM's environment another NCCL: that of BASE, which the build compares; with NCCL=any
#                              it does not, and rollout.vllm.transport=group may find that they differ
# cpu: Python 3.12 and the packages of the tests.
#   --build-arg TORCH_INDEX=URL   an index with CPU builds of torch; other indices may have CUDA builds only, of several GB
#   --build-arg VLLM=1            adds vLLM's CPU build
#
# In both, the project is in /opt/nemo_oprd, and models, data, runs and bridges are to be mounted there (docs/cluster.md).
ARG BASE=no_base

FROM python:3.12-slim-bookworm AS no_base
RUN echo "BASE: expected NVIDIA's PyTorch container: --build-arg BASE=REGISTRY/pytorch:26.09-py3 (docs/cluster.md)" >&2; exit 1

FROM scratch AS source
WORKDIR /opt/nemo_oprd
COPY pyproject.toml README.md LICENSE requirements-cpu.txt ./
COPY nemo_oprd nemo_oprd
COPY conf conf
COPY checkpoint_tools checkpoint_tools
COPY benchmarks benchmarks
COPY studies studies
COPY scripts scripts
COPY tests/golden tests/golden
COPY tests/__init__.py tests/__init__.py
COPY tests/support tests/support

# what the making of vLLM's environment reads: it is not made again when another file changes
FROM scratch AS vllm
WORKDIR /opt/nemo_oprd
COPY requirements-vllm-cpu.txt requirements-vllm-cuda.txt ./
COPY scripts/setup_vllm.sh scripts/interpreter.sh scripts/
COPY nemo_oprd/vllm/worker nemo_oprd/vllm/worker

FROM python:3.12-slim-bookworm AS cpu
WORKDIR /opt/nemo_oprd
ARG VLLM=
COPY --from=vllm /opt/nemo_oprd ./
RUN if [ -n "$VLLM" ]; then VLLM_TARGET=cpu PYTHON_FOR_VLLM=python3.12 bash scripts/setup_vllm.sh; fi
COPY requirements-cpu.txt ./
ARG TORCH_INDEX=
# the version of torch is in the file
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        "$(grep '^torch==' requirements-cpu.txt)" \
    && python -m pip install --no-cache-dir --requirement requirements-cpu.txt
COPY --from=source /opt/nemo_oprd ./
# editable: the project is then used where it is, beside conf/ and vLLM's environment
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && mkdir -p models data runs bridges \
    && nemo-oprd --version
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["nemo-oprd"]

FROM ${BASE} AS gpu
WORKDIR /opt/nemo_oprd
ARG VLLM=1
COPY --from=vllm /opt/nemo_oprd ./
# The container's constraints of versions (PIP_CONSTRAINT) are not for vLLM's environment. venv is a package of its own
# there; its version is the distribution's.
# hadolint ignore=DL3008
RUN if [ -n "$VLLM" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/* \
        && PIP_CONSTRAINT='' PIP_NO_CACHE_DIR=1 VLLM_TARGET=cuda PYTHON_FOR_VLLM=python3 bash scripts/setup_vllm.sh; \
    fi
COPY --from=source /opt/nemo_oprd ./
# The packages that the container was built around stay as they are, and the others have the versions of the tests, unless
# NeMo asks for its own.
ARG NEMO=
ARG NCCL=
RUN export PIP_CONSTRAINT='' PIP_NO_CACHE_DIR=1 \
    && python scripts/check_gpu_environment.py --constraints ${NEMO:+kept} >/tmp/constraints.txt \
    && python -m pip install hatchling==1.33.0 editables==0.6 \
    && python -m pip install --constraint /tmp/constraints.txt --no-build-isolation --editable . \
        ${NEMO:+"nemo-toolkit[common]==$NEMO"} \
    && rm /tmp/constraints.txt \
    && mkdir -p models data runs bridges \
    && cuda=$(python -c 'import torch; print(torch.version.cuda.split(".")[0])') \
    && case "$VLLM,$NCCL" in [!,]*,[0-9]*) .venv-vllm/bin/python -m pip install --no-deps "nvidia-nccl-cu$cuda==$NCCL" ;; esac \
    && case "$VLLM,$NCCL" in ,* | *,any) unset VLLM ;; esac \
    && python scripts/check_gpu_environment.py --without-gpu ${VLLM:+--vllm .venv-vllm/bin/python} \
    && nemo-oprd --version
# packages in a user's home are not those of the image
ENV PYTHONNOUSERSITE=1
ENTRYPOINT ["nemo-oprd"]
