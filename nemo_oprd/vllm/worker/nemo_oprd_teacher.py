"""The teacher's part of vLLM's workers: keeps the requested rows of the requested layers of a request's prompt.

vLLM imports this module in its own environment, like `nemo_oprd_worker.py`. vLLM computes a request with a
`StateRequest` (`nemo_oprd_requests.py`) in its `extra_args` like any other; forward hooks on the decoder layers copy
its rows from every chunk of the prompt, and the first tensor rank writes the answer before the request ends. An error
in a hook becomes the answer of its job, because an exception would end the engine. Only one error ends it: a tensor
rank that fails to compute its part of the logits would leave the others waiting, or mix up the results of collectives.

**What is the residual stream?** A layer returns it, or a pair. In most families the stream is the sum of the pair
(hidden states and a residual that is not yet added), in some its first part. No table of families is needed: the stream
is the reading from which the model's final norm makes the model's output. `_Reading` tries both on the last layer at
the first request after `nemo_oprd_install`, and repeats the comparison in every forward pass with requested rows. The
canary shows that other layers have the same form as the last one.

Hooks run in eager mode only: a compiled model would silently call none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import vllm
from nemo_oprd_bridge import PROJECTED_ROWS, BridgeFile
from nemo_oprd_files import FOLDER, open_bucket
from nemo_oprd_layers import find_layers
from nemo_oprd_requests import GENERATION, LOGPROB_COLUMNS, STATE_REQUEST, AnswerFolder, StateRequest, weights_digest

logger = logging.getLogger(__name__)

# allowed relative deviation of a row whose final norm is computed once more, by dtype
_NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Projection:
    """The maps of a bridge on the worker's device, see `nemo_oprd_bridge.py`; D hidden size, R bridge rank, n rows.

    Attributes:
        layers: for each map, the layer whose states it projects.
    """

    def __init__(self, file: BridgeFile, device: torch.device) -> None:
        """Reads the maps; ValueError if they are not those that `file` describes."""
        raw = file.read(open_bucket(file.path, file.size))
        values = torch.frombuffer(raw, dtype=torch.float32).view(len(file.layers), 1 + file.rank, file.width).to(device)
        self.digest, self.layers, self.rank = file.digest, file.layers, file.rank
        self._means, self._bases = values[:, :1], values[:, 1:]

    def project(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Projects the states [n, D] of each map's layer; returns float32 [maps, n, R]."""
        found = torch.empty(len(states), len(states[0]), self.rank)
        for at, rows in enumerate(states):
            for start in range(0, len(rows), PROJECTED_ROWS):
                part = rows[start : start + PROJECTED_ROWS].to(self._means.device, torch.float32)
                found[at, start : start + len(part)] = ((part - self._means[at]) @ self._bases[at].T).cpu()
        return found


@dataclass
class _Job:
    """A request with a state request, over its forward passes.

    Attributes:
        ids: the whole prompt.
        bridge: projects the states before they leave.
        layers: the distinct layers of the state request, ascending.
        states: [layers, rows, D] in the model's dtype; `filled` [layers, rows] marks those present.
        final: the final rows [n, D], or for tokens float32 [n, 2]; `final_filled` [n].
        error: the first error; it is then the answer.
        last: the last requested row, -1 if none is requested.
    """

    state_request: StateRequest
    ids: list[int]
    width: int
    dtype: torch.dtype
    bridge: Projection | None = None
    error: str | None = None
    last: int = field(init=False)
    layers: list[int] = field(init=False)
    rows: torch.Tensor = field(init=False)
    final_rows: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)
    filled: torch.Tensor = field(init=False)
    final: torch.Tensor = field(init=False)
    final_filled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        asked = self.state_request
        self.last = max([*asked.rows[-1:], *asked.final_rows[-1:]], default=-1)
        self.rows = torch.tensor(asked.rows, dtype=torch.int64)
        self.final_rows = torch.tensor(asked.final_rows, dtype=torch.int64)
        self.layers = sorted({*asked.layers})
        self.states = torch.empty(len(self.layers), len(asked.rows), self.width, dtype=self.dtype)
        self.filled = torch.zeros(len(self.layers), len(asked.rows), dtype=torch.bool)
        columns, dtype = (self.width, self.dtype) if asked.tokens is None else (LOGPROB_COLUMNS, torch.float32)
        self.final = torch.empty(len(asked.final_rows), columns, dtype=dtype)
        self.final_filled = torch.zeros(len(asked.final_rows), dtype=torch.bool)

    def answer(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Returns (the header's fields that describe the result, the values)."""
        places = [self.layers.index(layer) for layer in self.state_request.layers]
        said: dict[str, Any] = {"filled": int(self.filled[places].sum() + self.final_filled.sum())}
        states = self.states
        if self.bridge is not None:
            said["bridge"] = self.bridge.digest
            states = self.bridge.project([self.states[at] for at in places])
        return said, [states, self.final]

    @contextmanager
    def answers_errors(self) -> Iterator[None]:
        """Turns an error inside this context into the answer; raises _OutOfStep again."""
        try:
            yield
        except _OutOfStep:
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Logs the error and makes it the answer of the job, unless an earlier error is."""
        if self.error is None:
            logger.error("a teacher's hook failed", exc_info=error)
            self.error = f"{type(error).__name__}: {error}"


class _OutOfStep(Exception):  # noqa: N818 - not answered
    """Raised if this tensor rank left a computation of all ranks. The engine ends; the trainer restarts the server."""


@dataclass(frozen=True)
class _Span:
    """The tokens of a job in one forward pass: `start` in the flat batch, positions `first`..`end` - 1."""

    job: _Job
    start: int
    first: int
    end: int

    def inside(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (indices among `rows` of those that this pass computes, their indices in the flat batch)."""
        found = ((rows >= self.first) & (rows < self.end)).nonzero().flatten()
        return found, self.start + rows[found] - self.first

    @property
    def requested(self) -> torch.Tensor:
        """The indices in the flat batch of this pass's rows that the state request names, in any layer."""
        return torch.cat([self.inside(self.job.rows)[1], self.inside(self.job.final_rows)[1]])


def _first(output: Any) -> torch.Tensor:
    """Returns the tensor, or the first of a tuple, as [tokens, D]: transformers' models return [1, tokens, D]."""
    tensor = output[0] if isinstance(output, tuple) else output
    return tensor.flatten(0, -2)


def _summed(output: Any) -> torch.Tensor | None:
    """Returns the sum of a pair; None if the output is no pair of tensors."""
    pair = output[:2] if isinstance(output, tuple) else ()
    if len(pair) < 2 or not isinstance(pair[1], torch.Tensor) or pair[1].shape != pair[0].shape:
        return None
    return (pair[0] + pair[1]).flatten(0, -2)


def _picked(output: Any, tokens: torch.Tensor, *, summed: bool) -> torch.Tensor:
    """Picks rows of the residual stream from a layer's output, on the layer's device."""
    tokens = tokens.to(_first(output).device)
    value = _first(output).index_select(0, tokens)
    if summed and isinstance(output, tuple) and isinstance(output[1], torch.Tensor):
        value = value + output[1].flatten(0, -2).index_select(0, tokens)
    return value


def _normed(norm: torch.nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """Computes a norm of rows [n, D] once more, on a copy: a norm may change its input in place."""
    output = norm(stream.clone())
    return output[0] if isinstance(output, tuple) else output


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest relative deviation of a row."""
    difference = (found.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1).clamp_min(1e-30)).max())


@dataclass
class _Reading:
    """The rule that reads the stream: the final norm, and whether the stream is the sum of a layer's outputs."""

    norms: list[torch.nn.Module]
    tolerance: float
    norm: torch.nn.Module | None = None
    summed: bool = False
    unreadable: str = "nothing was computed since the capture was installed; expected a probe first"

    def learn(self, candidates: list[tuple[bool, torch.Tensor]], final: torch.Tensor) -> None:
        """Finds the norm and the candidate, (whether it sums, the stream [n, D]), that give the final states [n, D].

        If none does, `unreadable` holds the reason.
        """
        try:
            self._learn(candidates, final)
        except Exception as error:
            logger.exception("this model can't be read")
            self.unreadable = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    def _learn(self, candidates: list[tuple[bool, torch.Tensor]], final: torch.Tensor) -> None:
        fits = [
            (_deviation(_normed(norm, stream), final), summed, norm)
            for norm in self.norms
            for summed, stream in candidates
        ]
        best = min(fits, key=lambda fit: fit[0], default=None)
        if best is None or not best[0] < self.tolerance:
            said = (
                "it has no norm beside its layers" if best is None else f"the nearest reading is off by {best[0]:.1e}"
            )
            raise ValueError(
                f"what the last layer returns, normed, is not what the model returns ({said}); expected hidden states, "
                "or hidden states and a residual: this family can't be read"
            )
        _, self.summed, self.norm = best

    def check(self, stream: torch.Tensor, final: torch.Tensor) -> None:
        """Raises ValueError unless the last layer's stream, normed, is the final state; both [n, D]."""
        assert self.norm is not None
        if len(stream) and not (found := _deviation(_normed(self.norm, stream), final)) < self.tolerance:
            raise ValueError(f"the last layer's states, normed, differ from the final states by {found:.1e}")


class _Capture:
    """The hooks of one worker, and its jobs."""

    def __init__(self, worker: Any) -> None:
        config = worker.vllm_config.model_config
        self.runner, self.depth = worker.model_runner, config.hf_text_config.num_hidden_layers
        self.width, self.dtype, self.vocabulary = config.get_hidden_size(), config.dtype, config.get_vocab_size()
        self.model = self.runner.get_model()
        self.folder = AnswerFolder(os.environ[FOLDER])
        self.writes = worker.rank == 0  # all ranks of a server are tensor ranks
        self.is_alone = worker.vllm_config.parallel_config.tensor_parallel_size == 1
        self.generation = int(os.environ[GENERATION])
        self.jobs: dict[str, _Job] = {}
        self.bridges: dict[str, Projection] = {}  # by digest
        self.over: set[str] = set()  # requests that have their answer, or whose state request is invalid
        self.scheduled: Any = None  # the scheduler's output for the current forward pass
        self.spans: list[_Span] | None = None
        self.last: Any = None  # the part of the last layer's output that is still needed
        path = find_layers(self.model, self.depth)
        holder, layers = (self.model.get_submodule(name) for name in (path.rpartition(".")[0], path))
        norms = [child for name, child in holder.named_children() if "norm" in name.lower() or name.startswith("ln")]
        self.reading = _Reading(norms, _NORM_TOLERANCE[self.dtype])
        for number, layer in enumerate(layers, 1):
            layer.register_forward_hook(self._guarded(partial(self._keep, number)))
        self.model.register_forward_hook(self._guarded(self._end))
        self.model.register_forward_hook(self._guarded(self._hand_over_all))  # also after an error
        self._wrap_forward_passes()

    def _wrap_forward_passes(self) -> None:
        execute = self.runner.execute_model

        def execute_model(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            self.scheduled, self.spans, self.last = scheduler_output, None, None
            try:
                return execute(scheduler_output, *arguments, **named)
            finally:
                self.scheduled = None

        self.runner.execute_model = execute_model

    def _guarded(self, act: Callable[[Any], None]) -> Callable[..., None]:
        """Makes a forward hook that turns an error of `act` into the answer of the jobs in this pass."""

        def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
            if self.scheduled is None:  # a pass without requests, when the server starts
                return
            try:
                act(output)
            except _OutOfStep:
                raise
            except Exception as error:
                for span in self.spans or ():
                    span.job.fail(error)

        return hook

    def _plan(self) -> list[_Span]:
        """Returns the spans of this forward pass; looks its jobs up once, and drops those of aborted requests."""
        if self.spans is None:
            self.spans, batch, start = [], self.runner.input_batch, 0
            for key in set(self.jobs) - set(self.runner.requests):  # aborted by the trainer
                del self.jobs[key]
            self.over &= set(self.runner.requests)
            for index in range(batch.num_reqs):
                key = batch.req_ids[index]
                count, done = self.scheduled.num_scheduled_tokens[key], int(batch.num_computed_tokens_cpu[index])
                job = self._job(key)
                if job is not None:
                    self.spans.append(_Span(job, start, done, done + count))
                start += count
        return self.spans

    def _job(self, key: str) -> _Job | None:
        """Returns the job of a request, new if necessary; None without a valid state request, or if it is answered."""
        request = self.runner.requests[key]
        text = (getattr(request.sampling_params, "extra_args", None) or {}).get(STATE_REQUEST)
        if text is None or key in self.over:
            return None
        if key not in self.jobs:
            ids, asked = list(request.prompt_token_ids or []), None
            try:
                asked = StateRequest.parse(text, len(ids), self.depth, self.vocabulary)
                self.jobs[key] = _Job(asked, ids, self.width, self.dtype, self._bridge(asked))
            except Exception as error:
                logger.warning(f"a request asks for what it can't have: {error}")
                self.over.add(key)
                if asked is not None:  # else the answer has no name
                    self._write(asked.name, {"error": f"{type(error).__name__}: {error}"})
                return None
        return self.jobs[key]

    def _bridge(self, asked: StateRequest) -> Projection | None:
        """Returns the projection of a state request's states; ValueError if it is not loaded, or has other maps."""
        if not asked.bridge:
            return None
        found = self.bridges.get(asked.bridge)
        if found is None or (found.layers, found.rank) != (asked.layers, asked.rank):
            have = ", ".join(self.bridges) or "none"
            raise ValueError(
                f"bridge {asked.bridge:.60} for layers {asked.layers}: expected one that was loaded: {have}"
            )
        return found

    def _keep(self, layer: int, output: Any) -> None:
        """Copies the requested rows of a layer."""
        spans = self._plan()
        if layer == self.depth:
            self._keep_last(output, spans)
        for span in spans:
            with span.job.answers_errors():
                self._put(span, layer, lambda tokens: _picked(output, tokens, summed=self.reading.summed))

    def _put(self, span: _Span, layer: int, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        job = span.job
        if layer in job.layers and job.error is None:
            if self.reading.norm is None:
                raise ValueError(self.reading.unreadable)
            inside, tokens = span.inside(job.rows)
            at = job.layers.index(layer)
            job.states[at].index_copy_(0, inside, pick(tokens).cpu())
            job.filled[at, inside] = True

    def _keep_last(self, output: Any, spans: list[_Span]) -> None:
        """Copies the last layer's rows that `_end` compares with the final state; the final norm may work in place."""
        if self.reading.norm is None:
            summed = _summed(output)
            self.last = [(False, _first(output).clone()), *([] if summed is None else [(True, summed)])]
        else:
            self.last = [_picked(output, span.requested, summed=self.reading.summed) for span in spans]

    def _end(self, output: Any) -> None:
        """Learns the reading, or checks it on the last layer's stream and the final states; copies the final rows."""
        spans, final = self._plan(), _first(output)
        was_read = self.reading.norm is not None
        if not was_read:
            self.reading.learn(self.last, final)
        for i, span in enumerate(spans):
            with span.job.answers_errors():
                if was_read:
                    self.reading.check(self.last[i], final.index_select(0, span.requested.to(final.device)))
                self._put(span, self.depth + 1, lambda tokens: _picked(final, tokens, summed=False))
        for span in spans:
            with span.job.answers_errors():
                self._put_final(span, final)

    def _hand_over_all(self, _: Any) -> None:
        """Hands over the jobs whose last row this pass has computed.

        Jobs with an error wait for that, too: every tensor rank has the same jobs, though only one may have failed.
        """
        done = {id(span.job) for span in self._plan() if span.end > span.job.last}
        for key, job in list(self.jobs.items()):
            if id(job) in done:
                del self.jobs[key]
                self.over.add(key)  # the trainer ignores its sampled token
                self._hand_over(job)

    def _put_final(self, span: _Span, final: torch.Tensor) -> None:
        """Stores the rows of the output loss; all tensor ranks compute the logits together, even for a failed job."""
        job = span.job
        inside, tokens = span.inside(job.final_rows)
        states = final.index_select(0, tokens.to(final.device))
        if job.state_request.tokens is None:
            job.final.index_copy_(0, inside, states.cpu())
        else:
            drawn = torch.tensor(job.state_request.tokens, dtype=torch.int64)[inside]
            for start in range(0, len(inside), job.state_request.chunk):
                part = slice(start, start + job.state_request.chunk)
                logits = self._logits(states[part])
                with job.answers_errors():
                    if logits is not None:
                        job.final.index_copy_(
                            0, inside[part], _logprob_and_entropy(logits, drawn[part], job.state_request)
                        )
        job.final_filled[inside] = True

    def _logits(self, states: torch.Tensor) -> torch.Tensor | None:
        """Computes logits with scale, bias, cap; None on ranks without them. _OutOfStep if one of several fails."""
        try:
            return self.model.compute_logits(states)
        except Exception as error:
            if self.is_alone:
                raise
            raise _OutOfStep(f"logits of a teacher: {type(error).__name__}: {error}") from error

    def _hand_over(self, job: _Job) -> None:
        """Writes the answer of a job."""
        if not self.writes:
            return
        header, values = (
            job.state_request.header(job.ids, self.width, str(self.dtype).removeprefix("torch."), self.generation),
            list[torch.Tensor](),
        )
        with job.answers_errors():
            said, values = job.answer()
            header |= said
        if job.error is not None:
            header, values = {"error": job.error}, []
        self._write(
            job.state_request.name,
            header,
            *(part.contiguous().view(torch.uint8).numpy().reshape(-1).data for part in values),
        )

    def _write(self, name: str, header: dict[str, Any], *values: Any) -> None:
        """Writes an answer, on the first tensor rank: the others have the same rows."""
        if not self.writes:
            return
        try:
            self.folder.write(name, header, *values)
        except (OSError, ValueError) as error:
            logger.warning(f"an answer was not written: {error}")
            with suppress(OSError, ValueError):  # full shared memory may still have room for a line
                self.folder.write(name, {"error": f"the answer was not written: {error}"})


def _logprob_and_entropy(logits: torch.Tensor, tokens: torch.Tensor, asked: StateRequest) -> torch.Tensor:
    """Computes (log-probability, entropy), float32 [n, 2], from logits [n, V or more]."""
    scaled = logits[:, : asked.vocabulary].float() / asked.temperature
    for start, end in asked.gaps:
        scaled[:, start:end] = -float("inf")
    logprobs = scaled.log_softmax(-1)
    drawn = logprobs.gather(1, tokens.to(logprobs.device)[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)  # an id that the head excludes has logit -inf
    return torch.stack([drawn, entropy], dim=1).cpu()


class TeacherExtension:
    """Methods that vLLM adds to its worker; the trainer calls them by `/collective_rpc`."""

    def nemo_oprd_install(self) -> None:
        """Installs the hooks, once."""
        worker: Any = self
        if getattr(worker, "_nemo_oprd_capture", None) is None:
            worker._nemo_oprd_capture = _Capture(worker)

    def nemo_oprd_load_bridge(self, file: dict[str, Any]) -> dict[str, Any]:
        """Loads a bridge's maps from the fields of a `BridgeFile`; returns {digest} or {error}.

        If only one of several workers raised, vLLM would read its error as the answer to a later call.
        """
        worker: Any = self
        try:
            bridge = Projection(BridgeFile(**file), worker.device)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        worker._nemo_oprd_capture.bridges[bridge.digest] = bridge
        return {"digest": bridge.digest}

    def nemo_oprd_describe(self) -> dict[str, Any]:
        """Describes the model and settings that compute the states, as far as the trainer relies on them."""
        worker: Any = self
        config = worker.vllm_config
        model, text = config.model_config, config.model_config.hf_text_config
        runners = {f"{kind.__module__}.{kind.__name__}" for kind in type(worker.model_runner).__mro__}
        return {
            "num_hidden_layers": text.num_hidden_layers,
            "hidden_size": model.get_hidden_size(),
            "vocab_size": model.get_vocab_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "eager": bool(model.enforce_eager),
            "runner_v1": "vllm.v1.worker.gpu_model_runner.GPUModelRunner" in runners,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "tensor": config.parallel_config.tensor_parallel_size,
            "pipeline": config.parallel_config.pipeline_parallel_size,
            "lora": config.lora_config is not None,
            "speculative": config.speculative_config is not None,
            "quantization": model.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "load_format": str(config.load_config.load_format),
            "float32_matmul": torch.get_float32_matmul_precision(),
            "weights": weights_digest(model.model),
            "chunk": config.scheduler_config.max_num_batched_tokens,
            "longest": model.max_model_len - 1,  # one more is sampled
            "generation": int(os.environ[GENERATION]),
            "version": f"vllm {vllm.__version__} torch {torch.__version__} {worker.device.type}",
        }
