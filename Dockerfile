# GPU image: NVIDIA's PyTorch container brings CUDA, NCCL, Transformer Engine and Apex; this adds Megatron-core and us.
# Give the full name of that container as BASE. Not built or run by the project's tests, which have no container engine.
ARG BASE=pytorch:25.10-py3
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
    && nemo-oprd --version

ENTRYPOINT ["nemo-oprd"]
