# GPU image: NVIDIA's PyTorch container brings CUDA, NCCL, Transformer Engine and Apex; this adds Megatron-core and us.
# Give the full name of that container, its registry included: docker build --build-arg BASE=REGISTRY/pytorch:25.11-py3 .
# Its Transformer Engine must be one that Megatron-core 0.16.1 takes (2.9 to 2.11), which the build checks. Not built or
# run by the project's tests, which have no container engine.
ARG BASE
FROM ${BASE}

WORKDIR /opt/nemo_oprd
COPY pyproject.toml README.md LICENSE ./
COPY nemo_oprd nemo_oprd
COPY conf conf
COPY checkpoint_tools checkpoint_tools
COPY scripts scripts

# The container's torch, Transformer Engine and Apex fit each other: keep them, and let pip add only what is missing.
# By version: what `pip freeze` says of packages that were built in place are paths that are gone.
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
