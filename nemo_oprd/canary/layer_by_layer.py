"""A transformers model that holds its decoder layers in memory one at a time, and the process that runs it.

`from_pretrained` loads the model as usual, with the conversion of tensors whose names or shapes differ between
checkpoint and model. Two things differ: the layers' tensors stay in their files, and quantised tensors are dequantised
as for training (`megatron/weights/dequantize.py`), because transformers would not round them to bfloat16. Each prompt
has a thread that runs the model's own forward. Before a layer the threads wait for each other; when all have arrived,
the previous layer is dropped and this one is loaded. So the code assumes nothing about a layer's inputs and outputs.
One thread computes at a time.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_oprd.canary.delta_rule import exact_delta_rule
from nemo_oprd.canary.reference import HEAD_ROWS, REPORT, STATES, ReferenceStates
from nemo_oprd.megatron.weights.dequantize import StoredTensors
from nemo_oprd.models import has_other_name, read_hf_config, transformers_config
from nemo_oprd.models.complete_config import LEFT_OUT, names_in_language_model
from nemo_oprd.models.quantization import Quantization, forget_quantization, known_quantization
from nemo_oprd.vllm.worker.nemo_oprd_layers import find_layers


def layered_states(directory: Path, prompts: list[list[int]], dtype: str, *, head: bool = False) -> ReferenceStates:
    """Does the work of `reference.reference_states` in this process.

    Raises:
        ValueError: transformers has no such model, the model has no single list of decoder layers, tensors are
            missing, or transformers does not return the state of every layer.
    """
    model = _load(directory, getattr(torch, dtype), head=head)
    turns = _Turns(len(prompts), model.layered)
    with exact_delta_rule(model, dtype=model.dtype):
        found = _run(model, turns, prompts, head=head)
    depth = len(model.layered.layers)
    for prompt in found:
        if len(prompt["hidden"]) != depth + 1:
            raise ValueError(f"{len(prompt['hidden'])} hidden states of {depth} layers; expected {depth + 1}")
    inner = {layer: [prompt["hidden"][layer] for prompt in found] for layer in range(depth)}
    return ReferenceStates(
        layers={**{layer: inner[layer] for layer in range(1, depth)}, depth: [prompt["final"] for prompt in found]},
        embeddings=inner[0],
        before_norm=[prompt["before_norm"] for prompt in found],
        dtype=dtype,
        peak_bytes=turns.peak_bytes,
        largest_layer_bytes=turns.largest_layer_bytes,
        total_bytes=turns.total_bytes,
        heads=[prompt["head"] for prompt in found] if head else [],
    )


class LayerLoader:
    """The decoder layers of `model` under `path`, and the loader of each layer's tensors."""

    def __init__(self, model: Any, path: str, load: Callable[[int], None]) -> None:
        self.model, self.load = model, load
        self.layers = list(model.get_submodule(path))

    def drop(self, index: int) -> None:
        """Forgets the parameters of a layer."""
        self.layers[index].to("meta")


class _Turns:
    """Lets one thread compute at a time, and loads a layer when all threads have passed the previous one."""

    def __init__(self, threads: int, layered: LayerLoader) -> None:
        self.layered, self.baton, self.alive = layered, threading.Lock(), -1
        self.barrier = threading.Barrier(threads, action=self._exchange)
        self.rest = _bytes(layered.model)
        self.peak_bytes = self.total_bytes = self.rest
        self.largest_layer_bytes = 0
        for layer in layered.layers:
            layer.register_forward_pre_hook(self._before_layer)

    def _before_layer(self, *_: Any) -> None:
        self.baton.release()
        try:
            self.barrier.wait()
        finally:
            self.baton.acquire()

    def _exchange(self) -> None:
        if self.alive >= 0:
            self.layered.drop(self.alive)
        self.alive += 1
        self.layered.load(self.alive)
        held = _bytes(self.layered.model)
        self.peak_bytes = max(self.peak_bytes, held)
        self.total_bytes += held - self.rest
        self.largest_layer_bytes = max(self.largest_layer_bytes, held - self.rest)


def _bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the parameters that are in memory."""
    return sum(p.nbytes for p in model.parameters() if not p.is_meta)


def _run(model: Any, turns: _Turns, prompts: list[list[int]], *, head: bool) -> list[dict[str, Any]]:
    """Returns per prompt "hidden": transformers' states, "final": those after the final norm, "before_norm": the last
    block's, and with a head "head": see `ReferenceStates.heads`."""
    found: list[dict[str, Any]] = [{} for _ in prompts]
    errors: list[Exception] = []
    here = threading.local()

    def after_last_block(_module: Any, _args: Any, output: Any) -> None:
        here.found["before_norm"] = _rows(output[0] if isinstance(output, tuple) else output)

    def compute(number: int) -> None:
        here.found = found[number]
        with turns.baton, torch.no_grad():
            try:
                ids = torch.tensor([prompts[number]])
                more = {"logits_to_keep": HEAD_ROWS} if head else {}
                out = model(input_ids=ids, output_hidden_states=True, use_cache=False, **more)
                found[number]["hidden"] = [_rows(state) for state in out.hidden_states]
                found[number]["final"] = _rows(out.hidden_states[-1] if head else out.last_hidden_state)
                if head:
                    found[number]["head"] = _next_tokens(_rows(out.logits), prompts[number])
            except Exception as error:
                errors.append(error)
                turns.barrier.abort()

    model.layered.layers[-1].register_forward_hook(after_last_block)
    threads = [threading.Thread(target=compute, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):  # that one only says that another thread failed
            raise error
    return found


def _rows(state: torch.Tensor) -> torch.Tensor:
    """Converts [1, T, D] to float32 [T, D]."""
    return state[0].float().clone()


def _next_tokens(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Returns float32 [n - 1, 2], next token's log-probability and entropy, from logits [n, V] of the last n rows."""
    logprobs = logits[:-1].log_softmax(-1)
    drawn = logprobs.gather(1, torch.tensor(ids[len(ids) - len(logprobs) :])[:, None])[:, 0]
    return torch.stack([drawn, -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)], dim=1)


def _load(directory: Path, dtype: torch.dtype, *, head: bool) -> Any:
    """Loads the model, with or without its head, except its layers, which `model.layered`, a `LayerLoader`, loads."""
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it reports the head, which the states don't need
    config = transformers_config(directory)
    quantization = known_quantization(read_hf_config(directory))
    if quantization is not None:
        forget_quantization(config)
    kind, mapping = AutoModel, transformers.MODEL_MAPPING
    if head:
        kind, mapping = AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        cls = mapping[type(config)]
    except KeyError:
        raise ValueError(f"transformers' {kind.__name__} has no model for {type(config).__name__}") from None
    model, info = _without_layers(cls, quantization, renamed=has_other_name(directory)).from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",  # one expert after the other, in the model's precision
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}; expected all of the model")
    return model.eval()


def _without_layers(cls: Any, quantization: Quantization | None, *, renamed: bool) -> Any:
    """Makes a subclass of a transformers model whose `from_pretrained` leaves the layers' tensors in their files."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    def load_pretrained(model: Any, state_dict: Any, checkpoint_files: list[str], load_config: Any) -> tuple[Any, None]:
        path = find_layers(model, model.config.get_text_config().num_hidden_layers)
        files = _files(checkpoint_files, renamed=renamed)
        stored = StoredTensors(files, quantization, "the model's files")
        rest, of_layer = _divided(stored.names, model, load_config.weight_mapping or [], path)

        def read(names: list[str]) -> Any:
            with ExitStack() as opened:  # an open file stays mapped, page by page as it is read
                handles: dict[str, Any] = {}

                def stored_slice(name: str) -> Any:
                    file, in_file = files[name]
                    if file not in handles:
                        handles[file] = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
                    return handles[file].get_slice(in_file)

                slices = {name: stored.slice(name, stored_slice) for name in names}
                return convert_and_load_state_dict_in_model(model, slices, load_config, None)[0]

        def load(index: int) -> None:
            read(of_layer.get(index, []))
            layer = model.layered.layers[index]
            absent = [name for name, p in (*layer.named_parameters(), *layer.named_buffers()) if p.is_meta]
            if absent:
                raise ValueError(f"layer {index + 1} has no tensor for {absent[0]}; expected all of the model")

        model.layered = LayerLoader(model, path, load)
        info = read(rest)
        # the layers are missing on purpose, and would be filled with random numbers
        info.missing_keys = {name for name in info.missing_keys if not name.startswith(f"{path}.")}
        return info, None

    members = {"_load_pretrained_model": staticmethod(load_pretrained), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


def _files(checkpoint_files: list[str], *, renamed: bool) -> dict[str, tuple[str, str]]:
    """Maps each tensor's name to its file and its name there, which differs in a `renamed` model alone."""
    found: dict[str, tuple[str, str]] = {}
    for file in checkpoint_files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            stored = [name for name in opened.keys() if not (renamed and name.startswith(LEFT_OUT))]  # noqa: SIM118
            own = names_in_language_model(stored) if renamed else {name: name for name in stored}
        found |= {name: (file, own[name]) for name in own}
    return found


def _divided(
    checkpoint: Iterable[str], model: Any, mapping: list[Any], path: str
) -> tuple[list[str], dict[int, list[str]]]:
    """Returns (the tensors outside the layers, those of each layer by its index), by their names in the checkpoint."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = model.state_dict()
    rest: list[str] = []
    of_layer: dict[int, list[str]] = {}
    for name in sorted(checkpoint):
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target not in names and name in names:
            target = name
        number = target.removeprefix(f"{path}.").partition(".")[0] if target.startswith(f"{path}.") else ""
        if number.isdigit():
            of_layer.setdefault(int(number), []).append(name)
        else:
            rest.append(name)
    return rest, of_layer


# The process that computes transformers' states: `python -m nemo_oprd.canary.layer_by_layer FOLDER`.
#
# It reads its arguments as JSON from stdin, and writes the states and a report into the folder. An error that a user
# can understand becomes the report, as one line.


def main() -> None:
    """Computes the states that stdin requests; writes them and a report into FOLDER, or only the report of an error."""
    folder, asked = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        states = layered_states(Path(asked["directory"]), asked["prompts"], asked["dtype"], head=asked["head"])
    except (ValueError, OSError, ImportError, KeyError, NotImplementedError, AttributeError) as error:
        first = " ".join(str(error).split())[:400]
        text = f"{asked['directory']}: transformers cannot compute the canary ({type(error).__name__}: {first}); "
        text += "expected a model that transformers runs from safetensors without code of its own"
        report: dict[str, int | str] = {"error": text}
    else:
        save_file(states.tensors(), folder / STATES)
        names = ("dtype", "peak_bytes", "largest_layer_bytes", "total_bytes")
        report = {name: getattr(states, name) for name in names}
    (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
