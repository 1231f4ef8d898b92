"""The registry of losses: its names, how a user's function is found, and what is said where it is none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.own_loss import huber
from nemo_oprd.config.loading import load_config, to_yaml
from nemo_oprd.distillation import reference
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.registry import DIVERGENCES, ROW_LOSSES, RowLossEntry, resolve_divergence, resolve_row_loss

MODELS = ["student.hf_path=a", "teacher.hf_path=b"]
KIND = "loss.representation.kind"
WIDTH = 6
DRAW = torch.Generator().manual_seed(4)
A, B = torch.randn(2, 5, WIDTH, generator=DRAW)


@pytest.mark.parametrize("kind", ROW_LOSSES)
def test_built_in_row_losses_pass_the_trial(kind: str) -> None:
    """Each is one differentiable value per row, and takes the arguments that its entry names."""
    loss = resolve_row_loss(kind, {}, "sum", WIDTH)
    assert loss(A, B, "sum").shape == (5,)
    parameters = list(inspect.signature(loss.func).parameters)  # type: ignore[attr-defined]
    assert tuple(parameters[3:]) == ROW_LOSSES[kind].arguments


def test_the_reference_has_a_definition_of_every_built_in_kind() -> None:
    assert reference.DISTANCES.keys() == ROW_LOSSES.keys()
    for kind, entry in ROW_LOSSES.items():
        assert tuple(inspect.signature(reference.DISTANCES[kind]).parameters)[3:] == entry.arguments
    assert {"sampled_token", "top_k"} | reference.WHOLE_VOCABULARY.keys() == DIVERGENCES.keys()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_has_a_function_of_its_name(kind: str) -> None:
    assert resolve_divergence(kind).__name__ == kind
    assert OutputLoss(kind, k=4).needs_distribution == (kind != "sampled_token")


def test_a_function_of_ones_own() -> None:
    loss = resolve_row_loss("examples.own_loss:huber", {"delta": 0.5}, "sum", WIDTH)
    expected = torch.nn.functional.huber_loss(A, B, delta=0.5, reduction="none")
    torch.testing.assert_close(loss(A, B, "sum"), expected.sum(-1))
    torch.testing.assert_close(loss(A, B, "mean"), expected.mean(-1))
    assert huber(A, B, "sum").allclose(torch.nn.functional.huber_loss(A, B, reduction="none").sum(-1))


def test_the_reference_gives_a_built_in_kind_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """No built-in kind has arguments yet; this is one that has."""
    monkeypatch.setitem(ROW_LOSSES, "huber", RowLossEntry("examples.own_loss:huber", arguments=("delta",)))
    monkeypatch.setitem(reference.DISTANCES, "huber", huber)
    given = [f"{KIND}=huber", "loss.representation.kind_args.delta=0.5"]
    value = reference.row_loss(load_config("verify", [*MODELS, *given]).loss.representation)(A, B, "mean")
    expected = torch.nn.functional.huber_loss(A, B, delta=0.5, reduction="none").mean(-1)
    torch.testing.assert_close(value, expected)


def test_the_reference_calls_the_users_function_in_its_own_dtype() -> None:
    loss = load_config(
        "verify", [*MODELS, f"{KIND}=examples.own_loss:huber", "loss.representation.kind_args.delta=0.5"]
    )
    value = reference.row_loss(loss.loss.representation)(A.double(), B.double(), "mean")
    expected = torch.nn.functional.huber_loss(A.double(), B.double(), delta=0.5, reduction="none").mean(-1)
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)


def test_a_module_in_the_working_directory(tmp_path: Path) -> None:
    """The command nemo-oprd has its own directory on the path and not the working directory."""
    (tmp_path / "loss_at_hand.py").write_text("def l1(s, t, dim_reduction):\n    return (s - t).abs().sum(-1)\n")
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; from nemo_oprd.losses.registry import resolve_row_loss\n"
        "print(resolve_row_loss('loss_at_hand:l1', {}, 'sum', 4).func.__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.stdout == "l1\n", ended.stderr


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        resolve_row_loss("needs_more:f", {})


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("no_such_module:f", {}, "no module 'no_such_module'; expected one on Python's path or in the working dir"),
        ("examples.no_such:f", {}, "no module 'examples.no_such'"),
        ("math.nothing:f", {}, "no module 'math.nothing'"),
        ("examples.own_loss:hubert", {}, "module 'examples.own_loss' has no 'hubert'; .* did you mean 'huber'"),
        ("bad_losses:zzz", {}, "module 'bad_losses' has no 'zzz'; expected a function in it: correct the name"),
        ("bad_losses:NUMBER", {}, "NUMBER is int, expected a function"),
        ("os.path:basename", {}, r"can't be called with .*kind_args=\{\} .*expected a function\(student_ND, teach"),
        ("bad_losses:needs_delta", {}, r"kind_args=\{\} .*'delta'.*correct the function or the arguments"),
        ("bad_losses:needs_delta", {"beta": 1}, r"kind_args=\{'beta': 1\}"),
        ("bad_losses:whole_matrix", {}, r"returned float32 \[3, 6\] for rows \[3, 6\]; expected float32 \[3\]"),
        ("bad_losses:one_number", {}, r"returned float for rows \[3, 6\]"),
        ("bad_losses:half_precision", {}, r"returned bfloat16 \[3\] .*rows' dtype"),
        ("bad_losses:detached", {}, "without a gradient; .* with respect to student_ND"),
        ("bad_losses:of_the_teacher_only", {}, "without a gradient"),
        ("bad_losses:over_rows", {}, "for a row among others and .* for the same row alone; .* no statistics"),
        ("bad_losses:in_place", {}, "changes teacher_ND; expected unchanged rows"),
        ("mse", {"delta": 1}, f"kind_args.delta=1 with {KIND}=mse: expected no arguments; remove it"),
    ],
)  # fmt: skip
def test_mistakes_are_named(kind: str, arguments: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "functional")
    with pytest.raises(ValueError, match=message) as error:
        resolve_row_loss(kind, arguments, "mean", WIDTH)
    assert str(error.value).startswith(("loss.representation.kind=", "loss.representation.kind_args."))
    assert "\n" not in str(error.value)


def test_the_trial_draws_from_a_generator_of_its_own() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    resolve_row_loss("mse", {}, "mean", WIDTH)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_configurations() -> None:
    """Arguments come from a file or the command line, and are saved with the run."""
    given = ["loss.representation.kind=my_package.losses:f", "loss.representation.kind_args={a: [1, 2], b: {c: x}}"]
    config = load_config("verify", [*MODELS, *given, "loss.representation.kind_args.d=0.5"])
    assert config.loss.representation.kind == "my_package.losses:f"
    assert config.loss.representation.kind_args == {"a": [1, 2], "b": {"c": "x"}, "d": 0.5}
    assert "my_package.losses:f" in to_yaml(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{KIND}=msee", f"{KIND}='msee': expected one of mse, normalized_mse, cosine, or MODULE:FUNCTION .*'mse'"),
        (f"{KIND}=zzz", "expected one of mse, .*; choose one"),
        (f"{KIND}='my-package:f'", "expected one of mse, normalized_mse, cosine, or MODULE:FUNCTION"),
        (f"{KIND}='my_package:'", "or MODULE:FUNCTION"),
        ("loss.representation.kind_args.delta=1", "kind_args.delta=1 with .*kind=mse: expected no arguments"),
        ("loss.representation.kind_args=3", "kind_args=3: expected dict of values"),
        ("loss.output.kind=full_vocabulary", "expected one of none, sampled_token, .*; did you mean 'full_vocab'"),
    ],
)
def test_mistakes_in_configurations(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("verify", [*MODELS, override])


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys, nemo_oprd.losses.registry as r, nemo_oprd.losses.layer_mapping\n"
        "r.check_row_loss('my.module:f', {'a': 1}); r.check_divergence('jsd'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
