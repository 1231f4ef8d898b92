"""Configuration: composition, types, unknown keys, contradictions, and every shipped file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nemo_oprd.config.keys import keys
from nemo_oprd.config.loading import default_config_dir, load_config, to_yaml
from nemo_oprd.config.messages import USUAL_NAMES
from nemo_oprd.config.schema import Config
from nemo_oprd.vllm.endpoint import check_endpoints

MODELS = ["student.hf_path=a", "teacher.hf_path=b"]
SHIPPED = sorted(file.stem for file in default_config_dir().glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_load(name: str) -> None:
    config = load_config(name, MODELS if name == "verify" else [])
    assert config.train.steps > 0


def test_real_runs_leave_the_layout_to_the_command_line() -> None:
    config = load_config("oprd_1p5b")
    for role in (config.student, config.teacher):
        sizes = role.parallel
        assert (sizes.tensor, sizes.pipeline, sizes.context, sizes.virtual_pipeline) == (1, 1, 1, 1)
    assert config.teacher.placement == "colocated"


def test_the_papers_setting() -> None:
    config = load_config("oprd_1p5b")
    assert (config.train.prompts_per_step, config.rollout.per_prompt) == (8, 2)
    assert (config.rollout.temperature, config.rollout.max_new_tokens) == (1.0, 16384)
    assert (config.loss.representation.k, config.loss.representation.layers) == (2000, "all")
    assert (config.train.lr, config.train.warmup_fraction, config.train.schedule) == (1e-5, 0.03, "cosine")
    assert (config.train.steps, config.precision) == (500, "bf16")


def test_overrides() -> None:
    config = load_config(
        "verify",
        [
            *MODELS,
            "loss.representation.layers=[1,3]",
            "train.lr=1",
            "data.validation.x=a.parquet",
            "train.betas=[0.8,0.9]",
        ],
    )
    assert config.loss.representation.layers == [1, 3]
    assert config.train.lr == 1.0
    assert config.data.validation == {"x": "a.parquet"}
    assert config.train.betas == (0.8, 0.9)


def test_a_model_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    assert load_config("quickstart").student.checkpoint is not None
    config = load_config("quickstart", ["student.hf_path=x"])
    assert (config.student.hf_path, config.student.checkpoint) == ("x", None)
    config = load_config("verify", [*MODELS, "teacher.hf_path=null", "teacher.checkpoint=y"])
    assert (config.teacher.hf_path, config.teacher.checkpoint) == (None, "y")
    given = ["student.hf_path=x", "student.checkpoint=y"]
    for config in (load_config("verify", [*MODELS[1:], *given]), load_config("quickstart", given)):
        assert (config.student.hf_path, config.student.checkpoint, config.student.path) == ("x", "y", "y")


def test_several_teachers(tmp_path: Path) -> None:
    """A list in a file, of which single values change on the command line, by number."""
    teachers = "teachers:\n- {hf_path: b, data_sources: [x, y]}\n- {checkpoint: c, weight: 2, name: rest}\n"
    (tmp_path / "run.yaml").write_text(f"student: {{hf_path: a}}\n{teachers}")
    config = load_config("run", ["teachers.0.hf_path=d", "teachers.1.weight=3"], tmp_path)
    assert [source.path for source in config.teacher_sources] == ["d", "c"]
    assert [source.weight for source in config.teacher_sources] == [1.0, 3.0]
    assert [source.label for source in config.teacher_sources] == ["x+y", "rest"]
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config("again", config_dir=tmp_path) == config
    with pytest.raises(ValueError, match="unknown key 'teachers.0.wait'; did you mean 'teachers.weight'"):
        load_config("run", ["teachers.0.wait=3"], tmp_path)


def test_the_student_as_its_own_teacher() -> None:
    for weights in ("student", "ema", "initial"):
        config = load_config(
            "verify", ["student.checkpoint=a", f"teacher.weights={weights}", "teacher.prompt='{prompt}!'"]
        )
        assert [source.path for source in config.teacher_sources] == ["a"]


def test_groups_compose(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "wide.yaml").write_text("representation:\n  k: 7\n  kind: cosine\n")
    (tmp_path / "run.yaml").write_text(
        "defaults:\n  - loss: wide\n  - _self_\nstudent: {hf_path: a}\nteacher: {hf_path: b}\n"
    )
    config = load_config("run", ["loss.representation.k=9"], tmp_path)
    assert (config.loss.representation.k, config.loss.representation.kind) == (9, "cosine")


def test_saved_configuration_loads_again(tmp_path: Path) -> None:
    config = load_config("oprd_1p5b", ["train.steps=7"])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config("again", config_dir=tmp_path) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "did you mean 'train.lr'"),
        ("studnet.hf_path=x", "did you mean 'student.hf_path'"),
        ("train.lr=fast", "train.lr='fast': expected a number"),
        ("train.steps=1.5", "train.steps=1.5: expected an integer"),
        ("train.steps=0", "train.steps=0: expected more than 0"),
        ("train.lr=-1", "expected more than 0"),
        ("train.schedule=linear", "constant | cosine"),
        ("precision=fp16", "fp32 | bf16"),
        ("loss.representation.layers=first", "expected all | last | even | odd"),
        ("loss.representation.layers=[a]", "expected all | last | even | odd"),
        ("loss.representation.k=0", "expected more than 0"),
        ("loss.representation.weight=-1", "expected 0 or more"),
        ("rollout.top_p=0", "(0, 1]"),
        ("train.warmup_fraction=2", "[0, 1]"),
        ("train.min_lr=1", "above train.lr"),
        ("teacher.hf_path=null", "expected a model; set hf_path to"),
        ("student.parallel.tensor=0", "at least 1"),
        ("student.parallel.virtual_pipeline=2", "pipeline > 1"),
        ("teacher.ranks=2", "placement=dedicated"),
        ("evaluation.every=5", "data.validation"),
        ("train=3", "expected a group of keys"),
        ("~train.lr", "deletes a key"),
        ("train.lr=1,2", "several values"),
        ("rollout.engine=vllm2", "expected megatron | vllm"),
        ("rollout.vllm.repeat=none", "rollout.vllm.repeat='none': expected responses | step"),
        ("rollout.vllm.gpu_memory_utilization=2", "rollout.vllm.gpu_memory_utilization=2.0: expected"),
        ("logging.every=0", "more than 0"),
        ("evaluation.limit=0", "more than 0"),
        ("seed=-1", "0 or more"),
        ("train.betas=[0.9,1.5]", "[0, 1)"),
        ("student.parallel.first_stage_layers=0", "at least 1"),
        ("train.steps=true", "train.steps=True: expected an integer"),
        ("train.steps='3'", "train.steps='3': expected an integer"),
        ("train.steps=3.0", "train.steps=3.0: expected an integer"),
        ("logging.tensorboard=1", "logging.tensorboard=1: expected true or false"),
        ("output=3", "output=3: expected text"),
        ("train.lr=nan", "train.lr=nan: expected a finite number"),
        ("teacher.ranks=x", "teacher.ranks='x': expected an integer | null"),
        ("bridge.rank=0", "bridge.rank=0: expected more than 0"),
        ("bridge.rank=most", "bridge.rank='most': expected auto | an integer"),
        ("bridge.held_out=0.5", "bridge.held_out=0.5: expected a number in (0, 0.5)"),
        ("loss.output.jsd_beta=1", "loss.output.jsd_beta=1.0: expected a number in (0, 1)"),
        ("loss.representation.layers=[1,a]", "loss.representation.layers=[1, 'a']: expected all | last"),
        ("loss.representation.weight=inf", "loss.representation.weight=inf: expected a finite number"),
        ("loss.representation.weight=x", "weight='x': expected a number | list of {weight, until, start}"),
        ("loss.representation.weight=[{weight:x}]", "loss.representation.weight[0].weight='x': expected a number"),
        ("loss.representation.weight=[3]", "loss.representation.weight=[3]: expected a number | list of"),
        ("loss.representation.layer_weights={1:x}", "expected list of a number | dict of a number | null"),
        ("loss.representation.layer_weights=[1,nan]", "layer_weights[1]=nan: expected a finite number"),
        ("loss.representation.layer_map={1:x}", "loss.representation.layer_map.1='x': expected an integer"),
        ("loss.output.clip=[0.2]", "loss.output.clip=[0.2]: expected a number | [a number, a number] | null"),
        ("train.betas=[0.9]", "train.betas=[0.9]: expected [a number, a number]"),
        ("train.betas=[0.9,0.9,0.9]", "train.betas=[0.9, 0.9, 0.9]: expected [a number, a number]"),
        ("teachers=[3]", "teachers[0]=3: expected a group of keys; give one of them, e.g. teachers[0].hf_path"),
        ("teachers=[{data_sources:[1]}]", "teachers[0].data_sources[0]=1: expected text"),
        ("data.validation={a:1}", "data.validation.a=1: expected text"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_config("verify", [*MODELS, override])
    assert message in str(error.value)


def test_a_misspelt_key_is_named_before_what_it_causes() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'loss.representation.weight\[0\].wait'"):
        load_config("verify", [*MODELS, "loss.representation.weight=[{wait:1}]"])


def test_numbers_are_read_exactly() -> None:
    """A number passes through pydantic's JSON parser, which must not change its last bit."""
    numbers = [1 / 3, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 2**53 + 1.0, 123456789012345678]
    config = load_config("verify", [*MODELS, f"loss.representation.layer_weights={numbers}"])
    assert config.loss.representation.layer_weights == [float(number) for number in numbers]


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"train": {"stepz": 3}}))
    with pytest.raises(ValueError, match=r"unknown key 'train.stepz'; did you mean 'train.steps'"):
        load_config("bad", MODELS, tmp_path)


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("teachers:", ["teachers.0.hf_path=X"], "teachers.0.hf_path: the configuration has 0 teachers, counted from 0"),
        ("teachers: 5", ["teachers.0.hf_path=X"], "teachers.0.hf_path: the configuration has 0 teachers"),
        ("", ["teachers=null", "teachers.0.weight=2"], "teachers.0.weight: the configuration has 0 teachers"),
        ("", ["teacher.hf_path=X", "teacher=3"], "teacher=3: expected a group of keys; give one of them, e.g. "),
        ("", ["teacher.hf_path=X", "teacher=null"], "teacher=None: expected a group of keys; give one of them"),
        ("", ["teacher=3", "teacher.hf_path=X"], "teacher=3: expected a group of keys; set teacher.hf_path in"),
        ("teacher: /models/x", ["teacher.hf_path=X"], "teacher='/models/x': expected a group of keys; set teacher.h"),
        ("loss: {output: x}", ["loss.output.weight=1"], "loss.output='x': expected a group of keys; set loss.output."),
        ("data: {validation: x}", ["data.validation.a=y"], "data.validation='x': expected a group of keys; set data"),
    ],
)  # fmt: skip
def test_values_in_the_place_of_groups(tmp_path: Path, text: str, given: list[str], says: str) -> None:
    (tmp_path / "own.yaml").write_text(f"student: {{hf_path: a}}\n{text}\n")
    with pytest.raises(ValueError) as error:
        load_config("own", given, tmp_path)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_empty_groups_have_their_defaults(tmp_path: Path) -> None:
    """Where the command line sets a key in them."""
    (tmp_path / "own.yaml").write_text("student:\nteacher:\nloss: {representation: }\ndata: {validation: }\n")
    given = [*MODELS, "loss.representation.k=3", "data.validation.a=b"]
    (tmp_path / "plain.yaml").write_text("{}\n")
    assert load_config("own", given, tmp_path) == load_config("plain", given, tmp_path)


def test_no_such_configuration() -> None:
    with pytest.raises(ValueError, match="quickstart"):
        load_config("nothing")


def test_prompt_files_with_weights_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data: {train: {data/a.parquet: 3, b-c.jsonl: 0.5}, held_out: 0.1}\n")
    config = load_config("own", MODELS, tmp_path)
    assert config.data.train == {"data/a.parquet": 3, "b-c.jsonl": 0.5}
    assert config.data.train_files == ("data/a.parquet", "b-c.jsonl") and config.data.sets == ("held_out",)
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load_config("saved", [], tmp_path) == config
    for given, files in (
        ("a.jsonl", ("a.jsonl",)),
        ("[a.jsonl,b.parquet]", ("a.jsonl", "b.parquet")),
        ("{/x/b_c.parquet:2,a.jsonl:1}", ("/x/b_c.parquet", "a.jsonl")),
    ):
        assert load_config("own", [*MODELS, f"data.train={given}"], tmp_path).data.train_files == files
    assert load_config("verify", MODELS).data.train_files == ()
    best = ["evaluation.every=5", "evaluation.samples=2", "train.keep_best=val/held_out/avg@2"]
    assert load_config("own", [*MODELS, *best, "evaluation.graders.held_out=number"], tmp_path).train.keep_best


def test_the_users_home_directory_in_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["student.hf_path=~/models/a", "teacher.hf_path=/b", "output=~/runs/x", "rollout.replay=~/r.jsonl"]
    config = load_config("verify", [*given, "data.validation.aime=~/v.jsonl", "data.train=['~/a.jsonl',b.jsonl]"])
    assert config.student.hf_path == "/home/me/models/a"
    assert (config.output, config.rollout.replay) == ("/home/me/runs/x", "/home/me/r.jsonl")
    assert config.data.validation == {"aime": "/home/me/v.jsonl"}
    assert load_config("verify", [*given, "data.chat_template=~/t.jinja"]).data.chat_template == "/home/me/t.jinja"
    assert config.data.train == ["/home/me/a.jsonl", "b.jsonl"]
    file = {"student": {"hf_path": "~/a"}, "teacher": {"hf_path": "b"}, "data": {"train": {"~/c.jsonl": 1.0}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(file))
    config = load_config("own", config_dir=tmp_path)
    assert config.student.hf_path == "/home/me/a"
    assert config.data.train == {"/home/me/c.jsonl": 1.0}


@pytest.mark.parametrize(
    "text", ["a#b", "é", "a=b", "It's", "a(b)", "run 1", "a,b", "x]", "100 %", "C:\\x", "[a] b", "{a}"]
)
def test_a_key_of_text_takes_every_text(text: str) -> None:
    assert load_config("verify", [*MODELS, f"output={text}"]).output == text
    assert load_config("verify", [*MODELS, f"+output={text}"]).output == text


@pytest.mark.parametrize("text", ["{prompt} Think.", "{prompt}", "[{prompt}]", "Solve: {prompt}"])
def test_a_template_may_begin_with_a_bracket(text: str) -> None:
    assert load_config("verify", [*MODELS, "teacher.reads=text", f"teacher.prompt={text}"]).teacher.prompt == text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.learning_rate", "'train.lr'"),
        ("learning-rate", "'train.lr'"),
        ("train.batch_size", "'train.prompts_per_step'"),
        ("max_steps", "'train.steps'"),
        ("tp", "'student.parallel.tensor'"),
        ("teacher.pp", "'teacher.parallel.pipeline'"),
        ("model", "'student.hf_path'"),
        ("train.betaz", "'train.betas'"),
        ("student.tensor", "'student.parallel.tensor'"),
    ],
)
def test_what_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"command line: unknown key {key!r}; did you mean {meant}?")):
        load_config("verify", [*MODELS, f"{key}=1"])


def test_nothing_is_suggested_for_a_key_like_no_other() -> None:
    with pytest.raises(ValueError, match="unknown key 'optimizer'; expected one of output, precision"):
        load_config("verify", [*MODELS, "optimizer=adam"])


def test_other_programs_names_lead_to_keys() -> None:
    known = {key.name for key in keys(Config)}
    assert set(USUAL_NAMES.values()) <= known and not set(USUAL_NAMES) & known


PASSWORD = "hunter2-of-mine"


@pytest.mark.parametrize(
    "override",
    [
        "rollout.vllm.endpoints=['http://me:{}@node7:8000']",
        "rollout.vllm.endpoints=[http://me:{}@node7:8000]",
        "rollout.vllm.endpoints=http://me:{}@node7:8000",
        "rollout.vllm.endpoints=['http://{}@node7']",
        "rollout.vllm.endpoints=['https://me:a/{} b@c@node7']",
        "rollout.vllm.endpoints=['http://node7:8000/?api_key={}']",
        "rollout.vllm.endpoints={{a: 'http://me:{}@node7'}}",
        "rollout.vllm.endpoints=[['http://me:{}@node7']]",
        "rollout.vllm.endpoints=['http://me:{}@node7'",
        "teacher.vllm.endpoints=['http://me:{}@node7:8000']",
        "teachers=[{{hf_path: a, endpoints: ['http://me:{}@node7:8000']}}]",
        "teachers.0.endpoints=['http://me:{}@node7:8000']",
        "rollout.vllm.endpoint=['http://me:{}@node7:8000']",
        "data.train=https://me:{}@node7/prompts.jsonl",
        "data.train={{'https://me:{}@node7/prompts.jsonl': 1}}",
        "seed=http://me:{}@node7",
        "http://me:{}@node7",
        "rollout.vllm.flags=[--api-key,{}]",
        "rollout.vllm.flags=[--api_k={}]",
        "rollout.vllm.flags=['--hf-token={}']",
    ],
)
def test_no_message_quotes_a_password(override: str, tmp_path: Path) -> None:
    """Whoever refuses it: this project, Hydra's grammar, OmegaConf or pydantic."""
    with pytest.raises(ValueError) as error:
        load_config("verify", [*MODELS, override.format(PASSWORD)])
    assert PASSWORD not in str(error.value) and "\n" not in str(error.value)


def test_a_password_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"rollout: {{vllm: {{endpoints: ['http://me:{PASSWORD}@node7']}}}}\n")
    with pytest.raises(
        ValueError, match=r"^rollout.vllm.endpoints.0 holds an address with a user name, .*not shown"
    ) as e:
        load_config("own", MODELS, tmp_path)
    assert PASSWORD not in str(e.value)


def test_addresses_without_secrets_are_taken() -> None:
    urls = ["http://127.0.0.1:8000", "https://node7/v1?a=b", "unix:///run/a@b.sock"]
    settings = ["data.train=s3/b@c/d.jsonl", f"rollout.vllm.endpoints=[{','.join(map(repr, urls))}]"]
    assert load_config("verify", [*MODELS, *settings]).rollout.vllm.endpoints == urls
    told = "Comments begin with // and annotations with @."
    config = load_config("verify", [*MODELS, f"teacher.system_prompt='{told}'", "output=runs//me@site"])
    assert (config.teacher.system_prompt, config.output) == (told, "runs//me@site")


def test_an_address_without_its_scheme_is_not_quoted() -> None:
    with pytest.raises(
        ValueError, match="endpoints: an address with an @ .not shown. is not the address of a server"
    ) as e:
        check_endpoints([f"me:{PASSWORD}@node7:8000"], None)
    assert PASSWORD not in str(e.value)


@pytest.mark.parametrize("url", ["http://node7:abc", "http://node7:80000", "http://[::1"])
def test_an_address_that_no_client_can_call(url: str) -> None:
    with pytest.raises(ValueError, match=r"rollout.vllm.endpoints: .* is not the address of a server; expected e.g."):
        check_endpoints([url], None)
    with pytest.raises(ValueError, match=r"rollout.vllm.endpoints: the path in .* has 108 bytes, expected at most 107"):
        check_endpoints([f"unix:///{'a' * 107}"], None)


@pytest.mark.parametrize("text", ["defaults\n  - quickstart\n", "- defaults\n"])
def test_a_file_that_is_no_mapping_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        load_config("own", MODELS, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("group", ["rollout.vllm", "teacher.vllm"])
@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--host", None),
        ("--hos", "--host"),
        ("--po=1", "--port"),
        ("--root_p", "--root-path"),
        ("--API", ""),
        ("--config", None),
        ("--config=x", None),
        ("--conf", "--config"),
        ("--api_key", None),
        ("--api-key.x", None),
        ("--middleware+", None),
        ("--hf-t", "--hf-token"),
        ("--grpc", None),
        ("--config-format", ""),
        ("--hf-overrides", ""),
        ("--max-num-seqs", ""),
        ("-tp", ""),
        ("--", ""),
        (-1, ""),
    ],
)
def test_flags_of_a_server(group: str, flag: str | int, meant: str | None) -> None:
    """vLLM's parser takes beginnings of flags, underscores, and what follows `=`, `.` or `+`; "": the flag is taken."""
    overrides = [*MODELS, f"{group}.flags=[{flag if isinstance(flag, int) else repr(flag)},x]"]
    if meant == "":
        load_config("verify", overrides)
        return
    short = "" if meant is None else f", which vLLM may read as {meant}"
    with pytest.raises(ValueError, match=rf"^{group}.flags holds --[a-z-]+{short}, but .*expected other arguments"):
        load_config("verify", overrides)
