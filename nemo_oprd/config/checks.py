"""Checks rules between groups of a configuration: contradictions, and settings that this version does not support.

Rules for one key and between keys of one group are in the schema; rules that need the models' config.json (layers in
range, sizes that divide) are in `run/checks.py`. Every message names the keys, the expected value and the fix.
"""

from __future__ import annotations

import re

from nemo_oprd.config.messages import check_key
from nemo_oprd.config.schema import Config, ModelSource, ParallelConfig
from nemo_oprd.config.teacher_kinds import RECORDS, TEACHER_KINDS
from nemo_oprd.config.weight_schedule import largest, vanishes, weight_at

# the smallest `rollout.max_lag` whose halves are at least one step each
SMALLEST_STREAM_LAG = 2


def check(config: Config) -> None:
    """Raises ValueError for values that contradict each other, or that this version does not support."""
    for key in config.train.allow_changes:
        check_key(Config, key, "train.allow_changes")
    _check_source("student", config.student)
    _check_teachers(config)
    _check_self_distillation(config)
    _check_served_teachers(config)
    if config.teacher.reads == "text":
        _check_reading_text(config)
    _check_reuse(config)
    _check_correction(config)
    _check_router_replay(config)
    _check_schedules(config)
    _check_stop_after(config)
    _check_lag(config)
    _check_bridge(config)
    _check_evaluation(config)


def _check_source(key: str, model: ModelSource) -> None:
    if model.hf_path is None and model.checkpoint is None:
        raise ValueError(
            f"{key}.hf_path={model.hf_path} and {key}.checkpoint={model.checkpoint}: expected a model; set hf_path to "
            "the directory of a Hugging Face model, or checkpoint to that of a Megatron checkpoint"
        )


def _check_no_source(model: ModelSource, why: str) -> None:
    if model.hf_path is not None or model.checkpoint is not None:
        raise ValueError(
            f"teacher.hf_path={model.hf_path} and teacher.checkpoint={model.checkpoint} with {why}; expected neither: "
            "set both to null"
        )
    if model.provider != "own":
        raise ValueError(
            f"teacher.provider={model.provider} with {why}; expected own: leave teacher.provider out, and set the "
            "provider where the model is named"
        )


def _check_teachers(config: Config) -> None:
    """Raises ValueError unless every teacher has a model, and no two in a list share a data source or a name."""
    teachers = config.teachers
    if not teachers:
        if TEACHER_KINDS[config.teacher.weights].own_model:
            _check_source("teacher", config.teacher)
        return
    _check_no_source(config.teacher, "a list of teachers")
    owner: dict[str | None, int] = {}
    labels: dict[str, int] = {}
    for i, teacher in enumerate(teachers):
        _check_source(f"teachers[{i}]", teacher)
        if teacher.data_sources is not None and not teacher.data_sources:
            raise ValueError(
                f"teachers[{i}].data_sources=[]: expected names, or null for all that no other teacher has; give some"
            )
        if teacher.bridge == "full_width":
            raise ValueError(
                f"teachers[{i}].bridge=full_width is learned with the student, which several teachers rule out; "
                "expected the directory of a fitted bridge: run fit-bridge with this teacher and name its output"
            )
        sources: list[str | None] = [None] if teacher.data_sources is None else [*dict.fromkeys(teacher.data_sources)]
        for source in sources:
            what = "null, all that no other teacher has" if source is None else repr(source)
            if source in owner:
                raise ValueError(
                    f"teachers[{owner[source]}] and teachers[{i}] both have the data source {what}; expected one "
                    "teacher for each: take it from one of them"
                )
            owner[source] = i
        if labels.setdefault(teacher.label, i) != i:
            raise ValueError(
                f"teachers[{labels[teacher.label]}] and teachers[{i}] are both called {teacher.label!r} in metrics; "
                "expected different names: set teachers[i].name"
            )
    if config.bridge.path != "none" or config.bridge.train:
        raise ValueError(
            f"bridge.path={config.bridge.path} and bridge.train={str(config.bridge.train).lower()} with several "
            "teachers: each has a frozen bridge of its own; expected none and false: set teachers[i].bridge"
        )
    if config.evaluation.teacher:
        raise ValueError(
            "evaluation.teacher=true with several teachers; expected false: evaluate each with `nemo-oprd evaluate`"
        )


def _check_self_distillation(config: Config) -> None:
    """Refuses settings that contradict a teacher that is the student itself."""
    teacher, weights = config.teacher, config.teacher.weights
    kind = TEACHER_KINDS[weights]
    if kind.own_model:
        return
    why = f"teacher.weights={weights}"
    if config.teachers:
        raise ValueError(f"{why} with a list of teachers; expected own: remove one of the two")
    _check_no_source(teacher, f"{why}, where the student is its own teacher")
    if not config.own_prompts:
        raise ValueError(
            f"{why} with teacher.prompt=null: the student would be compared with itself on the same tokens; expected a "
            "template with privileged information: set e.g. teacher.prompt='{prompt} The answer is {answer}.', or a "
            "teacher.system_prompt"
        )
    if teacher.reads == "text":
        raise ValueError(f"{why} with teacher.reads=text: the tokenizer is the same; expected ids: set it")
    if config.bridge.path != "none":
        raise ValueError(
            f"bridge.path={config.bridge.path} with {why}: the two models have the same shape; expected none: set it"
        )
    if config.evaluation.teacher:
        raise ValueError(
            f"evaluation.teacher=true with {why}: without the information in teacher.prompt the teacher equals the "
            "student; expected false: set it"
        )
    if not kind.moves:
        return
    if teacher.placement == "dedicated" or teacher.parallel != ParallelConfig() or teacher.offload:
        raise ValueError(
            f"teacher.placement={teacher.placement}, offload={str(teacher.offload).lower()} or a parallel of its own "
            f"with {why}: such a teacher has the student's ranks and layout; expected them left out: remove them"
        )
    if config.train.updates_per_rollout > 1:
        raise ValueError(
            f"train.updates_per_rollout={config.train.updates_per_rollout} with {why}: the second update would have "
            "another teacher than the first; expected 1: set it, or use initial weights"
        )


def _check_served_teachers(config: Config) -> None:
    """Refuses settings that contradict teachers on vLLM servers, or have no effect on them."""
    _check_teacher_endpoints(config)
    teacher, served = config.teacher, config.served_teachers
    if not served:
        return
    why = "teacher.engine=vllm" if not config.teachers else f"teachers[{served[0]}].engine=vllm"
    if not TEACHER_KINDS[teacher.weights].own_model:
        raise ValueError(
            f"teacher.weights={teacher.weights} with {why}: the servers load the weights of a file once and never "
            "again; expected own: set it, or teacher.engine=megatron"
        )
    has_layout = teacher.parallel != ParallelConfig() or teacher.placement == "dedicated" or teacher.offload
    if has_layout and not config.has_own_teachers:
        raise ValueError(
            f"teacher.placement={teacher.placement}, offload={str(teacher.offload).lower()} or teacher.parallel with "
            f"{why}: no rank of this job holds the teacher; expected them left out: remove them, and lay out the "
            "servers by teacher.vllm.tensor, replicas and placement"
        )
    texts = teacher.reads != "ids" or bool(config.own_prompts)
    if teacher.vllm.ahead_gib and (texts or config.rollout.mode != "exact"):
        raise ValueError(
            f"teacher.vllm.ahead_gib={teacher.vllm.ahead_gib:g} with teacher.reads={teacher.reads}, teacher.prompt or "
            f"rollout.mode={config.rollout.mode}: what the teacher reads is known when the batch is complete; expected "
            "ids without a prompt, and exact: set teacher.vllm.ahead_gib=0"
        )
    if teacher.vllm.ahead_gib and (urls := [url for number in served for url in config.teacher_endpoints(number)]):
        raise ValueError(
            f"teacher.vllm.ahead_gib={teacher.vllm.ahead_gib:g} with servers at {urls}, which somebody else runs: "
            "early answers wait in a folder that a run has in common with its own servers; expected 0, or servers that "
            "this run starts: set teacher.vllm.ahead_gib=0"
        )
    if config.evaluation.teacher:
        raise ValueError(
            f"evaluation.teacher=true with {why}: the teacher's servers sample nothing; expected false: evaluate the "
            "teacher with `nemo-oprd evaluate`"
        )
    for i in served:
        source, key = config.teacher_sources[i], f"teachers[{i}]" if config.teachers else "teacher"
        if source.checkpoint is not None or source.provider != "own":
            raise ValueError(
                f"{key}.checkpoint={source.checkpoint} and {key}.provider={source.provider} with {why}: vLLM loads "
                f"Hugging Face directories; expected null and own: name the model in {key}.hf_path"
            )


def _check_teacher_endpoints(config: Config) -> None:
    """Requires that external servers belong to exactly one teacher, whose engine is vllm."""
    served, given = config.served_teachers, config.teacher.vllm.endpoints
    for i, source in enumerate(config.teachers):
        if source.endpoints and i not in served:
            raise ValueError(
                f"teachers[{i}].endpoints={source.endpoints} with engine={source.engine or config.teacher.engine}; "
                f"expected vllm, whose servers these are: set teachers[{i}].engine=vllm"
            )
    sharing = [i for i in served if config.teachers and config.teachers[i].endpoints is None]
    if given and len(sharing) > 1:
        raise ValueError(
            f"teacher.vllm.endpoints={given} with {len(sharing)} teachers: a server computes one of them; expected "
            f"other servers for each: set teachers[{sharing[0]}].endpoints and so on"
        )
    if given and not served:
        raise ValueError(
            f"teacher.vllm.endpoints={given} with teacher.engine={config.teacher.engine}; expected vllm, whose servers "
            "these are: set teacher.engine=vllm"
        )


def _check_reading_text(config: Config) -> None:
    """Refuses settings that need a teacher that reads the student's token ids."""
    if not config.loss.output.is_off:
        raise ValueError(
            f"loss.output.kind={config.loss.output.kind} with teacher.reads=text: a probability of the student's token "
            "has no counterpart among the teacher's tokens; expected none: match hidden states, or take a teacher with "
            "the student's tokenizer and teacher.reads=ids"
        )
    if config.logging.output_metrics_every:
        raise ValueError(
            f"logging.output_metrics_every={config.logging.output_metrics_every} with teacher.reads=text: there are no "
            "two distributions over the same tokens to compare; expected 0: set it"
        )
    if config.evaluation.teacher:
        raise ValueError(
            "evaluation.teacher=true with teacher.reads=text: the teacher is sampled in the student's engine and "
            "tokens; expected false: evaluate the teacher with `nemo-oprd evaluate`"
        )


def _check_reuse(config: Config) -> None:
    """Checks the conditions under which a sampled token's loss and its clipped probability ratio are defined."""
    output, updates = config.loss.output, config.train.updates_per_rollout
    ratio = output.from_samples and updates > 1
    if output.clip is not None and not ratio:
        raise ValueError(
            f"loss.output.clip={output.clip} with loss.output.kind={output.kind} and train.updates_per_rollout="
            f"{updates}: expected kind sampled_token and more than one update, else there is no ratio to clip; set it "
            "to null"
        )
    rollout = config.rollout
    if not output.from_samples or rollout.replay is not None:
        return
    if output.temperature != rollout.temperature or rollout.top_p != 1:
        raise ValueError(
            "loss.output.kind=sampled_token estimates a divergence at the tokens that the student samples, at rollout."
            f"temperature={rollout.temperature} and rollout.top_p={rollout.top_p}, but loss.output.temperature="
            f"{output.temperature}: expected one temperature and top_p=1, otherwise the samples do not estimate that "
            "divergence; set them, or take another kind"
        )


def _check_correction(config: Config) -> None:
    """Requires for `rollout.correction` the loss sampled_token, and log-probabilities of an engine or a replay."""
    rollout, output = config.rollout, config.loss.output
    if rollout.correction == "off":
        return
    given = f"rollout.correction={rollout.correction}"
    if not output.from_samples:
        raise ValueError(
            f"{given} with loss.output.kind={output.kind}: only sampled_token estimates an expectation by the "
            "probability of the sampled token, while hidden states and whole distributions are compared on whatever "
            "tokens were sampled; expected off: set it, or take sampled_token"
        )
    without = RECORDS[rollout.engine].no_logprobs
    if without is not None and rollout.replay is None:
        raise ValueError(
            f"{given} with rollout.engine={rollout.engine}, {without}; expected off: set it, or replay rollouts of "
            "another engine with rollout.replay=FILE"
        )


def _check_router_replay(config: Config) -> None:
    """Requires for `student.router_replay` a replay, or an engine that records the experts of each token."""
    engine = config.rollout.engine
    without = RECORDS[engine].no_expert_routes
    if config.student.router_replay and without is not None and config.rollout.replay is None:
        recording = " or ".join(name for name, records in RECORDS.items() if records.no_expert_routes is None)
        raise ValueError(
            f"student.router_replay=true with rollout.engine={engine}, {without}; expected rollout.engine={recording}, "
            "or rollout.replay=FILE with expert_routes: set one of them, or set student.router_replay=false"
        )


def _check_schedules(config: Config) -> None:
    """Raises ValueError if in some step of a run with schedules no loss term has a weight above 0."""
    representation, output = config.loss.representation, config.loss.output
    if not isinstance(representation.weight, list) and not isinstance(output.weight, list):
        return
    for step in range(config.train.steps):
        of_layers = 0.0 if representation.layers == "none" else weight_at(representation.weight, step)
        if of_layers == weight_at(output.weight, step) == 0:
            raise ValueError(
                f"loss.representation.weight and loss.output.weight are both 0 in step {step + 1}; expected "
                "something to learn in each of train.steps steps: change their schedules"
            )


def _check_stop_after(config: Config) -> None:
    """Raises ValueError unless the last token that can be supervised is known while a response is sampled."""
    if config.rollout.stop_after is None:
        return
    given, loss, output = "rollout.stop_after=supervised", config.loss.representation, config.loss.output
    if loss.layers == "none" or loss.positions != "first_k":
        raise ValueError(
            f"{given} with loss.representation.layers={loss.layers} and positions={loss.positions}: any token may be "
            "supervised; expected layers and positions=first_k: set them, or rollout.stop_after=null"
        )
    if largest(output.weight) > 0:
        raise ValueError(
            f"{given} with loss.output.weight={output.weight}: the output-space term supervises all tokens; expected "
            "0: set it, or rollout.stop_after=null and a lower rollout.max_new_tokens"
        )
    if config.teacher.reads == "text":
        raise ValueError(
            f"{given} with teacher.reads=text: which tokens are supervised is known only when they are aligned with "
            "the teacher's; expected ids: set rollout.stop_after=null and a lower rollout.max_new_tokens"
        )
    if config.rollout.replay is not None:
        raise ValueError(
            f"{given} with rollout.replay={config.rollout.replay}: recorded responses are not sampled; expected null: "
            "leave one of the two out"
        )


def _check_lag(config: Config) -> None:
    """Refuses settings that are incompatible with responses of earlier weights."""
    rollout, output = config.rollout, config.loss.output
    _check_segments(config)
    _check_stream(config)
    if not rollout.max_lag:
        return
    if rollout.replay is not None:
        raise ValueError(
            f"rollout.max_lag={rollout.max_lag} with rollout.replay={rollout.replay}: recorded responses are not "
            "sampled; expected 0: leave one of the two out"
        )
    if output.from_samples and largest(output.weight) > 0 and rollout.correction == "off":
        raise ValueError(
            f"rollout.max_lag={rollout.max_lag} with loss.output.kind={output.kind} and rollout.correction=off: an "
            "expectation under the student would be estimated from another student's tokens; expected truncate or "
            "mask: set one, or rollout.max_lag=0"
        )


def _check_stream(config: Config) -> None:
    """Refuses settings with which steps cannot take responses in the order of their completion."""
    rollout = config.rollout
    if rollout.mode != "stream":
        return
    if rollout.max_lag < SMALLEST_STREAM_LAG:
        raise ValueError(
            f"rollout.mode=stream with rollout.max_lag={rollout.max_lag}: half of the lag is for responses that take "
            f"longer than others; expected at least {SMALLEST_STREAM_LAG}: raise it, or set rollout.mode=exact"
        )
    if rollout.vllm.repeat == "step":
        raise ValueError(
            "rollout.mode=stream with rollout.vllm.repeat=step: which responses a step has depends on the clock even "
            "if no server dies; expected responses: set rollout.vllm.repeat=responses"
        )


def _check_segments(config: Config) -> None:
    """Raises ValueError unless segments of `segment_tokens` complete the longest response before its step."""
    rollout, (key, limit) = config.rollout, config.response_limit
    tokens = rollout.segment_tokens
    if (rollout.mode == "segments") != (tokens is not None):
        expected = "null, or mode=segments" if tokens else "the tokens of a response from one student"
        raise ValueError(
            f"rollout.mode={rollout.mode} with rollout.segment_tokens={'null' if tokens is None else tokens}; expected "
            f"{expected}: set both, or neither"
        )
    if tokens is not None and -(-limit // tokens) - 1 > rollout.max_lag:
        least = -(-limit // (rollout.max_lag + 1))
        raise ValueError(
            f"rollout.segment_tokens={tokens} with {key}={limit} and rollout.max_lag={rollout.max_lag}: the longest "
            f"response takes {-(-limit // tokens)} segments, from {rollout.max_lag + 1} students; expected at least "
            f"{least} tokens: set rollout.segment_tokens={least}, or rollout.max_lag={-(-limit // tokens) - 1}"
        )


def _check_bridge(config: Config) -> None:
    """Requires the settings without which a trained bridge would learn nothing, or could not be saved."""
    bridge, loss = config.bridge, config.loss.representation
    if not bridge.train:
        return
    if loss.weight == 0 or loss.layers == "none":
        raise ValueError(
            f"bridge.train=true with loss.representation.weight={loss.weight} and layers={loss.layers}: no loss "
            "reaches the projectors; expected a weight above 0 and layers: set them, or bridge.train=false"
        )
    if isinstance(loss.weight, list) and vanishes(loss.weight):
        raise ValueError(
            "bridge.train=true with a loss.representation.weight of 0 in some updates: the projectors would drift "
            "where no loss reaches them; expected weights above 0: change the schedule, or set bridge.train=false"
        )
    if config.precision == "bf16" and config.train.distributed_optimizer is False:
        raise ValueError(
            "bridge.train=true with precision=bf16 and train.distributed_optimizer=false: Megatron's plain bf16 "
            "optimizer can't save the projectors, which are float32; expected the distributed optimizer: set "
            "train.distributed_optimizer=auto"
        )


def _check_evaluation(config: Config) -> None:
    """Requires a validation set if a run evaluates, a measured metric for `train.keep_best`, and valid set names."""
    evaluation, best = config.evaluation, config.train.keep_best
    if best is not None:
        names = config.data.sets
        known = [f"val/{name}/{kind}@{evaluation.samples}" for name in names for kind in ("avg", "best")]
        if best not in known or not evaluation.every:
            raise ValueError(
                f"train.keep_best={best}: expected null, or one of {known} together with evaluation.every > 0"
            )
    wrong = [name for name in config.data.validation if not re.fullmatch(r"\w[\w.-]*", name)]
    if wrong:
        raise ValueError(
            f"data.validation has a set {wrong[0]!r}, whose name becomes part of file names; expected letters, digits, "
            "'_', '-' and '.', and no '.' or '-' at the start: rename the set"
        )
    if "teacher" in config.data.validation:
        raise ValueError(
            f"data.validation.teacher={config.data.validation['teacher']}: the teacher's metrics are called "
            "val/SET/teacher/METRIC, expected a set of another name: rename the set"
        )
    strange = [name for name in evaluation.graders if name not in config.data.sets]
    if strange:
        sets = ", ".join(config.data.sets) or "none"
        raise ValueError(
            f"evaluation.graders.{strange[0]}={evaluation.graders[strange[0]]}: there is no such set, expected one in "
            f"data.validation ({sets}); correct the name"
        )
    if evaluation.every and not config.data.sets:
        raise ValueError(
            f"evaluation.every={evaluation.every} needs at least one set in data.validation; "
            "add e.g. data.validation.aime24=FILE, or set evaluation.every=0"
        )
