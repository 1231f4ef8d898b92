# GPU image: NVIDIA's PyTorch container brings CUDA, NCCL, Transformer Engine and Apex; this adds Megatron-core and us.
# Give the full name of that container as BASE; its Transformer Engine must be one that Megatron-core 0.16.1 takes
# (2.9 to 2.11), which the build checks. Not built or run by the project's tests, which have no container engine.
ARG BASE=pytorch:25.11-py3
FROM ${BASE}

WORKDIR /opt/nemo_oprd
COPY pyproject.toml README.md LICENSE ./
COPY nemo_oprd nemo_oprd
COPY conf conf
COPY checkpoint_tools checkpoint_tools
COPY scripts scripts

# The container's torch, Transformer Engine and Apex fit each other: keep them, and let pip add only what is missing.
RUN pip freeze | grep -iE '^(torch|transformer[-_]engine|apex|triton|numpy)([ =@]|$)' > /tmp/keep.txt \
    && pip install --no-cache-dir --constraint /tmp/keep.txt . \
    && python -c "from importlib.metadata import version as v; te = v('transformer_engine'); \
                  assert (2, 9) <= tuple(map(int, te.split('.')[:2])) < (2, 12), f'Transformer Engine {te}: choose another BASE'" \
    && nemo-oprd --version

ENTRYPOINT ["nemo-oprd"]
