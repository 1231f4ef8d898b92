"""A run that is started again with other settings: what is refused, which files stay, and what the report shows."""

from __future__ import annotations

import json
import shutil
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_oprd.config import resume_rules
from nemo_oprd.config.keys import keys
from nemo_oprd.config.loading import as_plain, load_config
from nemo_oprd.config.resume_rules import allowed, changes, rule_of
from nemo_oprd.config.schema import Config
from nemo_oprd.models.fingerprint import fingerprint
from nemo_oprd.run.checkpoint_directory import commit_checkpoint, find_checkpoint, partial_directory
from nemo_oprd.run.config_history import Span, config_at, config_files, current_config, record_config, spans
from nemo_oprd.run.resume import check_resume, models_of
from nemo_oprd.run.run_reader import read_run
from nemo_oprd.tools.report.page import write_report


def model(directory: Path, content: bytes = b"weights") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    return directory


class Site:
    """A run directory, started and continued as `train` does it, without models."""

    def __init__(self, root: Path) -> None:
        self.root, self.output = root, root / "run"
        self.student, self.teacher = model(root / "student"), model(root / "teacher", b"others")

    def config(self, *overrides: str) -> Config:
        models = [f"student.hf_path={self.student}", f"teacher.hf_path={self.teacher}"]
        return load_config("verify", [*models, f"output={self.output}", "train.steps=200", *overrides])

    def start(self, after: int, to: int | None, *overrides: str, models: bool = True) -> str:
        """A start that goes on after `after` steps; `to`: it trains up to there and saves."""
        config = self.config(*overrides)
        name = record_config_in(self.output, config)
        entry: dict[str, Any] = {"started": "now", "config": name, "after_step": after}
        entry |= {"models": models_of(config)} if models else {}
        file = self.output / "environment.json"
        file.write_text(json.dumps([*(json.loads(file.read_text()) if file.exists() else []), entry]))
        if to is not None:
            kept = self.output / "metrics.jsonl"
            lines = kept.read_text().splitlines()[:after] if kept.exists() else []
            rows = [
                json.dumps({"step": step, "time": float(step), "rep/loss": 1.0}) for step in range(after + 1, to + 1)
            ]
            kept.write_text("".join(line + "\n" for line in [*lines, *rows]))
            root = self.output / "checkpoints"
            partial_directory(root, to).mkdir(parents=True)
            commit_checkpoint(root, {"step": to})
        return name

    def changed(self, *overrides: str) -> list[str]:
        step, _ = find_checkpoint(self.output / "checkpoints")
        return [str(change) for change in check_resume(self.config(*overrides), step)]


def record_config_in(directory: Path, config: Config) -> str:
    directory.mkdir(exist_ok=True)
    return record_config(directory, config)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_every_key_is_in_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new key of the schema fails here until it has a rule at its field, or in its group."""
    rules = {key.name: rule_of(key.name) for key in keys(Config) if not key.is_group}
    assert len(rules) > 120
    free = ("student.parallel.tensor", "teacher.placement", "logging.every", "train.save_every", "evaluation.samples")
    assert {rules[key] for key in free} == {"free"}
    learned = ("loss.output.kind", "train.lr", "train.steps", "student.hf_path", "data.train", "rollout.temperature")
    assert {rules[key] for key in learned} == {"learned"}
    with pytest.raises(KeyError, match="train.new_key"):
        rule_of("train.new_key")
    (without_rule,) = (key for key in keys(make_dataclass("Group", [("new", int, 0)])))
    monkeypatch.setattr(resume_rules, "_schema", lambda: {"train.new": without_rule})
    with pytest.raises(KeyError, match="train.new has no rule"):
        rule_of("train.new")


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ([], ["train.steps=400"], "free"),
        (["train.schedule=cosine"], ["train.schedule=cosine", "train.steps=400"], "learned"),
        (["train.warmup_fraction=0.1"], ["train.warmup_fraction=0.1", "train.steps=400"], "learned"),
        (["train.warmup_fraction=0.001"], ["train.warmup_fraction=0.001", "train.steps=400"], "free"),
        ([], ["data.validation.a=b"], "free"),
        (["data.contamination=drop"], ["data.contamination=drop", "data.validation.a=b"], "learned"),
        ([], ["loss.representation.kind=cosine"], "learned"),
        ([], ["seed=1"], "fixed"),
    ],
)
def test_what_needs_leave(site: Site, before: list[str], after: list[str], rule: str) -> None:
    (change,) = changes(as_plain(site.config(*before)), as_plain(site.config(*after)))
    assert change.rule == rule


def test_the_same_settings_in_other_words(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, links, leave, and keys that an earlier version did not have are no changes."""
    monkeypatch.chdir(site.root)
    (site.root / "link").symlink_to(site.student)
    old = as_plain(site.config())
    assert changes(old, as_plain(site.config("student.hf_path=link", "teacher.hf_path=teacher", "output=run"))) == []
    assert changes(old, as_plain(site.config("train.allow_changes=[train.lr]"))) == []
    del old["train"]["allow_changes"], old["train"]["save_minutes"]
    assert changes(old, as_plain(site.config())) == []


def test_paths_from_another_directory_and_one_file_without_its_list(site: Site, tmp_path: Path) -> None:
    """Relative paths belong to the directory in which the earlier start was made."""
    old = as_plain(site.config("data.train=a.jsonl", "bridge.path=b"))
    new = as_plain(site.config(f"data.train=[{site.root}/a.jsonl]", f"bridge.path={site.root}/b"))
    assert changes(old, new, str(site.root)) == []
    assert [change.key for change in changes(old, new, str(tmp_path / "elsewhere"))] == ["bridge.path", "data.train"]


def test_teachers_of_an_earlier_version(site: Site) -> None:
    """What an item lacks had its default, and what it has too much is of no version that there is."""
    given = ["teacher.hf_path=null", "teachers=[{hf_path: a, data_sources: [x]}, {hf_path: b}]"]
    old, new = as_plain(site.config(*given)), as_plain(site.config(*given))
    for teacher in old["teachers"]:
        del teacher["provider"]
        teacher["gone"] = 1
    assert changes(old, new) == []


def test_teachers_and_names_of_the_user(site: Site) -> None:
    both = "teachers=[{hf_path: a, data_sources: [x], weight: %s}, {hf_path: b}]"
    plain = [
        as_plain(site.config("teacher.hf_path=null", both % weight, f"data.validation={{s: of {weight}}}"))
        for weight in ("1.0", "2.0")
    ]
    found = changes(*plain)
    assert [str(change) for change in found] == ["teachers.0.weight: 1.0 -> 2.0", "data.validation.s: of 1.0 -> of 2.0"]
    assert [change.rule for change in found] == ["learned", "free"]
    assert [allowed(found[0], [entry]) for entry in ("teachers", "teachers.weight", "teachers.hf_path")] == [1, 1, 0]


def test_weighted_files_in_another_order(site: Site) -> None:
    """The order decides which prompts a step visits; the same order in other words is no change."""

    def changed(before: str, after: str) -> list[str]:
        plain = [as_plain(site.config(f"data.train={{{files}}}")) for files in (before, after)]
        found = changes(*plain, str(site.root))
        assert {change.rule for change in found} <= {"learned"} and all(allowed(each, ["data.train"]) for each in found)
        return [str(change) for change in found]

    assert changed("a:1,b:2", "b:2,a:1") == ['data.train: ["a", "b"] -> ["b", "a"]']
    assert changed("a:1,b:2", "a:1,b:2") == []
    assert changed("a:1,b:2", f"{site.root}/a:1,{site.root}/b:2") == []
    assert changed("a:1,b:2", f"{site.root}/b:2,{site.root}/a:1") != []
    assert changed("a:1,b:2", "b:2,a:3") == ["data.train.a: 1.0 -> 3.0"]
    site.start(0, 100, "data.train={a:1,b:2}")
    assert site.changed("data.train={a:1,b:2}") == []
    with pytest.raises(ValueError, match=r'data\.train: \["a", "b"\] -> \["b", "a"\].*allow_changes=\[data\.train\]'):
        site.changed("data.train={b:2,a:1}")


def test_all_refused_keys_are_named_at_once(site: Site) -> None:
    site.start(0, 100)
    before = {file.name: file.read_bytes() for file in site.output.iterdir() if file.is_file()}
    others = ("train.lr=1e-3", "loss.output.kind=jsd", "loss.output.weight=1", "student.parallel.tensor=2")
    with pytest.raises(ValueError, match="made with other settings") as raised:
        site.changed(*others)
    (line,) = str(raised.value).splitlines()
    lr = site.config().train.lr
    for change in (f"train.lr: {lr} -> 0.001", "loss.output.kind: none -> jsd", "loss.output.weight: 0.0 -> 1.0"):
        assert change in line
    assert "parallel" not in line
    assert "set them back, or choose another output, or go on with train.allow_changes=[" in line
    leave = line.rsplit("train.allow_changes=", 1)[1]
    assert len(site.changed(*others, f"train.allow_changes={leave}")) == 4
    assert len(site.changed(*others, "train.allow_changes=[loss,train.lr]")) == 4  # a group covers its keys
    with pytest.raises(ValueError, match=r"other settings, train\.lr: [^,]*; expected the same"):
        site.changed(*others, "train.allow_changes=[loss]")
    assert {file.name: file.read_bytes() for file in site.output.iterdir() if file.is_file()} == before


def test_no_leave_for_another_seed(site: Site) -> None:
    site.start(0, 100)
    with pytest.raises(ValueError, match=r"seed: 0 -> 1; expected .* \(no run can go on with another seed\)"):
        site.changed("seed=1", "train.allow_changes=[seed]")


def test_leave_for_a_key_that_does_not_exist(site: Site) -> None:
    with pytest.raises(ValueError, match=r"train\.allow_changes: unknown key 'train\.lrr'; did you mean 'train\.lr'"):
        site.config("train.allow_changes=[train.lrr]")


def test_a_checkpoint_behind_the_last_step(site: Site) -> None:
    site.start(0, 200)
    assert site.changed() == []
    with pytest.raises(ValueError, match=r"train\.steps=1: output=.*run has a checkpoint after 200 steps; expected at"):
        site.changed("train.steps=1")


def test_free_changes_are_listed(site: Site) -> None:
    site.start(0, 100)
    assert site.changed() == []
    assert site.changed("student.parallel.tensor=2", "train.steps=300", "logging.every=7") == [
        "student.parallel.tensor: 1 -> 2", "train.steps: 200 -> 300", "logging.every: 1 -> 7"
    ]  # fmt: skip


def test_a_run_without_checkpoints_is_not_overwritten_with_other_settings(site: Site) -> None:
    site.start(0, 3)
    shutil.rmtree(site.output / "checkpoints")
    assert site.changed() == []
    with pytest.raises(ValueError, match=r"was trained with other settings.*start over with train\.allow_changes=\[tr"):
        site.changed("train.lr=1")
    # nothing there forbids another precision, which needs leave as everything else that was learned with
    with pytest.raises(ValueError, match=r"precision: fp32 -> bf16; .*allow_changes=\[precision\]"):
        site.changed("precision=bf16")
    assert site.changed("precision=bf16", "train.allow_changes=[precision]") == ["precision: fp32 -> bf16"]
    (site.output / "metrics.jsonl").write_text('{"step": 0, "time": 0.0, "val/a/avg@1": 0.0}\n{"st')
    assert site.changed("train.lr=1") == []  # nothing was trained


def test_a_model_that_moved_and_another_model(site: Site) -> None:
    site.start(0, 100)
    site.student.rename(site.root / "moved")
    assert len(site.changed(f"student.hf_path={site.root / 'moved'}")) == 1
    other = model(site.root / "other", b"weighty")
    with pytest.raises(ValueError, match=r"student\.hf_path: .* \(no run can go on with another student\.hf_path\)"):
        site.changed(f"student.hf_path={other}", "train.allow_changes=[student.hf_path]")
    moved = f"student.hf_path={site.root / 'moved'}"
    with pytest.raises(ValueError, match=r"teacher\.hf_path: .*other; expected .*allow_changes=\[teacher\.hf_path\]"):
        site.changed(moved, f"teacher.hf_path={other}")
    (site.teacher / "model.safetensors").write_bytes(b"new")
    with pytest.raises(ValueError, match=r"teacher\.hf_path: .*teacher -> another model there"):
        site.changed(moved)
    assert len(site.changed(moved, "train.allow_changes=[teacher]")) == 2


def test_another_teacher_that_never_taught(site: Site) -> None:
    """A start with leave that was killed before its first step: the first teacher needs none."""
    site.start(0, 100)
    other = model(site.root / "other", b"w")
    site.start(100, None, f"teacher.hf_path={other}")
    assert site.changed() == []
    with pytest.raises(ValueError, match=r"teacher\.hf_path"):
        site.changed(f"teacher.hf_path={other}")


def test_another_teacher_in_the_same_place_that_never_taught(site: Site) -> None:
    """A start with leave that made no kept step does not make its model the one that taught."""
    site.start(0, 100)
    weights = site.teacher / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(b"new")
    site.start(100, None)
    with pytest.raises(ValueError, match=r"teacher\.hf_path: .*another model there"):
        site.changed()
    weights.write_bytes(kept)
    assert site.changed() == []


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """A change at the beginning, at the end or in size shows, and the rest of the directory does not count."""
    large = model(tmp_path / "large", bytes(8 << 20))
    found = [fingerprint(large)]
    for content in (b"\1" + bytes((8 << 20) - 1), bytes((8 << 20) - 1) + b"\1", bytes((8 << 20) + 1)):
        (large / "model.safetensors").write_bytes(content)
        found.append(fingerprint(large))
    assert len(set(found)) == 4
    (large / "notes.txt").write_text("mine")
    assert fingerprint(large) == found[-1]
    assert fingerprint(tmp_path / "none") is None


def test_runs_of_earlier_versions(site: Site) -> None:
    """Without what tells where a start went on: the path is the model, unless both models are there to compare."""
    site.start(0, 100, models=False)
    (site.output / "environment.json").write_text('[{"started": "then"}]')
    assert site.changed() == []
    same, other = model(site.root / "same"), model(site.root / "other", b"w")
    assert len(site.changed(f"student.hf_path={same}")) == 1
    with pytest.raises(ValueError, match=r"student\.hf_path"):
        site.changed(f"student.hf_path={other}")
    site.student.rename(site.root / "gone")
    with pytest.raises(ValueError, match=r"allow_changes=\[student\.hf_path\]"):
        site.changed(f"student.hf_path={site.root / 'gone'}")
    (site.output / "config.yaml").unlink()
    assert site.changed("train.lr=1") == []


def test_what_was_written_stays(site: Site) -> None:
    """A changed configuration adds a file; the same one, also an earlier one, adds none."""
    assert site.start(0, 100) == "config.yaml"
    first = (site.output / "config.yaml").read_bytes()
    assert site.start(100, None) == "config.yaml"
    assert site.start(100, 150, "train.lr=1e-3") == "config.1.yaml"
    assert site.start(150, 200, "train.lr=1e-3", "student.parallel.tensor=2") == "config.2.yaml"
    assert (site.output / "config.yaml").read_bytes() == first
    assert [file.name for file in config_files(site.output)] == ["config.yaml", "config.1.yaml", "config.2.yaml"]
    rates = [yaml.safe_load(file.read_text())["train"]["lr"] for file in config_files(site.output)]
    assert rates == [site.config().train.lr, 1e-3, 1e-3]
    assert spans(site.output) == [Span(0, "config.yaml"), Span(100, "config.1.yaml"), Span(150, "config.2.yaml")]
    assert current_config(site.output).name == "config.2.yaml"
    assert config_at(site.output, 150) == site.output / "config.1.yaml"
    # back to step 120 with the first settings
    assert site.start(120, None) == "config.yaml"
    assert spans(site.output) == [Span(0, "config.yaml"), Span(100, "config.1.yaml"), Span(120, "config.yaml")]
    assert current_config(site.output).name == "config.yaml"


def test_a_crash_before_the_first_step_loses_nothing(site: Site) -> None:
    """The settings of the checkpoint stay those that later starts are compared with."""
    site.start(0, 100)
    record_config(site.output, site.config("train.lr=1e-3"))  # killed before it was a start
    assert current_config(site.output).name == "config.yaml"
    site.start(100, None, "train.lr=1e-2")  # killed before its first step
    assert site.changed() == []
    with pytest.raises(ValueError, match=f"train.lr: {site.config().train.lr} -> 0.01"):
        site.changed("train.lr=1e-2")
    assert site.start(100, 110, "train.lr=1e-3") == "config.1.yaml"
    assert len(config_files(site.output)) == 3


def test_the_report_shows_which_steps_ran_with_what(site: Site) -> None:
    site.start(0, 2)
    plain = write_report([site.output], site.root / "plain.html").read_text()
    assert "Settings of the steps" not in plain
    site.start(2, 4, "train.lr=1e-3", "train.allow_changes=[train.lr]")
    run = read_run(site.output, "run")
    assert run.setting("train.lr") == 1e-3
    page = write_report([site.output], site.root / "page.html").read_text()
    section = page.split('<section id="changed">')[1].split("</section>")[0]
    assert "<td>1 to 2</td><td><code>config.yaml</code></td>" in section
    assert "<td>3 to 4</td><td><code>config.1.yaml</code></td>" in section
    lr = site.config().train.lr
    assert f"<code>train.lr</code>: <code>{lr}</code> → <code>0.001</code>" in section
