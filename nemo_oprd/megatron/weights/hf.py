"""Moves weights between HF tensors and the shards of a role, one parameter at a time.

`load_hf` fills a role's shards from HF tensors; `gather_hf` yields HF tensors from the shards (of weights, gradients,
or anything else with the shape of a parameter). Loading a checkpoint, refitting the rollout engine, exporting, and
writing the gradients of `verify` all use these functions. The memory needed is that of the largest parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors import safe_open

from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device, everyones
from nemo_oprd.megatron.param_names import mappings_by_name, named_weights
from nemo_oprd.megatron.weights.dequantize import PLAIN_DTYPES, QuantizedSlice, StoredTensors
from nemo_oprd.models import ModelSpec, has_other_name, read_hf_config, transformers_config
from nemo_oprd.models.architecture import ParamMapping, stack_parts, stacked_part
from nemo_oprd.models.complete_config import LEFT_OUT, names_in_language_model
from nemo_oprd.models.families import fused_name
from nemo_oprd.models.quantization import forget_quantization, known_quantization
from nemo_oprd.models.weight_files import weight_files

# gives one HF tensor by its name
TensorReader: TypeAlias = Callable[[str], torch.Tensor]
# shape and dtype of a whole tensor; None: there is no tensor
Described: TypeAlias = tuple[tuple[int, ...], torch.dtype] | None


# experts that are stored together
_DOWN, _GATE_UP = ".mlp.experts.down_proj", ".mlp.experts.gate_up_proj"
# experts of Gemma 4, which are stored together, but one by one where they are quantised: (layer, expert, matrix)
_ONE_BY_ONE = re.compile(r"(model\.layers\.\d+)\.(?:moe\.)?experts\.(\d+)\.(gate|up|down)_proj\.weight")
_TOGETHER = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class HFCheckpoint:
    """Lazily opened safetensors files of an HF model directory; `checkpoint[name]` reads one tensor.

    The tensors of a language model inside a larger one have the names that they have in the language model alone.
    Quantised tensors (`models/quantization.py`) have the names, the shapes and the dtype of unquantised ones, and are
    dequantised when they are read, those of experts one by one.

    Raises:
        ValueError: the directory has no safetensors files, its index names missing files, a file can't be read, or a
            quantised tensor lacks its scales.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle_of: dict[str, safe_open] = {}
        self._in_files: dict[str, str] = {}  # names that differ there
        self._files = weight_files(self.path)
        for file in self._files:
            try:
                handle = safe_open(file, framework="pt")
            except Exception as error:  # safetensors raises its own SafetensorError for truncated or foreign files
                text = f"{file}: not a readable safetensors file ({error}); copy it from its source again"
                raise ValueError(text) from error
            for name, stored in names_in_language_model(handle.keys()).items():
                self._handle_of[name] = handle
                if name != stored:
                    self._in_files[name] = stored
        described = (self.path / "config.json").is_file()
        quantization = known_quantization(read_hf_config(self.path)) if described else None
        self._tensors = StoredTensors(self._handle_of, quantization, str(self.path))
        self._joined = _joined_experts(self._tensors.names, self.path)
        parts = {part for experts in self._joined.values() for parts in experts for part in parts}
        self._names = (self._tensors.names - parts) | self._joined.keys()
        self._transposed: set[str] = set()
        if described and has_other_name(self.path):
            self._transposed = self._with_inputs_first()

    def keys(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading its data; ValueError if it is missing or can't be dequantised."""
        stored, expert, half = self._stored(name)
        shape = tuple(self._numbers(stored).get_shape())
        if expert is None or (half is not None and len(shape) != 3):
            return shape
        return shape[1:] if half is None else (shape[1] // 2, shape[2])

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of `keys`, even if its scales are missing: vLLM may serve such a model."""
        return tuple(self._slice(name).get_shape())

    def __getitem__(self, name: str) -> torch.Tensor:
        stored, expert, half = self._stored(name)
        fused = self._numbers(stored)
        if expert is None:
            if isinstance(fused, QuantizedSlice | _TransposedSlice | _JoinedSlice):
                return fused[...]
            return self._handle(stored).get_tensor(self._in_files.get(stored, stored))
        if half is None:
            return fused[expert]
        rows = fused.get_shape()[1]
        return fused[expert, half * rows // 2 : (half + 1) * rows // 2]

    def _stored(self, name: str) -> tuple[str, int | None, int | None]:
        """Returns (stored name, expert, half) of a tensor; see `fused_name` for experts that are stored together."""
        if name in self._names:
            return name, None, None
        whole, part = stacked_part(name)
        if part is not None:
            return whole, part, None
        fused = fused_name(name)
        return fused if fused[0] in self._names else (name, None, None)

    def _slice(self, name: str) -> Any:
        """Returns a tensor as a slice, without reading it."""
        if name in self._joined:
            return _JoinedSlice([[self._slice(part) for part in parts] for parts in self._joined[name]])
        found = self._tensors.slice(name, self._stored_slice)
        return _TransposedSlice(found) if name in self._transposed else found

    def _with_inputs_first(self) -> set[str]:
        """Returns the experts of Qwen3-VL that are stored as [E, D, 2F] and [E, F, D], which only their shapes say."""
        found = set()
        for down in self._names:
            if down.endswith(_DOWN):
                gate_up = down.removesuffix(_DOWN) + _GATE_UP
                _, features, width = self._slice(down).get_shape()
                if list(self._slice(gate_up).get_shape())[1:] == [width, 2 * features]:
                    found |= {down, gate_up}
        return found

    def _numbers(self, name: str) -> Any:
        """Returns what `_slice` does. Raises ValueError if the tensor is quantised and has no scales."""
        found = self._slice(name)
        if found.get_dtype() not in PLAIN_DTYPES:
            raise ValueError(
                f"{self.path}: tensor {name!r} holds {found.get_dtype()} numbers without scales; expected "
                "F32, BF16, F16 or F64, or scales in the files and quantization_config in config.json: copy all files "
                "of the model from its source again"
            )
        return found

    def _stored_slice(self, name: str) -> Any:
        return self._handle(name).get_slice(self._in_files.get(name, name))

    def _handle(self, name: str) -> safe_open:
        if name not in self._handle_of:
            raise ValueError(
                f"{self.path}: tensor {name!r} is missing from its {len(self._files)} safetensors file(s); "
                "expected every weight of the model: is a shard missing?"
            )
        return self._handle_of[name]


class _TransposedSlice:
    """Presents a stored slice [E, columns, rows] as a slice [E, rows, columns]."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        """Returns [E, rows, columns]."""
        experts, columns, rows = self._stored.get_shape()
        return [experts, rows, columns]

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors, such as "BF16"."""
        return self._stored.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns all of it for `...`, one expert, or some of an expert's rows for (expert, rows)."""
        if isinstance(index, tuple):
            expert, rows = index
            return self._stored[expert, :, rows].T.contiguous()
        return self._stored[index].transpose(-2, -1).contiguous()


def _joined_experts(names: Iterable[str], source: Path) -> dict[str, list[list[str]]]:
    """Returns the name of a tensor of all experts -> for each expert, the names of its matrices in that tensor.

    Raises:
        ValueError: a matrix of an expert is missing; the message begins with `source`.
    """
    found: dict[str, dict[int, list[str]]] = {}
    for name in sorted(names):  # a gate before what it multiplies
        if (parts := _ONE_BY_ONE.fullmatch(name)) is not None:
            layer, expert, matrix = parts.groups()
            found.setdefault(f"{layer}.experts.{_TOGETHER[matrix]}", {}).setdefault(int(expert), []).append(name)
    for whole, experts in found.items():
        each = 1 + whole.endswith(_TOGETHER["gate"])
        lacking = [n for n in range(max(experts) + 1) if len(experts.get(n, [])) != each]
        if lacking:
            raise ValueError(
                f"{source}: {whole} lacks matrices of expert(s) {lacking}; expected those of all {max(experts) + 1}: "
                "is a shard missing?"
            )
    return {whole: [experts[number] for number in sorted(experts)] for whole, experts in found.items()}


class _JoinedSlice:
    """Presents matrices of single experts, one or two (gate above up) for each, as a slice [E, rows, columns]."""

    def __init__(self, experts: list[list[Any]]) -> None:
        self._experts = experts

    def get_shape(self) -> list[int]:
        """Returns [E, rows, columns]."""
        shapes = [part.get_shape() for part in self._experts[0]]
        return [len(self._experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors, such as "BF16"."""
        return self._experts[0][0].get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns all of it for `...`, one expert, or some of an expert's rows for (expert, rows)."""
        if index is Ellipsis:
            return torch.stack([self[expert] for expert in range(len(self._experts))])
        expert, *rows = index if isinstance(index, tuple) else (index,)
        return torch.cat([part[...] for part in self._experts[expert]])[tuple(rows)]


def transformers_model(path: str | Path, dtype: torch.dtype, **options: Any) -> Any:
    """Returns transformers' causal language model of a directory, with the weights that this project trains.

    Weights of quantised files are the bfloat16 numbers that they stand for, to which transformers would not round. A
    model that transformers knows under another name gets the tensors' names in `HFCheckpoint`.

    Args:
        options: further arguments of `from_pretrained`.

    Raises:
        ValueError: the directory holds no model that can be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    options |= {"dtype": dtype, "local_files_only": True}
    if known_quantization(read_hf_config(path)) is None and not has_other_name(path):
        return AutoModelForCausalLM.from_pretrained(str(path), **options)
    config, checkpoint = transformers_config(path), HFCheckpoint(path)
    forget_quantization(config)
    tensors = {name: checkpoint[name] for name in checkpoint.keys() if not name.startswith(LEFT_OUT)}  # noqa: SIM118
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(None, config=config, state_dict=tensors, **options)


def finite(read: TensorReader, source: str | Path) -> TensorReader:
    """Returns `read` with a check that refuses NaN and infinite values. `source`: the tensors' source, for messages."""

    def checked(name: str) -> torch.Tensor:
        tensor = read(name)
        refuse_nonfinite(tensor, name, source)
        return tensor

    return checked


def refuse_nonfinite(tensor: torch.Tensor, name: str, source: str | Path) -> None:
    """Raises ValueError, naming tensor and model, if a value is NaN or infinite."""
    # both ends are NaN if a value is; this is as fast as memory, and needs none, unlike isfinite
    if not tensor.numel() or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist())):
        return
    wrong = (~torch.isfinite(tensor)).nonzero()
    first = tuple(wrong[0].tolist())
    raise ValueError(
        f"{source}: tensor {name!r} has {len(wrong)} value(s) that are NaN or infinite, such as {tensor[first].item()} "
        f"at {list(first)}; expected finite weights: copy the model from its source again, or train it again"
    )


@torch.no_grad()
def load_hf(chunks: list[DistillingModel], spec: ModelSpec, role: Role, read: TensorReader, source: str) -> None:
    """Fills every parameter of this rank from HF tensors (`read(name)`), cast to the parameter's dtype.

    Raises:
        ValueError: a tensor is missing or its shape disagrees with the config.
    """
    assert role.coords is not None
    mappings = mappings_by_name(spec)
    for name, parameter in named_weights(chunks).items():
        # A tied head on the last pipeline stage is a second copy of the embedding.
        mapping = mappings[name] if name in mappings else mappings["embedding.word_embeddings.weight"]
        joined = mapping.form.join([read(hf_name) for hf_name in mapping.hf], spec)
        shard = mapping.form.shard(joined, *_tensor_part(mapping, role), spec)
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{source}: {' + '.join(mapping.hf)} gives {tuple(shard.shape)} for tensor rank {role.coords.tensor} "
                f"of {role.layout.tensor}, but config.json asks for {tuple(parameter.shape)}; "
                "the weights and the config are of different models"
            )
        parameter.copy_(shard)


@torch.no_grad()
def load_stream(
    chunks: list[DistillingModel], spec: ModelSpec, role: Role, stream: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fills every parameter of a role without pipeline stages from the stream of `gather_hf`, in the stream's order."""
    assert role.coords is not None and role.layout.pipeline == 1
    mine = named_weights(chunks)
    mapping_of = {name: mapping for mapping in mappings_by_name(spec).values() for name in mapping.hf}
    waiting: dict[str, torch.Tensor] = {}
    missing = set(mine)
    for name, tensor in _parts(stream, mapping_of):
        waiting[name] = tensor
        mapping = mapping_of[name]
        if all(part in waiting for part in mapping.hf):
            parts = [waiting.pop(part) for part in mapping.hf]
            if mapping.megatron in mine:  # another rank may have the expert
                joined = mapping.form.join(parts, spec)
                mine[mapping.megatron].copy_(mapping.form.shard(joined, *_tensor_part(mapping, role), spec))
                missing.discard(mapping.megatron)
    assert not missing, f"the weight stream left out {sorted(missing)}"


def _parts(
    stream: Iterable[tuple[str, torch.Tensor]], names: Mapping[str, object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Inverts `stack_parts`: takes a tensor apart whose name is not in `names`."""
    for name, tensor in stream:
        yield from [(name, tensor)] if name in names else [(f"{name}[{i}]", part) for i, part in enumerate(tensor)]


def hf_names(spec: ModelSpec) -> list[str]:
    """Returns the names of a model's tensors as in its files and in the stream of `gather_hf`, in their order."""
    names = (name for mapping in mappings_by_name(spec).values() for name in mapping.hf)
    return list(dict.fromkeys(stacked_part(name)[0] for name in names))


def owner_stage(mapping: ParamMapping, spec: ModelSpec, layout: Layout) -> int:
    """Returns the pipeline rank that holds the parameter of a mapping."""
    if mapping.layer is not None:
        return layout.stage_of_layer(mapping.layer + 1, spec.num_layers)[0]
    return 0 if mapping.megatron.startswith("embedding.") else layout.pipeline - 1


@torch.no_grad()
def gather_hf(
    chunks: list[DistillingModel],
    spec: ModelSpec,
    role: Role,
    value: Callable[[torch.nn.Parameter], torch.Tensor | None] = lambda p: p.data,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF name, whole tensor) on every rank of the role, in a fixed order.

    Args:
        value: the tensor to gather for a parameter; None, which all ranks must return alike, leaves the parameter out.
            It also gets buffers: routers' biases and scales of layers.
    """
    yield from stack_parts(_gather_parts(chunks, spec, role, value))


def _gather_parts(
    chunks: list[DistillingModel],
    spec: ModelSpec,
    role: Role,
    value: Callable[[torch.nn.Parameter], torch.Tensor | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what `gather_hf` does, but the parts of stacked tensors (`stacked_part`) one by one."""
    assert role.coords is not None
    mine, described = named_weights(chunks), {}
    if role.layout.pipeline > 1:
        described = _descriptions(mine, spec, role, value)
    for mapping in mappings_by_name(spec).values():
        stage = owner_stage(mapping, spec, role.layout)
        joined = _whole(mine, mapping, spec, role, value) if role.coords.pipeline == stage else None
        if role.layout.pipeline > 1:
            joined = _broadcast_described(joined, described[mapping.megatron], stage, role)
        if joined is not None:
            yield from zip(mapping.hf, mapping.form.split_to_hf(joined, spec), strict=True)


def _tensor_part(mapping: ParamMapping, role: Role) -> tuple[int, int]:
    """Returns (this rank's part, number of parts) of a parameter that is split over tensor-parallel ranks."""
    if mapping.expert is None:
        return role.member_coords.tensor, role.layout.tensor
    group = role.member_groups.expt_tp
    return group.rank(), group.size()


def _descriptions(
    mine: dict[str, torch.nn.Parameter],
    spec: ModelSpec,
    role: Role,
    value: Callable[[torch.nn.Parameter], torch.Tensor | None],
) -> dict[str, Described]:
    """Returns Megatron name -> shape and dtype, for every parameter; the stages exchange theirs in one message.

    A header for each tensor would cost more than the tensor where there are many: each one is pickled and takes two
    collectives.
    """
    assert role.coords is not None
    own: dict[str, Described] = {}
    for mapping in mappings_by_name(spec).values():
        if owner_stage(mapping, spec, role.layout) != role.coords.pipeline:
            continue
        tensor = value(mine[_held_name(mapping, spec, role)])
        if tensor is None:
            own[mapping.megatron] = None
            continue
        _, parts = _tensor_part(mapping, role)
        shards = [torch.empty_like(tensor, device="meta")] * (1 if mapping.form.axis is None else parts)
        own[mapping.megatron] = tuple(mapping.form.unshard(shards, spec).shape), tensor.dtype
    return {name: about for part in everyones(own, role.member_groups.pp) for name, about in part.items()}


def _held_name(mapping: ParamMapping, spec: ModelSpec, role: Role) -> str:
    """Returns the Megatron name of a mapping's parameter, or of this rank's expert of the same place and shape."""
    if mapping.expert is None or role.layout.expert == 1:
        return mapping.megatron
    assert spec.experts is not None
    local = spec.experts.count // role.layout.expert
    own = role.member_groups.ep.rank() * local + mapping.expert % local
    return mapping.megatron.replace(f".local_experts.{mapping.expert}.", f".local_experts.{own}.")


def _whole(
    mine: dict[str, torch.nn.Parameter],
    mapping: ParamMapping,
    spec: ModelSpec,
    role: Role,
    value: Callable[[torch.nn.Parameter], torch.Tensor | None],
) -> torch.Tensor | None:
    """Returns the whole value for a parameter of this rank's stage; an expert's comes from the ranks that hold it."""
    name, expert = _held_name(mapping, spec, role), mapping.expert
    tensor = value(mine[name])
    if tensor is None:
        return None
    if expert is None or role.layout.expert == 1:
        return _unshard(tensor, mapping, spec, role)
    assert spec.experts is not None
    group = role.member_groups.ep
    owner = expert // (spec.experts.count // role.layout.expert)
    if group.rank() != owner:
        tensor = torch.empty_like(tensor)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_global_rank(group, owner), group=group)
    return _unshard(tensor, mapping, spec, role)


def _unshard(tensor: torch.Tensor, mapping: ParamMapping, spec: ModelSpec, role: Role) -> torch.Tensor:
    _, parts = _tensor_part(mapping, role)
    if parts == 1:
        return mapping.form.unshard([tensor], spec)
    if mapping.form.axis is None:
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(parts)]
    group = role.member_groups.tp if mapping.expert is None else role.member_groups.expt_tp
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return mapping.form.unshard(shards, spec)


def broadcast_from_stage(tensor: torch.Tensor | None, stage: int, role: Role) -> torch.Tensor | None:
    """Returns, on all pipeline stages, the tensor that `stage` passes; None if `stage` passes None.

    Shape and dtype are sent first, because the other stages know neither of them, nor whether there is a tensor.
    """
    assert role.coords is not None
    group = role.member_groups.pp
    source = dist.get_global_rank(group, stage)
    described: list[Described] = [None if tensor is None else (tuple(tensor.shape), tensor.dtype)]
    dist.broadcast_object_list(described, src=source, group=group)
    return _broadcast_described(tensor, described[0], stage, role)


def _broadcast_described(
    tensor: torch.Tensor | None, described: Described, stage: int, role: Role
) -> torch.Tensor | None:
    """Does what `broadcast_from_stage` does, for a tensor whose shape and dtype all stages know."""
    assert role.coords is not None
    if described is None:
        return None
    group = role.member_groups.pp
    source = dist.get_global_rank(group, stage)
    if role.coords.pipeline != stage:
        shape, dtype = described
        tensor = torch.empty(shape, dtype=dtype, device=device())
    assert tensor is not None
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=source, group=group)
    return tensor


# The LM head of a teacher that vLLM serves, from its files: families call it by different names.


_HEADS = ("lm_head.weight", "embed_out.weight")
_BIASES = ("lm_head.bias", "embed_out.bias")
_INSTEAD = (
    "take loss.output.kind=sampled_token, for which the servers apply the head, and logging.output_metrics_every=0"
)


class ServedHead:
    """Reads the head [V, D], by whichever name it is asked for; a `TensorReader`."""

    def __init__(self, checkpoint: HFCheckpoint, spec: ModelSpec) -> None:
        """Opens no file: only a loss on the teacher's distribution reads its head."""
        self._checkpoint, self._spec = checkpoint, spec

    def __call__(self, name: str) -> torch.Tensor:
        """Returns the head. Raises ValueError as `find`, or if the head holds NaN or infinite values."""
        return self._finite(self.find())

    def bias(self) -> torch.Tensor | None:
        """Returns the bias that the head adds to logits [V]; None if the files have no such tensor."""
        checkpoint, shape = self._checkpoint, (self._spec.vocab_size,)
        names = checkpoint.keys()
        found = [name for name in names if name.endswith(_BIASES) and checkpoint.stored_shape(name) == shape]
        return self._finite(found[0]) if found else None

    def _finite(self, name: str) -> torch.Tensor:
        return finite(self._checkpoint.__getitem__, self._checkpoint.path)(name)

    def find(self) -> str:
        """Returns the head's name in the files; if it is tied, or none is in `_HEADS`, that of the only other [V, D].

        Raises:
            ValueError: no tensor, or more than one, may be the head.
        """
        checkpoint, spec = self._checkpoint, self._spec
        shape = (spec.vocab_size, spec.hidden_size)
        names = checkpoint.keys()
        found = [name for name in names if checkpoint.stored_shape(name) == shape]
        heads = [name for name in found if name.endswith(_HEADS)]
        chosen = heads if heads and not spec.tied_embeddings else [name for name in found if name not in heads]
        if len(chosen) != 1:
            raise ValueError(
                f"{checkpoint.path}: {len(chosen)} tensors of shape {list(shape)} may be the teacher's LM head "
                f"({', '.join(chosen) or 'none'}); expected one: {_INSTEAD}"
            )
        return chosen[0]
