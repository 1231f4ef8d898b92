"""The checkpoint directory: which one a run resumes from, which are kept, and that a kill at any moment is harmless."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo_oprd.run import checkpoint_directory as checkpoints
from nemo_oprd.run.checkpoint_directory import (
    commit_checkpoint,
    find_checkpoint,
    find_damage_inside,
    has_digests,
    prune,
    read_best,
    read_state,
    refuse_damage,
    remove_leftovers,
)


def write(root: Path, step: int, best: float | None = None, text: str = "weights") -> None:
    """A checkpoint as a save makes it."""
    partial = checkpoints.partial_directory(root, step)
    partial.mkdir(parents=True)
    (partial / "shard").write_text(f"{text} {step}")
    write_more(root, step, best)


def write_more(root: Path, step: int, best: float | None = None) -> None:
    """The end of a save."""
    partial = checkpoints.partial_directory(root, step)
    (partial / "hf").mkdir()
    (partial / "hf" / "config.json").write_text("{}")
    best_json = {"step": step, "metric": "val/x/avg@4", "value": best} if best is not None else None
    commit_checkpoint(root, {"step": step}, best_json)


def directory(root: Path, step: int) -> Path:
    return checkpoints.iteration_directory(root, step)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_*"))


def test_none_and_the_newest(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none") == (None, [])
    for step in (2, 4, 10):
        write(tmp_path, step)
    assert find_checkpoint(tmp_path) == (10, [])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (lambda d: (d / "shard").write_text("we"), "shard has 2 bytes of 9"),
    "missing shard": (lambda d: (d / "shard").unlink(), "shard is missing"),
    "missing file below": (lambda d: (d / "hf" / "config.json").unlink(), "hf/config.json is missing"),
    "no state.json": (lambda d: (d / "state.json").unlink(), "state.json is missing"),
    "half a state.json": (lambda d: (d / "state.json").write_text('{"step": 4, "fi'), "state.json is damaged"),
    "state.json of another program": (lambda d: (d / "state.json").write_text("[]"), "state.json is damaged"),
    "empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), "state.json is missing"),
    "directory gone": (shutil.rmtree, "state.json is missing"),
    "digests of another kind": (lambda d: edit_state(d, sha256=[]), "state.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_skipped_and_reported(tmp_path: Path, kind: str) -> None:
    for step in (2, 4):
        write(tmp_path, step)
    harm, reason = DAMAGE[kind]
    harm(directory(tmp_path, 4))
    found, notes = find_checkpoint(tmp_path)
    assert found == 2
    assert notes == [f"{directory(tmp_path, 4)} is incomplete ({reason}) and was skipped"]
    if kind != "directory gone":
        harm(directory(tmp_path, 2))
    else:
        shutil.rmtree(directory(tmp_path, 2))
    with pytest.raises(
        ValueError, match="no checkpoint in .* is complete: .*expected one to resume from: copy it again"
    ):
        find_checkpoint(tmp_path)


def edit_state(directory: Path, **changes: Any) -> None:
    """Changes keys of a checkpoint's state.json; None removes one."""
    state = {**json.loads((directory / "state.json").read_text()), **changes}
    state = {key: value for key, value in state.items() if value is not None}
    (directory / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda d: (d / "shard").write_text("weights 5"), "shard has another sha256 than when it was written"),
        (lambda d: (d / "hf" / "config.json").write_text("[]"), "hf/config.json has another sha256 than"),
        (lambda d: edit_state(d, step=5), "state.json has another content than when it was written"),
    ],
)
def test_other_content_of_the_same_size(tmp_path: Path, harm: Callable[[Path], Any], reason: str) -> None:
    for step in (2, 4):
        write(tmp_path, step)
    harm(directory(tmp_path, 4))
    found, notes = find_checkpoint(tmp_path)
    assert found == 2
    (note,) = notes
    assert note.startswith(f"{directory(tmp_path, 4)} is damaged ({reason}") and note.endswith(") and was skipped")


def test_weights_are_compared_apart_from_small_files(tmp_path: Path) -> None:
    """By all ranks together: `find_checkpoint` is called on every rank, and is told what they have found."""
    for step in (2, 4):
        checkpoints.partial_directory(tmp_path, step).mkdir(parents=True)
        (checkpoints.partial_directory(tmp_path, step) / "__0_0.distcp").write_text(f"weights {step}")
        write_more(tmp_path, step)
    newest = directory(tmp_path, 4)
    assert find_damage_inside(newest) is None
    (newest / "__0_0.distcp").write_text("weights 0")
    assert find_checkpoint(tmp_path) == (4, [])
    damage = find_damage_inside(newest)
    assert damage == "is damaged (__0_0.distcp has another sha256 than when it was written)"
    assert find_checkpoint(tmp_path, {4: damage}) == (2, [f"{newest} {damage} and was skipped"])
    with pytest.raises(ValueError, match=r"__0_0\.distcp has another sha256.*copy them again, or name another"):
        refuse_damage(newest, together=False)
    (newest / "hf" / "config.json").write_text("[]")
    (newest / "__0_0.distcp").write_text("weights 4")
    refuse_damage(newest, together=False)  # a user may change what describes the model
    refuse_damage(newest / "hf", together=False)  # no checkpoint of a training run


def test_a_checkpoint_without_digests(tmp_path: Path) -> None:
    write(tmp_path, 4)
    assert has_digests(directory(tmp_path, 4))
    edit_state(directory(tmp_path, 4), sha256=None, state_sha256=None)
    (directory(tmp_path, 4) / "shard").write_text("weights 5")
    assert find_checkpoint(tmp_path) == (4, [])
    assert not has_digests(directory(tmp_path, 4))
    assert find_damage_inside(directory(tmp_path, 4)) is None


def test_tracker(tmp_path: Path) -> None:
    """An earlier number goes back; one without a directory is skipped; anything else is an error."""
    for step in (2, 4, 6):
        write(tmp_path, step)
    tracker = tmp_path / checkpoints.LATEST
    tracker.write_text("4\n")
    assert find_checkpoint(tmp_path) == (4, [])
    tracker.write_text("5")
    found, notes = find_checkpoint(tmp_path)
    assert found == 4
    assert "iter_0000005 is incomplete" in notes[0]
    for text in ("", "latest", "-2", "\u00b2"):
        tracker.write_text(text)
        with pytest.raises(ValueError, match=r"expected the number of a checkpoint.*\[6, 4, 2\]"):
            find_checkpoint(tmp_path)
    tracker.unlink()
    assert find_checkpoint(tmp_path) == (6, [])


def test_leftovers_are_neither_taken_nor_left(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for name in (".partial_iter_0000004", ".removed_iter_0000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_text("x")
    (tmp_path / ".partial_best.json").write_text("{")
    assert find_checkpoint(tmp_path) == (2, [])
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", checkpoints.LATEST}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, best in ((2, 0.1), (4, 0.5), (6, None), (8, None), (10, None)):
        write(tmp_path, step, best)
        prune(tmp_path, 2, step)
    assert steps(tmp_path) == [4, 8, 10]
    assert read_best(tmp_path) == {"step": 4, "metric": "val/x/avg@4", "value": 0.5}
    prune(tmp_path, 0, 10)
    assert steps(tmp_path) == [4, 8, 10]


def test_going_back_leaves_the_other_line_and_forgets_its_best_when_replaced(tmp_path: Path) -> None:
    for step, best in ((2, None), (4, None), (6, 0.9), (8, None)):
        write(tmp_path, step, best)
    (tmp_path / checkpoints.LATEST).write_text("2")
    write(tmp_path, 4, text="another line's")
    prune(tmp_path, 1, 4)
    assert steps(tmp_path) == [4, 6, 8]
    assert find_checkpoint(tmp_path) == (4, [])
    assert (directory(tmp_path, 4) / "shard").read_text() == "another line's 4"
    assert read_best(tmp_path) == {"step": 6, "metric": "val/x/avg@4", "value": 0.9}
    write(tmp_path, 6, text="another line's")
    assert read_best(tmp_path) is None


FORMAT_1 = {
    "step": 4,
    "seed": 0,
    "precision": "fp32",
    "train.distributed_optimizer": True,
    "deepest trained layer": 3,
    "final norm is trained": True,
    "head is trained": False,
    "trained projectors": "rank 2, layers 1:2",
    "trained in parts": True,
    "layers of the moving average": 4,
    "gaps": {"layers": {"1": 0.5}},
    "partial training": {"updates": 3, "updates_of_others": 4},
    "evaluation is put off": True,
}
FORMAT_2 = {
    "format": 2,
    "step": 4,
    "seed": 0,
    "precision": "fp32",
    "distributed_optimizer": True,
    "deepest_trained_layer": 3,
    "final_norm_trained": True,
    "head_trained": False,
    "trained_projectors": "rank 2, layers 1:2",
    "partially_trained": True,
    "moving_average_layers": 4,
    "adaptive_gaps": {"layers": {"1": 0.5}},
    "partial_training_updates": {"updates": 3, "updates_of_others": 4},
    "evaluation_deferred": True,
}


def rewrite_state(root: Path, step: int, state: dict[str, Any]) -> None:
    """Gives a checkpoint another state.json, with the sizes of its own files, as earlier versions wrote it."""
    file = directory(root, step) / "state.json"
    file.write_text(json.dumps({**state, "files": json.loads(file.read_text())["files"]}))


def test_state_of_the_current_format(tmp_path: Path) -> None:
    """All keys are snake_case, and a state is read back as it was written."""
    checkpoints.partial_directory(tmp_path, 4).mkdir(parents=True)
    commit_checkpoint(tmp_path, {name: value for name, value in FORMAT_2.items() if name != "format"})
    digest = read_state(directory(tmp_path, 4))["state_sha256"]
    assert read_state(directory(tmp_path, 4)) == {**FORMAT_2, "files": {}, "sha256": {}, "state_sha256": digest}
    written = (directory(tmp_path, 4) / "state.json").read_text()
    assert all(name.isidentifier() and name.islower() for name in json.loads(written))


def test_state_of_format_1_is_read_with_the_current_keys(tmp_path: Path) -> None:
    write(tmp_path, 4)
    rewrite_state(tmp_path, 4, FORMAT_1)
    assert find_checkpoint(tmp_path) == (4, [])
    state = read_state(directory(tmp_path, 4))
    assert set(state.pop("files")) == {"shard", "hf/config.json"}
    assert state == FORMAT_2


def test_state_of_the_first_versions_lacks_keys(tmp_path: Path) -> None:
    """They trained all parameters in every step, without a moving average, trained projectors or adaptive weights."""
    write(tmp_path, 4)
    rewrite_state(tmp_path, 4, {"step": 4, "deepest trained layer": 3})
    state = read_state(directory(tmp_path, 4))
    assert (state["deepest_trained_layer"], state["partially_trained"], state["moving_average_layers"]) == (3, False, 0)
    assert (state["trained_projectors"], state["adaptive_gaps"]) == (None, {})


def test_a_newer_format_is_refused_and_not_skipped(tmp_path: Path) -> None:
    """Resuming from an older checkpoint instead would train the later steps again and replace the newer checkpoint."""
    for step in (2, 4):
        write(tmp_path, step)
    rewrite_state(tmp_path, 4, {**FORMAT_2, "format": 3})
    message = r"state\.json: format=3, expected at most 2; resume with the version of nemo-oprd that wrote this"
    with pytest.raises(ValueError, match=message):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_state(directory(tmp_path, 4))
    rewrite_state(tmp_path, 4, {**FORMAT_2, "format": "new"})
    assert find_checkpoint(tmp_path)[0] == 2


class Killed(BaseException):
    """Stands for SIGKILL."""


def calls_of_a_save(root: Path) -> int:
    """How many calls that change files a save at step 6 makes (counted on a copy)."""
    copy = root.with_name("counted")
    shutil.copytree(root, copy)
    return save_and_prune(copy, killed_at=None)


def save_and_prune(root: Path, killed_at: int | None) -> int:
    """Saves and prunes; from file-changing call number `killed_at` on, no such call happens, not even to clean up."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if killed_at is not None and count > killed_at:
                raise Killed
            return call(*args, **kwargs)

        return wrapper

    names = [(Path, name) for name in ("rename", "unlink", "write_text")] + [(shutil, "rmtree")]
    with mock.patch.multiple(Path, **{n: counted(getattr(Path, n)) for o, n in names if o is Path}):  # noqa: SIM117
        with mock.patch.object(shutil, "rmtree", counted(shutil.rmtree)):
            remove_leftovers(root)
            write(root, 6, best=0.7, text="new")
            prune(root, 2, 6)
    return count


def test_killed_at_any_call_of_a_save(tmp_path: Path) -> None:
    """Before: 2 (the best), 4, and a 6 of an abandoned line. After any kill: a whole checkpoint, and a second save."""
    before = tmp_path / "before"
    for step, best in ((2, 0.5), (4, None), (6, None)):
        write(before, step, best, text="old")
    (before / checkpoints.LATEST).write_text("4\n")
    calls = calls_of_a_save(before)
    assert calls > 10
    for number in range(calls):
        root = tmp_path / f"killed-{number}"
        shutil.copytree(before, root)
        with pytest.raises(Killed):
            save_and_prune(root, killed_at=number)
        found, notes = find_checkpoint(root)
        assert (found, notes) in ((4, []), (6, [])), number
        assert found is not None
        best = read_best(root)
        assert best is not None and best["step"] in (2, 6), number
        if found == 6:
            assert (directory(root, 6) / "shard").read_text() == "new 6", number
            assert best["step"] == 6, number
        shutil.rmtree(checkpoints.partial_directory(root, 6), ignore_errors=True)
        save_and_prune(root, killed_at=None)
        assert find_checkpoint(root) == (6, [])
        assert steps(root) == [4, 6]
        assert json.loads((root / checkpoints.BEST).read_text())["step"] == 6
        assert {p.name for p in root.iterdir() if p.name.startswith(".")} <= set(), number


def test_state_that_another_rank_gathered_is_no_common_state() -> None:
    """Megatron compares what is left after sharded and non-persistent values with rank 0's, and warns of a None."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    from nemo_oprd.megatron.optimizer_state import _leave_out_ungathered_state

    groups = {"param_groups": [{"step": 3}]}
    alone = {"optimizer": dict(groups), "param_state_sharding_type": "fully_reshardable", "param_state": None}
    chained = {0: {**alone}, 1: {**alone, "param_state": {0: "kept"}}}
    for state in (alone, chained):
        _leave_out_ungathered_state(state)
    assert isinstance(alone["param_state"], LocalNonpersistentObject)
    assert isinstance(chained[0]["param_state"], LocalNonpersistentObject)
    assert chained[1]["param_state"] == {0: "kept"}
    _, common = save_preprocess({"optimizer": alone}, validate_access_integrity=False)
    assert common == {"optimizer": {"optimizer": groups, "param_state_sharding_type": "fully_reshardable"}}
