"""The parts that all model families share: a model's architecture, and the mappings of its weights' names and layouts.

A `ParamMapping` maps one Megatron parameter to the HF tensors that it consists of. Its `form` defines how these tensors
are joined, and how the joined tensor is split over tensor-parallel ranks. All code that moves weights (conversion,
loading, weight sync, export, the gradients that `verify` writes) uses these mappings, so a wrong mapping affects all of
it and cannot stay hidden.

Importing this package does not import torch, because a configuration is checked against the models' config.json before
torch is loaded: the functions that work on tensors import torch themselves.

Shapes: D hidden size, F feed-forward size, A attention heads, G key/value groups, C channels per head, V vocabulary,
E experts of a layer, K experts that a token visits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_oprd.models.rope import Rope

if TYPE_CHECKING:
    import torch

# Keys of a config.json that are lengths of a model's lists, and their bound: ten times those of the largest models.
_COUNTS = {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_nextn_predict_layers"}
_COUNTS |= {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_MOST = 10_000
# transformers' default of max_window_layers, in Qwen2 and Qwen3
_MAX_WINDOW_LAYERS = 28

# Megatron-LM's default: embeddings are padded so that every tensor-parallel shard is a multiple of 128 rows.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model.

    `score` is the function of a router's logits: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen"
    over the K experts with the largest logits. With `groups` above 1, experts are chosen from the `chosen_groups`
    groups whose two best scores have the largest sum. A router may add a fixed bias to the scores by which it chooses;
    the bias is a tensor of the checkpoint. Only families of Megatron-Bridge have other values than the defaults.
    """

    count: int  # experts of a layer, E
    per_token: int  # experts that a token visits, K
    ffn_size: int  # of an expert
    normalized: bool  # whether the weights of a token's K experts are divided by their sum
    sparse: tuple[bool, ...]  # for each layer, whether it has experts; others have an ordinary feed-forward block
    score: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0  # multiplies the weights of a token's experts
    shared_ffn_size: int = 0  # of the expert that every token visits; 0: there is none
    biases: bool = False  # whether experts have biases
    shared_gate: bool = False  # whether the shared expert's output is multiplied by a gate


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention: queries are projected from one narrow, normed state, keys and values from another.

    Queries of some models are projected from the layer's input instead. Per head, queries and keys have `rotated`
    channels with RoPE, which all heads' keys share, and `plain` ones without.
    """

    query_rank: int  # channels of the queries' narrow state; 0: they have none
    key_rank: int  # channels of the narrow state of keys and values
    plain: int
    rotated: int
    value: int  # channels of a value
    norm_eps: float  # of the norms of the narrow states; in some families the model's other norms have another
    scale: float  # multiplies products of queries and keys; some kinds of RoPE change it


@dataclass(frozen=True)
class DeltaNet:
    """The layers of a hybrid model that have a gated delta net instead of attention: a state of fixed size per head.

    A key head serves `value_heads / key_heads` value heads. `layers` says for each layer of the model whether it is one
    of these; `width` is the number of tokens that the convolution before the net sees.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_channels: int
    value_channels: int
    width: int


@dataclass(frozen=True)
class Heads:
    """The key/value heads of a layer's attention, and the channels of its keys (and queries) and values.

    `tied` says whether one projection makes both keys and values, each of which then has a norm of its own.
    """

    kv: int
    channels: int
    value_channels: int
    tied: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of one model, independent of any layout. `experts` is None for a model without experts.

    `family` has the weight mappings. `gated` says whether the feed-forward block multiplies two products of its input
    (a gate and a value), `silu` whether the gate's activation is SiLU, without bounds, `norm_bias` whether norms have a
    bias; `latent` is None for ordinary attention; `windowed` says for each layer whether a token attends to itself and
    the `window` - 1 tokens before it only (empty: in none); `sinks` whether each head's softmax has a further, learned
    term in its sum; `whole_qk_norm` whether queries and keys are normed over all heads together; `delta` is None for a
    model whose layers all have attention; `output_gate` says whether the attention's output is multiplied by a gate per
    channel; `local_rope` is the RoPE of the windowed layers, where it is not `rope`; `post_norms` whether there are
    norms behind attention and feed-forward block, too; `attention_cap` and `output_cap` bound the products of queries
    and keys, and the logits, by cap * tanh(x / cap); `attention_cap` is 0 in a model without this bound whose family
    has it. Only families of Megatron-Bridge differ from the defaults of these. `layer_heads` has the heads of each
    layer where layers differ; `num_kv_heads` is then the smallest number of key/value heads. `output_scale` multiplies
    the logits; only a teacher that vLLM serves may have a value other than 1.
    """

    family: Family = field(compare=False, repr=False)
    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: Rope
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    proj_bias: bool
    qk_norm: bool
    dtype: str
    hf_config: dict = field(compare=False, repr=False, default_factory=dict)
    experts: Experts | None = None
    gated: bool = True
    silu: bool = True
    norm_bias: bool = False
    latent: LatentAttention | None = None
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    sinks: bool = False
    whole_qk_norm: bool = False
    delta: DeltaNet | None = None
    output_gate: bool = False
    local_rope: Rope | None = None
    post_norms: bool = False
    attention_cap: float | None = None
    output_cap: float | None = None
    layer_heads: tuple[Heads, ...] = ()
    output_scale: float = 1.0

    @property
    def swiglu(self) -> bool:
        """Whether the feed-forward blocks without experts are SiLU(gate) * value."""
        return self.gated and self.silu

    @property
    def rotary_dim(self) -> int:
        """Returns the number of a head's channels to which RoPE applies; it rotates the part `rope.share` of them."""
        return self.head_dim if self.latent is None else self.latent.rotated

    def heads(self, layer: int) -> Heads:
        """Returns the heads of layer `layer` (1-based)."""
        if self.layer_heads:
            return self.layer_heads[layer - 1]
        return Heads(self.num_kv_heads, self.head_dim, self.head_dim)

    def is_sparse(self, layer: int) -> bool:
        """Returns whether layer `layer` (1-based) has experts."""
        return self.experts is not None and self.experts.sparse[layer - 1]

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Returns the rows of the embedding when it is split `tensor_parallel` ways."""
        multiple = VOCAB_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    def check_tensor_parallel(self, size: int, key: str) -> None:
        """Raises ValueError, naming the configuration `key`, unless `size` divides heads and feed-forward sizes.

        Unless layers differ, key/value heads may be fewer than ranks: each is then on `size / num_kv_heads` ranks.
        """
        dense = self.experts is None or not all(self.experts.sparse)
        sizes = {"attention heads": self.num_heads}
        if size % self.num_kv_heads or (self.layer_heads and size > self.num_kv_heads):
            sizes["key/value heads"] = self.num_kv_heads
        sizes |= {"feed-forward size": self.ffn_size} if dense else {}
        sizes |= {"shared expert's size": self.experts.shared_ffn_size} if self.experts is not None else {}
        sizes |= {} if self.delta is None else {"key heads of the delta net": self.delta.key_heads}
        for what, value in sizes.items():
            if value % size:
                raise ValueError(
                    f"{key}={size} does not divide the model's {value} {what}; choose a divisor of {value}"
                )

    def kv_heads_per_rank(self, tensor: int) -> int:
        """Returns the key/value heads that each of `tensor` ranks computes; with fewer heads than ranks, one."""
        return max(1, self.num_kv_heads // tensor)

    def check_attention_parallel(self, tensor: int, context: int, key: str) -> None:
        """Raises ValueError, naming the configuration `key`, if attention cannot be split over so many ranks."""
        if context > 1 and (self.sinks or any(self.windowed)) and self.attention_cap is None:
            raise ValueError(
                f"{key}.context={context}, but the {self.model_type} model has sliding windows or a learned term in "
                "its softmax, which Transformer Engine's ring attention does not have; expected 1: use "
                f"{key}.tensor or {key}.pipeline"
            )
        if context > 1 and self.delta is not None and self.delta.key_heads % (tensor * context):
            raise ValueError(
                f"{key}.context={context} with {key}.tensor={tensor} does not divide the {self.delta.key_heads} key "
                "heads of the delta net, which tensor and context ranks share; choose a divisor of "
                f"{self.delta.key_heads}"
            )

    def check_expert_parallel(self, expert: int, expert_tensor: int, key: str) -> None:
        """Raises ValueError, naming the configuration `key`, unless the experts can be split this way."""
        if self.experts is None:
            for name, size in (("expert", expert), ("expert_tensor", expert_tensor)):
                if size > 1:
                    raise ValueError(
                        f"{key}.{name}={size}, but the {self.model_type} model has no experts; expected 1, or a model "
                        f"with experts: remove {key}.{name}"
                    )
            return
        if self.experts.count % expert:
            raise ValueError(
                f"{key}.expert={expert} does not divide the model's {self.experts.count} experts; choose a divisor of "
                f"{self.experts.count}"
            )
        if self.experts.biases and expert_tensor > 1:
            raise ValueError(
                f"{key}.expert_tensor={expert_tensor}, but the experts of the {self.model_type} model have biases, "
                f"which every rank would add; expected 1: use {key}.expert"
            )
        if self.experts.ffn_size % expert_tensor:
            raise ValueError(
                f"{key}.expert_tensor={expert_tensor} does not divide the experts' feed-forward size "
                f"{self.experts.ffn_size}; choose a divisor of {self.experts.ffn_size}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model's stored weights.

        Raises:
            ValueError: the config names a dtype that torch does not have.
        """
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"config.json: dtype {self.dtype!r} is unknown; expected e.g. bfloat16 or float32")
        return dtype


def check_same_width(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raises ValueError unless hidden states of the two models can be compared without a bridge."""
    if student.hidden_size != teacher.hidden_size:
        raise ValueError(
            f"student (width {student.hidden_size}) and teacher (width {teacher.hidden_size}): hidden states can be "
            "compared directly only between models of the same width; fit a bridge and set bridge.path (of one of "
            "several teachers, teachers[i].bridge), or choose a teacher of the student's width"
        )


def concatenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Returns `torch.cat` of the tensors; torch is imported here, and not with the module."""
    import torch

    return torch.cat(list(tensors), dim)


class Form:
    """Joins HF tensors into a Megatron tensor (`join`/`split_to_hf`), and splits it over TP ranks (`shard`/`unshard`).

    The two functions of each pair are inverses. `axis` is the split dimension; None if every TP rank holds the whole
    tensor.
    """

    axis: int | None = None

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """Returns (name, rows) of each part that a Megatron checkpoint stores separately; empty: it has one tensor."""
        return ()

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """Joins the HF tensors; by default there is one, which is returned unchanged."""
        return tensors[0]

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Inverts `join`."""
        return (tensor,)

    def shard(self, tensor: torch.Tensor, rank: int, size: int, spec: ModelSpec) -> torch.Tensor:
        """Returns the part of the joined tensor that TP rank `rank` of `size` holds."""
        return tensor if self.axis is None else tensor.chunk(size, dim=self.axis)[rank]

    def unshard(self, shards: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """Returns the joined tensor from the shards of all TP ranks."""
        return shards[0] if self.axis is None else concatenated(shards, self.axis)


class Replicated(Form):
    """Form of a tensor that each TP rank holds whole, such as norms' weights."""


class ColumnParallel(Form):
    """Splits the output features."""

    axis = 0


class RowParallel(Form):
    """Splits the input features."""

    axis = 1


class TransposedRowParallel(RowParallel):
    """Stored as [inputs, outputs]; Megatron has [outputs, inputs], split along the inputs."""

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """[F, D] -> [D, F]."""
        return tensors[0].T

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """[D, F] -> [F, D]."""
        return (tensor.T,)


class Vocabulary(Form):
    """Embedding and head: padded with zero rows to a multiple of 128 per TP rank, then split along them."""

    axis = 0

    def shard(self, tensor: torch.Tensor, rank: int, size: int, spec: ModelSpec) -> torch.Tensor:
        """[V, D] -> [padded V / size, D]."""
        rows = spec.padded_vocab(size) // size
        part = tensor[rank * rows : (rank + 1) * rows]
        missing = rows - part.shape[0]
        return part if missing == 0 else concatenated([part, part.new_zeros(missing, *part.shape[1:])])

    def unshard(self, shards: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """[padded V / size, D] from each rank -> [V, D]."""
        return concatenated(shards)[: spec.vocab_size]


class GroupedQKV(Form):
    """q [A*C, ..], k [G*C, ..], v [G*C, ..] -> per group its A/G query heads, then its key and value: [(A+2G)*C, ..].

    Grouping makes a contiguous split over TP ranks carry whole groups.
    """

    axis = 0

    def __init__(self, heads: Heads | None = None) -> None:
        """Takes the heads of the layers that have this form; None: the model's, which are the same in all layers."""
        self._heads = heads

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(q, k, v) -> interleaved by group."""
        rest = tensors[0].shape[1:]
        heads = self._heads or spec.heads(1)
        parts = [tensor.reshape(heads.kv, -1, *rest) for tensor in tensors]
        return concatenated(parts, 1).reshape(-1, *rest)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Interleaved by group -> (q, k, v)."""
        rest = tensor.shape[1:]
        heads = self._heads or spec.heads(1)
        per_group = (spec.num_heads // heads.kv * heads.channels, heads.channels, heads.value_channels)
        parts = tensor.reshape(heads.kv, sum(per_group), *rest).split(per_group, dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)


class TiedGroupedQKV(GroupedQKV):
    """q, k -> as `GroupedQKV`, with k's rows in the place of v's, too, where nothing reads them."""

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(q, k) -> interleaved by group."""
        return super().join((*tensors, tensors[1]), spec)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Interleaved by group -> (q, k)."""
        return super().split_to_hf(tensor, spec)[:2]


class GateUp(Form):
    """gate [F, D], up [F, D] -> [2F, D]; each TP rank holds its part of gate above its part of up."""

    axis = 0

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(gate, up) -> stacked."""
        return concatenated(tensors)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Stacked -> (gate, up)."""
        return tensor.chunk(2)

    def shard(self, tensor: torch.Tensor, rank: int, size: int, spec: ModelSpec) -> torch.Tensor:
        """[2F, D] -> [2F / size, D]."""
        gate, up = tensor.chunk(2)
        return concatenated([gate.chunk(size)[rank], up.chunk(size)[rank]])

    def unshard(self, shards: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """[2F / size, D] from each rank -> [2F, D]."""
        halves = [shard.chunk(2) for shard in shards]
        return concatenated([gate for gate, _ in halves] + [up for _, up in halves])


class InterleavedGateUp(GateUp):
    """One tensor [D, 2F], or biases [2F], whose even columns are gate's and whose odd ones are up's -> as `GateUp`."""

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """[D, 2F] -> [2F, D]."""
        rows = tensors[0].T if tensors[0].dim() == 2 else tensors[0]
        return concatenated([rows[::2], rows[1::2]])

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """[2F, D] -> [D, 2F]."""
        gate, up = tensor.chunk(2)
        columns = concatenated([gate.unsqueeze(-1), up.unsqueeze(-1)], -1)  # [F, D, 2] or [F, 2]
        return (columns.movedim(-1, 1).flatten(0, 1).T if tensor.dim() == 2 else columns.flatten(),)


_PART = re.compile(r"(.+)\[(\d+)\]")


def stacked_part(name: str) -> tuple[str, int | None]:
    """Splits an HF name in a mapping into (tensor in the files, index of its first dimension; None: all of it).

    A mapping uses such names for the experts of a layer that the files hold in one tensor.

    >>> stacked_part("model.layers.0.mlp.experts.down_proj[3]")
    ('model.layers.0.mlp.experts.down_proj', 3)
    """
    found = _PART.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


def stack_parts(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Joins the parts of tensors (see `stacked_part`), which come one after the other; others pass through."""
    whole = ""
    parts: list[torch.Tensor] = []
    for name, tensor in stream:
        stored, index = stacked_part(name)
        if parts and stored != whole:
            yield whole, concatenated(parts)
            parts = []
        if index is None:
            yield name, tensor
            continue
        assert index == len(parts), f"{name} comes after {len(parts)} parts"
        whole = stored
        parts.append(tensor[None])
    if parts:
        yield whole, concatenated(parts)


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter: its name, the HF tensors that it consists of, and how they are joined and split.

    Names of layer parameters contain `{layer}`, which is 0-based over the whole model in HF and in Megatron names (a
    pipeline stage translates its local index before it looks up a mapping). `present` says whether a model has the
    parameter, `sparse` which layers have it: those with experts, those without, or (None) all; `layers` names them one
    by one (0-based) instead. Names of an expert's parameters contain `{expert}`, too, 0-based over all experts of the
    layer. An HF name may be a part of a tensor, see `stacked_part`.

    Attributes:
        layer, expert: where this parameter is, once the names are filled in; None outside layers and experts.
    """

    megatron: str
    hf: tuple[str, ...]
    form: Form
    present: Callable[[ModelSpec], bool] = lambda spec: True
    sparse: bool | None = None
    layer: int | None = None
    expert: int | None = None
    layers: frozenset[int] | None = None

    def at(self, layer: int, expert: int | None = None) -> ParamMapping:
        """Returns the mapping with the names of one layer and expert (both 0-based) filled in."""
        hf = tuple(name.format(layer=layer, expert=expert) for name in self.hf)
        megatron = self.megatron.format(layer=layer, expert=expert)
        return ParamMapping(megatron, hf, self.form, layer=layer, expert=expert)

    def in_layer(self, layer: int, spec: ModelSpec) -> list[ParamMapping]:
        """Returns the mappings of this kind of one layer (0-based): none, one, or one per expert."""
        if self.sparse is not None and self.sparse != spec.is_sparse(layer + 1):
            return []
        if self.layers is not None and layer not in self.layers:
            return []
        if "{expert}" not in self.megatron:
            return [self.at(layer)]
        assert spec.experts is not None
        return [self.at(layer, expert) for expert in range(spec.experts.count)]


@dataclass(frozen=True)
class Family:
    """One HF `model_type`: the parser of its config, and its weight mappings.

    `parse` gets the family, the content of a config.json, and the file's name for messages. `own` is False for a family
    whose models only Megatron-Bridge builds: the in-process engine has none of them.
    """

    model_type: str
    parse: Callable[[Family, dict, str], ModelSpec]
    mappings: tuple[ParamMapping, ...]
    own: bool = True

    def param_mappings(self, spec: ModelSpec) -> list[ParamMapping]:
        """Returns the mappings of all parameters of the model in a fixed order: embedding, layers, final norm, head."""
        present = [mapping for mapping in self.mappings if mapping.present(spec)]
        before = [mapping for mapping in present if mapping.megatron.startswith("embedding.")]
        layer = [mapping for mapping in present if "{layer}" in mapping.megatron]
        after = [mapping for mapping in present if mapping not in before and mapping not in layer]
        inner = [found for i in range(spec.num_layers) for mapping in layer for found in mapping.in_layer(i, spec)]
        return before + inner + after

    def hf_shape(self, name: str, spec: ModelSpec) -> tuple[int, ...] | None:
        """Returns an HF tensor's shape; None if the family does not know it, so the caller derives it from `spec`."""
        return None

    def provider_fields(self, spec: ModelSpec) -> dict[str, Any] | None:
        """Returns Megatron-Bridge's fields for run_config.yaml; None: `megatron_bridge_config` derives them."""
        return None


def require(hf_config: dict, key: str, source: str) -> object:
    """Returns `hf_config[key]`; raises a ValueError that names the key and the file if it is missing or null."""
    if hf_config.get(key) is None:
        raise ValueError(f"{source}: key {key!r} is missing; expected the complete config.json of the model")
    return hf_config[key]


def positive_integer(hf_config: dict, key: str, source: str) -> int:
    """Returns `hf_config[key]`; raises ValueError unless it is a positive integer."""
    value = require(hf_config, key, source)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {key}={value!r}; expected a positive integer as in the model's source")
    return value


def check_counts(hf_config: dict, source: str) -> None:
    """Raises ValueError if a config.json asks for more layers, or experts of a layer, than any model has.

    Lists of that many items are made long before anything else would fail.
    """
    inner = hf_config.get("text_config")
    for given in (hf_config, inner if isinstance(inner, dict) else {}):
        for key in sorted(_COUNTS & given.keys()):
            if isinstance(given[key], int) and given[key] > _MOST:
                raise ValueError(
                    f"{source}: {key}={given[key]}; expected at most {_MOST}: correct it as in the model's source"
                )


def code_files(hf_config: dict) -> list[str]:
    """Returns the names of the Python files that `auto_map` of a config.json names."""
    code = hf_config.get("auto_map") or []
    entries = code.values() if isinstance(code, dict) else [code]
    return sorted({f"{str(entry).rsplit('.', 1)[0]}.py" for entry in entries if entry})


def unused_code(hf_config: dict, source: str) -> str | None:
    """Returns a line about the Python files of a config.json's `auto_map`, none of which is run; None without any."""
    names = code_files(hf_config)
    if not names:
        return None
    return (
        f"{source}: auto_map names {', '.join(names)}, which is not run: model_type {hf_config.get('model_type')!r} is "
        "known without it"
    )


def refuse_sliding_window(hf_config: dict, source: str) -> None:
    """Raises ValueError if any layer would attend to a sliding window, or if a setting of windows is malformed."""
    typed = hf_config.get("layer_types") or []
    if not isinstance(typed, list) or not all(isinstance(kind, str) for kind in typed):
        raise ValueError(f"{source}: layer_types={typed!r}; expected a list of names as in the model's source")
    windowed = [kind for kind in typed if kind != "full_attention"]
    in_use = not typed and hf_config.get("use_sliding_window") and hf_config.get("sliding_window") is not None
    if in_use:  # without layer types, transformers' layers from max_window_layers on use the window
        first = hf_config.get("max_window_layers", _MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ValueError(f"{source}: max_window_layers={first!r}; expected an integer as in the model's source")
        in_use = first < positive_integer(hf_config, "num_hidden_layers", source)
    if windowed or in_use:
        raise ValueError(
            f"{source}: sliding-window attention is requested "
            f"(use_sliding_window={hf_config.get('use_sliding_window')}, "
            f"layer types {sorted(set(windowed))}) and not supported; expected full attention in every layer: "
            "choose a model without a window, or set use_sliding_window=false if it was trained without"
        )


def source_dtype(hf_config: dict) -> str:
    """Returns the dtype of the weights, from either spelling of the key; float32 if the config has neither."""
    return str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32").removeprefix("torch.")


def check_dtype(dtype: str, source: str) -> None:
    """Raises ValueError unless weights can have this dtype; checked at the start, because the export comes last."""
    if dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"{source}: dtype {dtype!r}; expected that of the weights, e.g. bfloat16 or float32")
