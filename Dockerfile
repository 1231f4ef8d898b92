# Images of this project. The project's tests have no container engine: they lint this file and check what it names, and
# build the CPU image where an engine is found. Neither image was built yet.
#
#   docker build --target cpu --tag nemo_oprd:cpu .
#   docker build --target gpu --tag nemo_oprd:gpu --build-arg BASE=REGISTRY/pytorch:25.11-py3 .
#
# gpu: BASE is NVIDIA's PyTorch container with its registry. It provides CUDA, NCCL, torch, Transformer Engine and Apex,
# which are built for each other and stay as they are. Its Transformer Engine must be of the versions in pyproject.toml,
# which the build checks. vLLM has an environment of its own in the image, where the project looks for it.
#   --build-arg NEMO=3.0.0   adds nemo-toolkit[common] of this version
#   --build-arg VLLM=        leaves vLLM out
# cpu: Python 3.12 and the packages of the tests.
#   --build-arg TORCH_INDEX=URL   an index with CPU builds of torch; other indices may have CUDA builds only, of several GB
#   --build-arg VLLM=1            adds vLLM's CPU build
#
# In both, the project is in /opt/nemo_oprd, and models, data, runs and bridges are to be mounted there (docs/cluster.md).
ARG BASE=scratch

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
COPY nemo_oprd/rollout/vllm/worker nemo_oprd/rollout/vllm/worker

FROM python:3.12-slim-bookworm AS cpu
WORKDIR /opt/nemo_oprd
ARG VLLM=
COPY --from=vllm /opt/nemo_oprd ./
RUN if [ -n "$VLLM" ]; then VLLM_TARGET=cpu PYTHON_FOR_VLLM=python3.12 bash scripts/setup_vllm.sh; fi
COPY requirements-cpu.txt ./
ARG TORCH_INDEX=
# the version of torch is in the file
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements-cpu.txt)" \
    && pip install --no-cache-dir --requirement requirements-cpu.txt
COPY --from=source /opt/nemo_oprd ./
# editable: the project is then used where it is, beside conf/ and vLLM's environment
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
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
# The packages that the container was built around are kept, and pip adds missing ones. They are constrained by version,
# because `pip freeze` reports nonexistent paths for packages built in place.
ARG NEMO=
RUN python -c "from importlib.metadata import distributions; \
               keep = ('torch', 'transformer-engine', 'apex', 'triton', 'pytorch-triton', 'numpy'); \
               found = [(name, list(distributions(name=name))[:1]) for name in keep]; \
               print(*(f'{name}=={there.version}' for name, first in found for there in first), sep='\n')" \
        >/tmp/keep.txt \
    && export PIP_CONSTRAINT='' \
    && pip install --no-cache-dir hatchling==1.33.0 editables==0.6 \
    && pip install --no-cache-dir --constraint /tmp/keep.txt --no-build-isolation --editable . \
        ${NEMO:+"nemo-toolkit[common]==$NEMO"} \
    && rm /tmp/keep.txt \
    && mkdir -p models data runs bridges \
    && python scripts/check_gpu_environment.py --without-gpu \
    && nemo-oprd --version
ENTRYPOINT ["nemo-oprd"]
