# GPU image: NVIDIA's PyTorch container provides CUDA, NCCL, Transformer Engine and Apex; this file adds Megatron-core and
# this project. Give the container's full name, including its registry:
#   docker build --build-arg BASE=REGISTRY/pytorch:25.11-py3 .
# The container's Transformer Engine must be supported by Megatron-core 0.16.1 (2.9 to 2.11); the build checks this. The
# project's tests have no container engine and do not build or run this image.
ARG BASE
FROM ${BASE}

WORKDIR /opt/nemo_oprd
COPY pyproject.toml README.md LICENSE ./
COPY nemo_oprd nemo_oprd
COPY conf conf
COPY checkpoint_tools checkpoint_tools
COPY scripts scripts

# The container's torch, Transformer Engine and Apex are built for each other: keep them, and let pip add only missing
# packages. They are constrained by version, because `pip freeze` reports nonexistent paths for packages built in place.
RUN python -c "from importlib.metadata import distributions; \
               keep = ('torch', 'transformer-engine', 'apex', 'triton', 'pytorch-triton', 'numpy'); \
               found = [(name, list(distributions(name=name))[:1]) for name in keep]; \
               print(*(f'{name}=={there.version}' for name, first in found for there in first), sep='\n')" \
        > /tmp/keep.txt \
    && pip install --no-cache-dir --constraint /tmp/keep.txt . \
    && python -c "from importlib.metadata import version as v; te = v('transformer_engine'); \
                  assert (2, 9) <= tuple(map(int, te.split('.')[:2])) < (2, 12), f'Transformer Engine {te}: choose another BASE'" \
    && nemo-oprd --version

ENTRYPOINT ["nemo-oprd"]
