"""The YAML files of a configuration before Hydra composes them: circles, aliases, odd content, and who sets a key."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nemo_oprd.config.loading import load_config, origin_of

BOMB = "\n".join(["a0: &a0 [1, 1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"mine": "defaults: [mine]"}, "mine.yaml: the list `defaults` leads in a circle, mine.yaml -> mine.yaml (the"),
        ({"mine": "defaults: [a]", "a": "defaults: [b]", "b": "defaults: [a]"}, "circle, a.yaml -> b.yaml -> a.yaml;"),
        ({"mine": "defaults: [{loss: a}]", "loss/a": "defaults: [a]"}, "a circle, loss/a.yaml -> loss/a.yaml;"),
        ({"mine": "defaults: [self]"}, "its list `defaults` names self, and there is no self.yaml"),
        ({"mine": "defaults: 5"}, "configuration mine: Invalid defaults list in 'mine', defaults must be a list"),
        ({"mine": "defaults: [{loss: 5}]"}, "configuration mine: Unsupported item value in defaults"),
        ({"mine": BOMB}, "mine.yaml: its aliases stand for "),
        ({"mine": MERGES}, "mine.yaml: its aliases stand for "),
        ({"mine": "defaults: [a]", "a": BOMB}, "a.yaml: its aliases stand for "),
        ({"mine": "data: &d\n  validation: *d"}, "mine.yaml: an alias stands inside its own anchor; expected values"),
        (
            {"mine": f"output: {'[' * 5000}{']' * 5000}"},
            "mine: groups or lists inside each other without end",
        ),
        ({"mine": "output: " + "${a:" * 500 + "1" + "}" * 500}, "mine: groups or lists inside each other without end"),
        ({"mine": "x" * (1 << 21)}, "mine.yaml: has 2,097,152 bytes; expected a configuration of at most 1,048,576"),
        ({"mine": "null: 3"}, "configuration mine: a key or a value that can't be read; expected YAML in mine.yaml"),
        (
            {"mine": "train.lr: 3"},
            "unknown key 'train.lr', with a dot in its name; expected lr in the group train",
        ),
        ({"mine": 'output: "a\\0b"'}, r"output='a\x00b': holds a null character; expected a path: correct it"),
        (
            {"mine": "seed: ${seed}"},
            "seed holds an interpolation that leads nowhere (Recursive interpolation",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_can_not_be_composed(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(ValueError) as error:
        load_config("mine", ["student.hf_path=a", "teacher.hf_path=b"], tmp_path)
    assert says in str(error.value) and len(str(error.value)) < 500
    assert time.monotonic() - started < 10


def test_aliases_are_taken(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("student: &s {hf_path: a}\nteacher: {<<: *s, offload: true}")
    config = load_config("mine", [], tmp_path)
    assert (config.student.hf_path, config.teacher.hf_path, config.teacher.offload) == ("a", "a", True)


@pytest.mark.parametrize(
    ("key", "overrides", "file"),
    [
        ("seed", [], "base"),
        ("output", [], "mine"),
        ("output", ["output=x"], None),
        ("data.train", [], "base"),
        ("data.train", ["data={}"], None),
        ("data.validation.a", [], "mine"),
        ("data.validation.a", ["data.validation.b=x"], "mine"),
        ("teachers[1].hf_path", [], "base"),
        ("teachers[1].hf_path", ["teachers.1.hf_path=x"], None),
        ("loss.output.weight", [], "loss/one"),
        ("loss.output.weight", ["loss=two"], "loss/two"),
        ("precision", [], "all"),
        ("train.lr", [], None),
    ],
)
def test_which_file_sets_a_key(tmp_path: Path, key: str, overrides: list[str], file: str | None) -> None:
    (tmp_path / "loss").mkdir()
    texts = {
        "base": "output: x\nseed: 1\ndata: {train: a, validation: {a: x}}\nteachers: [{hf_path: a}, {hf_path: b}]",
        "mine": "defaults: [base, {loss: one}, all, _self_]\noutput: y\ndata: {validation: {a: y}}",
        "all": "# @package _global_\nprecision: fp32",
        "loss/one": "output: {weight: 1.0}",
        "loss/two": "output: {weight: 2.0}",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    found = origin_of(key, name="mine", overrides=overrides, config_dir=tmp_path)
    assert found == (None if file is None else tmp_path / f"{file}.yaml")
