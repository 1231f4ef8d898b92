"""Prompt files, recorded rollouts, and the data sources of several teachers."""

# One case per line, however long: a table.
# fmt: off
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

from bad_input_case import PROMPT, ROLLOUT, TEXT, Category, Place

CATEGORIES: list[Category] = []

case = Category("Prompts")
CATEGORIES.append(case)


def prompt_file(text: str | bytes) -> Callable[[Place], Any]:
    return lambda place: place.prompts.write_bytes(text if isinstance(text, bytes) else text.encode())


def parquet(place: Place, content: dict[str, list] | bytes) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = place.root / "prompts.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pq.write_table(pa.table(content), file)


PARQUET = "data.train={root}/prompts.parquet"
case("no prompts set", "no prompt file at all", "data.train=null | expected a file of prompts | set data.train=FILE", "data.train=null")
case("no prompt file", "a prompt file that does not exist", "nowhere.jsonl: no such file | give its path", "data.train={root}/nowhere.jsonl")
case("prompt directory", "a directory where a prompt file belongs", "{root}: is a directory, with prompts.jsonl, rollouts.jsonl in it | expected a .parquet or .jsonl file | give its path", "data.train={root}")
case("directory without prompts", "a directory without prompt files", "student: is a directory, and has no .parquet or .jsonl file in it | give its path", "data.train={root}/student")
case("validation directory", "a directory where a validation file belongs", "{root}: is a directory, with prompts.jsonl", "data.validation.held={root}", command="evaluate")
case("ending", "a prompt file of another kind", "extension '.csv' | expected .parquet or .jsonl | convert", "data.train={root}/prompts.csv", prepare=lambda p: (p.root / "prompts.csv").write_text("a"))
case("empty prompt file", "an empty prompt file", "prompts.jsonl: holds no prompts | expected at least one row", prepare=prompt_file(""))
case("malformed JSONL", "a line that is not JSON", "prompts.jsonl, line 2: not valid JSON | write one UTF-8 JSON object per line", prepare=prompt_file('{"prompt": "1"}\n{"prompt": \n'), library=r"JSON \((.*?)\);")
case("not UTF-8", "a line that is not UTF-8", "prompts.jsonl, line 1: not valid JSON | UTF-8", prepare=prompt_file(b'{"prompt": "\xff"}\n'), library=r"JSON \((.*?)\);")
case("no prompt field", "a row without a prompt", "prompts.jsonl, line 1: none of the fields prompt, problem, question | write rows", prepare=prompt_file('{"text": "1"}\n'))
case("not a conversation", "a conversation without contents", "line 1: prompt, message 0 | expected {{role, content}}", prepare=prompt_file('{"prompt": [{"role": "user"}]}\n'))
case("blank prompt", "a blank prompt", "line 1: prompt, message 0 | not blank", prepare=prompt_file('{"prompt": " "}\n'))
case("images", "a row with an image", "line 1: images is ['a.png'] | which would be left out of the prompt | expected none: models read text here", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "images": ["a.png"]}]))
case("image in a conversation", "a part of a message that is not text", "message 0: a part of content is | expected {{type: text, text}} | leave the row out", prepare=lambda p: p.write(p.prompts, [{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}]), command="evaluate")
case("image's place in a text", "a text with the place of an image", "expected text without <image> | leave the row out", prepare=lambda p: p.write(p.prompts, [{"prompt": "<image>1+1="}]))
case("conversation of other keys as text", "JSON text that is no conversation", "prompt is | expected text, or messages as a list of {{role, content}} | write them so", prepare=lambda p: p.write(p.prompts, [{"prompt": '[{"from": "human", "value": "1"}]'}]))
case("tools that are none", "tools that are no list", "line 1: tools is 'add' | expected a list of objects, or JSON text of it", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "tools": "add"}]))
case("half a character", "text that is not text", "line 2: holds '1.ud83d', half of a character | expected whole characters".replace(".ud83d", "\\ud83d"), prepare=prompt_file('{"prompt": "1"}\n{"prompt": "1\\ud83d"}\n'))
case("half a character in a validation set", "text of a validation set that is not text", "line 1: holds '\\ud83d', half of a character | expected whole characters", prepare=prompt_file('{"prompt": "\\ud83d", "answer": "1"}\n'), command="evaluate")
case("template that fails", "a chat template that fails", "the chat template fails on the conversation with roles ['user'] (TypeError | expected one that renders it | correct the template", "data.chat_template={root}/fails.jinja", prepare=lambda p: (p.root / "fails.jinja").write_text("{% include 'other' %}"))
case("corrupt parquet", "a parquet file of other bytes", "prompts.parquet: not a readable parquet file | download or write it again", PARQUET, prepare=lambda p: parquet(p, b"PAR1 and no more"), library=r"file \((.*?)\); download")
case("parquet without a column", "a parquet file without prompts", "prompts.parquet, row 0: none of the fields | write rows", PARQUET, prepare=lambda p: parquet(p, {"text": ["1"]}))
case("prompts too long", "prompts that are all too long", "data.max_prompt_tokens=1 | every prompt is longer | raise it", "data.max_prompt_tokens=1")
case("no room for a response", "a prompt as long as the model's positions", "prompt 0 has | 64 positions | data.max_prompt_tokens", prepare=prompt_file(json.dumps({"prompt": "1" * 80}) + "\n"))
case("device for prompts", "a device where a prompt file belongs", "data.train=/dev/zero: is a device | expected a .parquet or .jsonl file", "data.train=/dev/zero")
case("sets of a shipped configuration", "a set of a shipped configuration that was not downloaded", "data.validation.aime24=data/aime24.parquet: no such file | conf/oprd_1p5b.yaml names it, not the command line | set data.validation.aime24=FILE, or do without by data.validation={} evaluation.every=0", arguments=("--config-name", "oprd_1p5b"))
case("no validation file", "a validation file that does not exist", "nowhere.jsonl: no such file", "data.validation.held={root}/nowhere.jsonl", command="evaluate")
case("no validation set", "`evaluate` without a set", "data.validation is empty | name at least one", command="evaluate", arguments=("no validation",))
case("set with a path as its name", "a set whose name is no file name", "has a set 'a/b' | expected letters, digits | rename the set", "data.validation={a/b: {root}/prompts.jsonl}", command="evaluate", arguments=("no validation",))
case("problem without answer", "a problem without an answer", "problem 1 has no answer | add an answer", command="evaluate", prepare=lambda p: p.write(p.prompts, [PROMPT, {"prompt": "1"}]))
case("list as answer", "a problem with a list as its answer", "problem 1 has no answer | expected text or a number (a list or an object is none) | add an answer", command="evaluate", prepare=lambda p: p.write(p.prompts, [PROMPT, {"prompt": "1", "reward_model": {"ground_truth": ["1", "2"]}}]))
case("long problem", "a problem as long as the model's positions", "problem 0 leaves no room | 64 positions | remove it", command="evaluate", prepare=lambda p: p.write(p.prompts, [{"prompt": "1" * 80, "answer": "1"}]))

case = Category("What is done to prompts")
CATEGORIES.append(case)


def twice(place: Place) -> None:
    place.write(place.root / "again.jsonl", [PROMPT])


def template(text: str) -> Callable[[Place], Any]:
    return lambda place: (place.root / "template.jinja").write_text(text)


SHARES = "data.train={{root}/prompts.jsonl: 3, {root}/again.jsonl: 1}"
TEMPLATE = "data.chat_template={root}/template.jinja"
case("weight of 0", "a file with a weight of 0", "prompts.jsonl=0.0: expected more than 0 | choose a larger number", "data.train={{root}/prompts.jsonl: 0}")
case("weight as text", "a weight that is no number", "prompts.jsonl': 'x'}}: expected text | dict of a number | give one", "data.train={{root}/prompts.jsonl: x}")
case("no files with weights", "an empty mapping of files", "data.train={{}}: expected a file of prompts, or several | name one", "data.train={}")
case("nothing left of a file", "a file with a weight whose prompts all repeat those of another", "data.train: no prompt of | again.jsonl remains to train on | data.deduplicate=true | expected at least one | remove the file", SHARES, "data.deduplicate=true", prepare=twice)
case("blank suffix", "a blank suffix", "data.suffix=' ': expected text that is not blank | write it, or set null", "data.suffix=' '")
case("no length limit", "`data.over_long` without a limit", "data.over_long=refuse without a limit | expected data.max_prompt_tokens | set it", "data.over_long=refuse")
case("too long, refused", "a prompt that is too long, with `data.over_long=refuse`", "prompt 0: has | expected at most data.max_prompt_tokens=2 | raise it, or set data.over_long=drop", "data.over_long=refuse", "data.max_prompt_tokens=2")
case("too long to cut", "a last word that is too long to be cut", "prompt 0: has | still more than data.max_prompt_tokens=2 | expected a last word that fits | raise it", "data.over_long=truncate_left", "data.max_prompt_tokens=2")
case("all with a weight too long", "a file with a weight whose prompts are all too long", "again.jsonl has a weight, but every prompt is longer than data.max_prompt_tokens=12 | raise it, or remove the file", SHARES, "data.max_prompt_tokens=12", prepare=lambda p: p.write(p.root / "again.jsonl", [{"prompt": "1" * 30}]))
case("held out too much", "half of the prompts held out", "data.held_out=0.5: expected a number in [0, 0.5) | choose", "data.held_out=0.5")
case("nothing held out", "a held-out share that no prompt falls into", "data.held_out=0.01: of 3 prompts none falls | expected at least one | raise it", "data.held_out=0.01")
case("all held out", "prompts that are all held out", "no prompt of | prompts.jsonl remains to train on (data.held_out=0.499", "data.held_out=0.499", prepare=lambda p: p.write(p.prompts, [{"prompt": "1+1=", "answer": "2"}] * 2))
case("a set called held_out", "a validation set with the name of the held-out one", "data.validation.held_out= | data.held_out=0.1 makes a set of that name | rename the set", "data.held_out=0.1", "data.validation={held_out: {root}/prompts.jsonl}")
case("held out of nothing", "a held-out share without training prompts", "data.held_out=0.1 with data.train=null | expected training prompts | set data.train=FILE", "data.held_out=0.1", command="evaluate")
case("held out without answers", "held-out problems without answers", "data.held_out=0.499 of data.train: problem 6 has no answer | add an answer", "data.held_out=0.499", "data.train={root}/again.jsonl", command="evaluate", prepare=lambda p: p.write(p.root / "again.jsonl", [{"prompt": "1+1="}, *({"prompt": f"{n}+1="} for n in range(9))]))
case("a set called teacher", "a validation set with the name under which the teacher's metrics stand", "data.validation.teacher= | the teacher's metrics are called val/SET/teacher/METRIC | rename the set", "data.validation={teacher: {root}/prompts.jsonl}", command="evaluate", arguments=("no validation",))
case("contaminated", "validation problems in the training prompts, with `data.contamination=refuse`", "data.contamination=refuse: 3 of 3 problems of held stand in data.train | expected none | set data.contamination=drop", "data.contamination=refuse", "data.validation={held: {root}/prompts.jsonl}")
case("all contaminated", "training prompts that are all in a validation set, with `data.contamination=drop`", "remains to train on | data.contamination=drop | expected at least one", "data.contamination=drop", "data.validation={held: {root}/prompts.jsonl}")
case("no chat template file", "a chat template that does not exist", "data.chat_template={root}/template.jinja: no such file | expected a file with a Jinja template | correct the path", TEMPLATE)
case("pipe for a chat template", "a named pipe where a chat template belongs", "template.jinja: is a named pipe (FIFO) | expected a file with a Jinja template", TEMPLATE, prepare=lambda p: os.mkfifo(p.root / "template.jinja"))
case("broken chat template", "a file that is no Jinja template", "template.jinja: not a Jinja template | expected one as in a model's chat_template.jinja | correct it", TEMPLATE, prepare=template("{% for m in messages %}"), library=r"template \((.*)\);")
case("reserved variable", "a variable of a chat template that belongs to the project", "data.chat_template_args.tokenize=False | expected one that the template reads | remove it", "data.chat_template_args={tokenize: false}")

case = Category("Recorded rollouts")
CATEGORIES.append(case)


def rollouts(name: str, what: str, says: str, *rows: Any, overrides: tuple[str, ...] = (), **settings: Any) -> None:
    """A case of `verify` on a file of these rows; text is written as it is."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    case(name, what, says, *overrides, command="verify", prepare=lambda place: place.rollouts.write_text(lines), **settings)


case("rollout directory", "a directory where a file of rollouts belongs", "rollout.replay={root}: is a directory, with prompts.jsonl, rollouts.jsonl in it | give its path", "rollout.replay={root}", command="verify")
case("no rollout file", "a rollout file that does not exist", "rollout.replay={root}/nowhere: no such file | expected a JSONL", "rollout.replay={root}/nowhere", command="verify")
case("no rollout file to plan with", "`plan` with a rollout file that does not exist", "rollout.replay={root}/nowhere: no such file | expected a JSONL | give its path", "rollout.replay={root}/nowhere", command="plan", arguments=("--ranks", "1"))
rollouts("empty rollout file", "an empty rollout file", "the file holds no rollouts | expected one JSON object per line")
rollouts("malformed rollout", "a line that is not JSON", "rollouts.jsonl:2: not valid JSON | write one", ROLLOUT, "{", library=r"JSON \((.*?)\);")
rollouts("rollout a list", "a line that is no object", "rollouts.jsonl:1: found [1] | expected a JSON object", [1])
rollouts("no ids", "a rollout without ids", "rollouts.jsonl:1: response_ids=None | expected a list of integers", {"prompt_ids": [1]})
rollouts("ids as text", "ids that are text", "response_ids=['8', '9'] | expected a list of integers | not text", {**ROLLOUT, "response_ids": ["8", "9"]})
rollouts("id beyond the vocabulary", "an id beyond the vocabulary", "rollouts.jsonl:2: response_ids holds id 61 | 0..60 | record rollouts with their tokenizer", ROLLOUT, {**ROLLOUT, "response_ids": [61]})
rollouts("negative id", "a negative id", "prompt_ids holds id -1 | 0..60", {**ROLLOUT, "prompt_ids": [-1]})
rollouts("data source that is no text", "a data source that is no text", "data_source=['a'] | expected text", {**ROLLOUT, "data_source": ["a"]})
rollouts("end that is no text", "a reason of the end that is no text", "finish_reason={'type': 'stop'} | expected text", {**ROLLOUT, "finish_reason": {"type": "stop"}})
rollouts("mask of another length", "a mask of another length", "response_mask has 1 entries for 2 response tokens | expected one 0 or 1", {**ROLLOUT, "response_mask": [1]})
rollouts("mask of other values", "a mask of other values", "response_mask=[1, 2] | expected a list of 0 and 1", {**ROLLOUT, "response_mask": [1, 2]})
rollouts("mask a number", "a mask that is no list", "response_mask=1 | expected a list of 0 and 1", {**ROLLOUT, "response_mask": 1})
rollouts("routes no lists", "experts of tokens that are no lists", "expert_routes=[1, 2] | expected [tokens][layers with experts][experts per token]", {**ROLLOUT, "expert_routes": [1, 2]})
rollouts("routes of other tokens", "experts of too few tokens", "expert_routes has 2 entries for 5 tokens | expected 5, or 4 without the last token", {**ROLLOUT, "expert_routes": [[[0]], [[1]]]})
rollouts("routes of a model without", "experts of tokens for a student that has none", "expert_routes is given, but the qwen3 student has no experts | remove the field", {**ROLLOUT, "expert_routes": [[[0]]] * 5})
rollouts("logarithms of another length", "log-probabilities of another length", "rollouts.jsonl:1: logprobs has 1 entries for 2 response tokens | expected one per response token", {**ROLLOUT, "logprobs": [-1.0]})
rollouts("logarithms as text", "log-probabilities that are text", "logprobs=['-1', '-2'] | expected a list of numbers | leave it out", {**ROLLOUT, "logprobs": ["-1", "-2"]})
rollouts("one logarithm", "log-probabilities that are no list", "logprobs=-1.0 | expected a list of numbers", {**ROLLOUT, "logprobs": -1.0})
rollouts("probability above 1", "a log-probability above 0", "logprobs holds 0.5 | expected finite numbers of at most 0 | leave logprobs out", {**ROLLOUT, "logprobs": [-1.0, 0.5]})
rollouts("logarithm of nothing", "a log-probability that is not a number", "rollouts.jsonl:2: logprobs holds nan | expected finite numbers", {**ROLLOUT, "logprobs": [-1.0, 1e-3]}, {**ROLLOUT, "logprobs": [math.nan, -1.0]})
rollouts("logarithm of zero", "a log-probability of minus infinity", "logprobs holds -inf | expected finite numbers", {**ROLLOUT, "logprobs": [-1.0, -math.inf]})
rollouts("version of the weights", "weights after a fraction of a step", "weight_version=1.5 | expected a whole number of at least 0 | leave it out", {**ROLLOUT, "weight_version": 1.5})
rollouts("negative version of the weights", "weights before the first step", "weight_version=-1 | expected a whole number of at least 0", {**ROLLOUT, "weight_version": -1})
rollouts("spans of weights", "spans of tokens that are no list of objects", "weight_versions=[[0, 0, 2]]; expected a list of objects with the whole numbers version, start and end | leave it out", {**ROLLOUT, "weight_versions": [[0, 0, 2]]})
rollouts("gap between spans", "tokens of which it is not said which weights sampled them", "weight_versions holds the tokens [(0, 1)] of 2; expected each once and in order | leave weight_versions out", {**ROLLOUT, "weight_versions": [{"version": 3, "start": 0, "end": 1}]})
rollouts("older later on", "later tokens of earlier weights", "weight_versions holds the versions [3, 2] one after another; expected none that is older | leave weight_versions out", {**ROLLOUT, "weight_versions": [{"version": 3, "start": 0, "end": 1}, {"version": 2, "start": 1, "end": 2}]})
rollouts("nothing to correct by", "rollouts without log-probabilities where they are corrected by them", "rollouts.jsonl:2: no logprobs, by which rollout.correction weighs the tokens | expected one log-probability per response token | set rollout.correction=off", {**ROLLOUT, "logprobs": [-1.0, -2.0]}, ROLLOUT, overrides=("loss.output.kind=sampled_token", "loss.output.weight=1", "rollout.correction=truncate"))
rollouts("no tokens", "a rollout without tokens", "both empty | remove the line", {"prompt_ids": [], "response_ids": []})
rollouts("empty responses", "only empty responses", "none of the 2 responses has a supervised token | check response_ids", *[{**ROLLOUT, "response_ids": []}] * 2)
rollouts("longer than the model", "more tokens than the model has positions", "rollouts.jsonl:1: 70 tokens | 64 positions | remove the line", {"prompt_ids": [5] * 60, "response_ids": [6] * 10})
READ = {**ROLLOUT, "teacher_prompt_ids": [4], "teacher_response_ids": [5, 6, 7], "teacher_index": [0, 2]}
rollouts("nothing for the teacher to read", "rollouts without the teacher's ids where it reads text", "rollouts.jsonl:1: no teacher_prompt_ids | with teacher.reads=text | rollout.save=true", ROLLOUT, overrides=(TEXT,))
rollouts("the teacher's own ids", "rollouts with the teacher's ids where it reads the student's", "rollouts.jsonl:1: teacher_prompt_ids is given | the teacher reads the student's ids | expected teacher.reads=text", READ)
rollouts("the teacher's id beyond the vocabulary", "an id beyond the teacher's vocabulary", "teacher_response_ids holds id 61 | 0..60", {**READ, "teacher_response_ids": [5, 6, 61]}, overrides=(TEXT,))
rollouts("partner beyond the teacher's response", "a partner beyond the teacher's response", "teacher_index holds 3, but the teacher's response has 3 tokens | expected -1 to 2", {**READ, "teacher_index": [0, 3]}, overrides=(TEXT,))
rollouts("partners of another length", "partners for other tokens than the response's", "teacher_index has 1 entries for 2 response tokens | expected one per response token", {**READ, "teacher_index": [0]}, overrides=(TEXT,))
rollouts("longer than the teacher", "more tokens than the teacher has positions", "70 tokens for the teacher, which has 64 positions | choose the teacher that read these rollouts", {**READ, "teacher_prompt_ids": [5] * 67}, overrides=(TEXT,))

case = Category("Several teachers, and the student as its own")
CATEGORIES.append(case)


def teachers(name: str, what: str, says: str, *entries: str, overrides: tuple[str, ...] = (), **settings: Any) -> None:
    """A case with a list of teachers of the good model; `entries` are their other keys."""
    listed = ", ".join(f"{{hf_path: {{root}}/teacher, {entry}}}" for entry in entries)
    case(name, what, says, "teacher.hf_path=null", f"teachers=[{listed}]", *overrides, **settings)


OTHERS = "data_sources: null"
teachers("teacher and teachers", "a teacher beside several", "with a list of teachers | expected neither: set both to null", OTHERS, overrides=("teacher.hf_path={root}/teacher",))
teachers("teacher from nowhere", "one of several teachers from nowhere", "teachers[0].hf_path=None | expected a model | set hf_path", "data_sources: [prompts], hf_path: null")
teachers("unknown key of a teacher", "a misspelt key of one of several teachers", "unknown key 'teachers[0].data_source' | did you mean", "data_source: [prompts]")
teachers("two teachers of one source", "two teachers of one data source", "teachers[0] and teachers[1] both have the data source 'prompts' | expected one teacher for each", "data_sources: [prompts], name: a", "data_sources: [prompts, b]")
teachers("two teachers of the rest", "two teachers of all other data sources", "teachers[0] and teachers[1] both have the data source null", OTHERS, OTHERS + ", name: b")
teachers("two teachers of one name", "two teachers of one name", "both called 'x' in metrics | set teachers[i].name", "data_sources: [prompts], name: x", OTHERS + ", name: x")
teachers("servers of two teachers on all ranks", "dedicated servers of several teachers on all ranks", "teacher.vllm.placement=dedicated with 2 rank(s) of servers leaves none of the | start more ranks", "data_sources: [prompts], name: a", OTHERS + ", name: b", overrides=("teacher.engine=vllm", "teacher.vllm.placement=dedicated"))
teachers("one endpoint of two teachers", "servers of one teacher for two", "teacher.vllm.endpoints=['http://127.0.0.1:8000'] with 2 teachers: a server computes one of them | set teachers[0].endpoints", "data_sources: [prompts], name: a", OTHERS + ", name: b", overrides=("teacher.engine=vllm", "teacher.vllm.endpoints=['http://127.0.0.1:8000']"))
teachers("endpoint of one teacher in the trainer", "servers for one of several teachers that is in the trainer", "teachers[0].endpoints=['http://127.0.0.1:8000'] with engine=megatron | set teachers[0].engine=vllm", "data_sources: [prompts], name: a, endpoints: ['http://127.0.0.1:8000']", OTHERS + ", name: b")
teachers("one of several served teachers from a checkpoint", "a Megatron checkpoint for the servers of one teacher", "teachers[1].checkpoint={root}/teacher and teachers[1].provider=own with teachers[1].engine=vllm | name the model in teachers[1].hf_path", "data_sources: [prompts], name: a", OTHERS + ", name: b, engine: vllm, checkpoint: {root}/teacher")
teachers("teacher of nothing", "a teacher without data sources", "teachers[0].data_sources=[] | expected names, or null", "data_sources: []")
teachers("weightless teacher", "a teacher of weight 0", "teachers[0].weight=0.0 | expected more than 0", OTHERS + ", weight: 0")
teachers("idle teacher", "a data source that no prompt has", "teachers[1].data_sources=['promts']: data.train={root}/prompts.jsonl has no entry with data source 'promts' | expected some of ['prompts'] | correct the name", OTHERS, "data_sources: [promts]")
teachers("one source misspelt", "a misspelt data source beside a right one", "data.train={root}/prompts.jsonl has no entry with data source 'promts' | correct the name", "data_sources: [prompts, promts]", OTHERS, prepare=lambda p: p.write(p.prompts, [PROMPT, {**PROMPT, "data_source": "b"}]))
teachers("bridge to be learned", "a bridge to learn for one of several teachers", "teachers[0].bridge=full_width | expected the directory of a fitted bridge | run fit-bridge", OTHERS + ", bridge: full_width")
teachers("prompts without a teacher", "prompts of a data source without a teacher", "data_source='prompts' has no teacher | expected one of ['maths'] | add it", "data_sources: [maths]")
teachers("rollouts without a teacher", "recorded rollouts without a data source", "rollouts.jsonl: data_source=None has no teacher | expected one of ['maths']", "data_sources: [maths]", command="verify")
teachers("one bridge for all", "one bridge for several teachers", "bridge.path={root}/bridge | with several teachers | set teachers[i].bridge", OTHERS, overrides=("bridge.path={root}/bridge",))
teachers("sampling several teachers", "evaluating several teachers in one run", "evaluation.teacher=true with several teachers | nemo-oprd evaluate", OTHERS, overrides=("evaluation.teacher=true",))
teachers("a bridge to several", "fitting one bridge to several teachers", "fit-bridge with 1 teachers | expected one | teacher.hf_path", OTHERS, command="fit-bridge")
teachers("several, and itself", "several teachers where the student is its own", "teacher.weights=ema with a list of teachers | expected own", OTHERS, overrides=("teacher.weights=ema", "teacher.prompt='{prompt}!'"))
case("teacher without a number", "a key of several teachers without a number", "teachers.weight: the configuration has 0 teachers | expected one of them", "teachers.weight=2")
case("no teacher number", "a key of a teacher that is not there", "teachers.3.hf_path: the configuration has 0 teachers | expected one of them | list them", "teachers.3.hf_path=x")
SELF = ("teacher.hf_path=null", "teacher.weights=student", "teacher.prompt='{prompt} {answer}'")
case("itself and a teacher", "a teacher's model where the student is its own", "with teacher.weights=student | expected neither", *SELF[1:])
case("itself without more to read", "the student as its own teacher with nothing more to read", "teacher.weights=student with teacher.prompt=null | compared with itself | set e.g. teacher.prompt=", *SELF[:2])
case("blank system prompt", "a blank system prompt of the teacher's", "teacher.system_prompt=' ': expected text that is not blank | set null", "teacher.system_prompt=' '")
case("template without a prompt", "a teacher's prompt without the student's", "teacher.prompt='Answer: {answer}' | expected a text with {prompt} | put it in", "teacher.prompt='Answer: {answer}'")
case("decay of the teacher", "a teacher that would never follow the student", "teacher.ema_decay=1.0 | expected a number in [0, 1)", "teacher.ema_decay=1")
case("layout of itself", "a layout for a teacher that is the student", "with teacher.weights=student: such a teacher has the student's ranks and layout | remove them", *SELF, "teacher.parallel.tensor=2")
case("itself in other tokens", "the student as its own teacher in other tokens", "teacher.weights=student with teacher.reads=text | expected ids", *SELF, TEXT)
case("bridge to itself", "a bridge from the student to itself", "bridge.path=x with teacher.weights=student | expected none", *SELF, "bridge.path=x")
case("sampling itself", "evaluating the student as its own teacher", "evaluation.teacher=true with teacher.weights=student | expected false", *SELF, "evaluation.teacher=true")
case("itself, moving under an update", "several updates on targets of the current weights", "train.updates_per_rollout=2 with teacher.weights=ema | expected 1 | use initial weights", *SELF[::2], "teacher.weights=ema", "train.updates_per_rollout=2")
case("fitting a bridge to itself", "fitting a bridge where the student is its own teacher", "fit-bridge with teacher.weights=student | expected one", *SELF, command="fit-bridge")
case("no answer to tell", "a prompt without the answer that the teacher is told", "prompt 1: no answer, but teacher.prompt contains {{answer}} | add it, remove the prompt", *SELF, prepare=lambda p: p.write(p.prompts, [PROMPT, {"prompt": "1+2="}]))
case("no hint to tell", "a blank hint where the teacher is told one", "prompt 0: no hint, but teacher.prompt contains {{hint}} | add it, remove the prompt", *SELF[:2], "teacher.prompt='{prompt} {hint}'", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "hint": " "}]))
case("told too much", "a teacher's prompt that fills its positions", "the teacher reads 68 tokens for the prompt '1+1=' | its 64 positions | shorten teacher.prompt or the hint", *SELF[:2], "teacher.prompt='{prompt}" + "1" * 64 + "'")
case("hint a number", "a hint that is no text", "line 1: hint is 3, expected text", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "hint": 3}]))
case("no prompt files", "an empty list of prompt files", "data.train=[] | expected a file of prompts, or several | name one", "data.train=[]")
rollouts("no prompt of the teacher's", "rollouts without the teacher's prompt where it has one", "rollouts.jsonl:1: no teacher_prompt_ids | with teacher.prompt | rollout.save=true", ROLLOUT, overrides=SELF)
