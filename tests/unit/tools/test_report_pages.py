"""The report's evaluations, settings, costs, responses and tokens: against the files that they come from."""

from __future__ import annotations

import html
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import PROBLEMS, TOKENS, make_run

from nemo_oprd.cli import main
from nemo_oprd.evaluation.intervals import MEANINGS, Difference
from nemo_oprd.run.run_reader import read_run
from nemo_oprd.tools import report as command
from nemo_oprd.tools.report import page as pages
from nemo_oprd.tools.report.evaluations import Evaluation, RunEvaluations, groups
from nemo_oprd.tools.report.figures import Key, interval, number, signed
from nemo_oprd.tools.report.page import write_report
from nemo_oprd.tools.report.panels import training_minutes
from nemo_oprd.tools.report.responses import token_panel

pytest.importorskip("matplotlib")
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two graded runs; the second learned less, with another learning rate."""
    root = tmp_path_factory.mktemp("runs")
    made = [make_run(root / "a"), make_run(root / "b", seed=1, learned=0.5, lr=3e-4)]
    for run in made:
        main(["grade", str(run), "--judge", "text"])
    return made


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(runs, tmp_path_factory.mktemp("out") / "report.html").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _no_figures(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of `page` are drawn; tests that write pages of their own look at what is beside them."""
    monkeypatch.setattr(pages, "svg", lambda *arguments: "<svg></svg>")


def section(page: str, heading: str) -> str:
    """The section with this heading, or the part of one that begins with it."""
    (found,) = re.findall(rf"<h2>{heading}.*?(?=<h2>|</section>)", page, flags=re.DOTALL)
    return str(found)


def rows(part: str) -> list[list[str]]:
    """The texts of the cells of every row."""
    texts = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", part, re.S)
    ]
    return [
        [html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", cell))).strip() for cell in row] for row in texts
    ]


def test_intervals_are_those_of_the_evaluations(runs: list[Path], page: str) -> None:
    table = rows(section(page, "Validation"))
    kept = [json.loads((runs[0] / "evaluations" / f"step_000000{i}" / "evaluation.json").read_text()) for i in (0, 6)]
    first, last = (interval("avg@2", each["val/sums/avg@2/ci"]) for each in kept)
    assert first != last and first.startswith("[")
    assert table[1][2] == f"30.0 % → 80.0 % {first} → {last} 83 % of the gap closed"
    teacher = json.loads((runs[0] / "evaluations" / "teacher" / "evaluation.json").read_text())
    assert interval("avg@2", teacher["val/sums/avg@2/ci"]) in table[-1][2]


def test_paired_differences_are_those_of_grade(runs: list[Path], page: str) -> None:
    """Last minus first as `nemo-oprd grade` wrote it, last minus teacher, and one run minus the other."""
    table = rows(section(page, "Paired differences"))[1:]
    heads = re.findall(r'<th class="number">(.*?)</th>', section(page, "Paired differences"))
    assert heads == ["avg", "best@2", "maj@2", "avg_len", "truncated", "no_answer", "dist_4g"]
    assert [row[1] for row in table] == [
        "before training → a after step 6",
        "teacher → a after step 6",
        "before training → b after step 6",
        "teacher → b after step 6",
        "a after step 6 → b after step 6",
    ]
    written = json.loads((runs[0] / "evaluations" / "step_0000006" / "differences.json").read_text())
    for column, metric in enumerate(heads):
        value, bounds = written[f"val/sums/{metric}"], written[f"val/sums/{metric}/ci"]
        value, low, high = (signed(metric, each, Difference(value, *bounds)) for each in (value, *bounds))
        assert table[0][2 + column] == f"{value} [{low}, {high}]"
    assert table[0][2].startswith("+50.0 ") and table[4][2].startswith(f"{MINUS}30.0 ")
    colours = re.findall(r'<span class="(better|worse|other|)">', section(page, "Paired differences"))
    of_row = len(heads)
    assert colours[0] == "better" and colours[4 * of_row] == "worse"
    assert colours[of_row - 2] == ""  # no_answer: 0 in both


def test_subjects(page: str) -> None:
    table = rows(section(page, "By subject and level"))[1:]
    assert [row[1:3] for row in table][:2] == [["sums/subject/even", "20"], ["sums/subject/odd", "20"]]
    assert all(re.fullmatch(r"[\d.]+\s% \[[\d.]+, [\d.]+\]", cell) for row in table for cell in row[3:])


def test_a_subject_without_an_average_has_no_row(tmp_path: Path) -> None:
    last = Evaluation("after step 6", tmp_path, {"val/sums/subject/even/problems": 20.0})
    assert groups([RunEvaluations(Key("a", "series-0"), None, last, None)]) == []


def test_evaluations_that_differ_are_not_compared(runs: list[Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "c", seed=2)
    main(["grade", str(other), "--judge", "text"])
    for file in ("generations", "grades"):
        lines = (
            (other / "evaluations" / "step_0000006" / file / "sums.jsonl")
            .read_text()
            .replace('"answer": "3"', '"answer": "4"')
        )
        (other / "evaluations" / "step_0000006" / file / "sums.jsonl").write_text(lines)
    page = write_report([runs[0], other], tmp_path / "report.html").read_text()
    notes = [row[2] for row in rows(section(page, "Paired differences"))[1:] if row[2].startswith("not compared")]
    assert len(notes) == 3 and "problem 0 has the answer '4'" in notes[0]


def test_differing_settings(page: str) -> None:
    table = {row[0]: row[1:] for row in rows(section(page, "Settings that differ"))[1:]}
    assert table == {
        "train.lr": ["0.0001", "0.0003"],
        "environment.packages.torch": ["2.9", "2.10"],
    }


def test_one_run_differs_from_nothing(runs: list[Path], tmp_path: Path) -> None:
    assert "Settings that differ" not in write_report(runs[:1], tmp_path / "report.html").read_text()


def leads(page: str) -> list[str]:
    """The sentences at the top of the page."""
    texts = re.findall(r'<p class="lead">(.*?)</p>', page, flags=re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", text)).strip() for text in texts]


def card(page: str) -> dict[str, str]:
    """The first run's summary."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html.unescape(page.split("</article>")[0])))


def test_the_page_begins_with_a_sentence_per_run(runs: list[Path], page: str) -> None:
    first, second = leads(page)
    assert first == "a 83 % of the gap closed: 30.0 → 80.0 %, teacher 90.0 %, 6 min 40 s on 2 ranks"
    assert second == "b 33 % of the gap closed: 30.0 → 50.0 %, teacher 90.0 %, 6 min 40 s on 2 ranks"
    assert page.index(first[2:]) < page.index("<nav>")


UNFINISHED = "After 4 of 6 steps, unfinished: "
VALUES = {"val/sums/avg@2": 0.643, "val/sums/teacher/avg@2": 1.0}


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (VALUES, {"val/sums/avg@2": 0.986}, "96 % of the gap closed: 64.3 → 98.6 %, teacher 100.0 %, 6 min 48 s"),
        (VALUES, {"val/sums/avg@2": 0.5}, f"{MINUS}40 % of the gap closed: 64.3 → 50.0 %, teacher 100.0 %, 6 min 48 s"),
        (VALUES | {"val/sums/teacher/avg@2": 0.643}, {"val/sums/avg@2": 0.7},
         "64.3 → 70.0 %, teacher 64.3 %, which was not ahead, 6 min 48 s"),
        (VALUES | {"val/sums/teacher/avg@2": 0.6}, {"val/sums/avg@2": 0.7},
         "64.3 → 70.0 %, teacher 60.0 %, which was not ahead, 6 min 48 s"),
        ({"val/sums/avg@2": 0.643}, {"val/sums/avg@2": 0.7}, "64.3 → 70.0 %, 6 min 48 s"),
        (VALUES, {"rep/loss": 0.5}, f"{UNFINISHED}64.3 % before training, teacher 100.0 %, 6 min 48 s"),
        ({"rep/loss": 2.0}, {"rep/loss": 0.5}, f"{UNFINISHED}rep/loss 2 → 0.5 in 2 steps, 6 min 48 s"),
        (VALUES | {"val/other/avg@4": 0.5}, {"val/sums/avg@2": 0.986, "val/other/avg@4": 0.25},
         "other: 50.0 → 25.0 %; sums: 96 % of the gap closed: 64.3 → 98.6 %, teacher 100.0 %, 6 min 48 s"),
        (VALUES, {"val/sums/avg@2": None, "rep/loss": 1.0},
         f"{UNFINISHED}64.3 % before training, teacher 100.0 %, 6 min 48 s"),
    ],
)  # fmt: skip
def test_sentences(tmp_path: Path, first: dict, last: dict, says: str) -> None:
    """What is unknown is left out: a teacher, a second evaluation, the number of ranks."""
    run = make_run(tmp_path / "a")
    step = 4 if "unfinished" in says else 6
    lines = [{"step": 0, "time": 0.0, **first}, {"step": step, "time": 408.0, **last}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "environment.json").unlink()
    assert leads(write_report([run], tmp_path / "report.html").read_text()) == [says]


def write_settings(run: Path, **changes: Any) -> None:
    """Changes groups of a run's configuration, and records the start of a run on one rank."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for group, values in changes.items():
        config[group] = {**config[group], **values} if isinstance(values, dict) else values
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    size = {"model_type": "qwen2", "layers": 28, "hidden_size": 1536, "parameters": 1_543_714_304}
    start = {
        "started": "2026-01-31T12:34:56Z", "nemo_oprd": "0.1.0", "python": "3.12.1", "device": "cpu", "ranks": 1,
        "packages": {"torch": "2.13.0", "megatron-core": "0.19.2"}, "layouts": {"student": "TP2 DP1 +SP"},
        "model_sizes": {"student": size, "teacher": size, "teachers[1]": {**size, "parameters": None}},
    }  # fmt: skip
    (run / "environment.json").write_text(json.dumps([start, start]))


def test_who_taught(tmp_path: Path) -> None:
    """Names, sizes, layouts, weights, what the teacher knows; several teachers, each for its data sources."""
    run, file = make_run(tmp_path / "a"), tmp_path / "report.html"
    size = "qwen2, 28 layers, width 1,536"
    write_settings(run, seed=7, teacher={"prompt": "{prompt} It is {answer}.", "placement": "dedicated"})
    shown = card(write_report([run], file).read_text())
    assert (
        shown["Student"] == f"models/student ({size}, 1.54 B parameters)" and shown["Student layout"] == "TP2 DP1 +SP"
    )
    assert shown["Teacher"] == f"models/teacher ({size}, 1.54 B parameters)"
    assert shown["Teacher layout"] == "dedicated"  # of a record without it, what is known
    assert shown["Teacher's prompt"] == "{prompt} It is {answer}. (it knows the answer)"
    assert shown["Seed"] == "7" and shown["Started"] == "2026-01-31 12:34 UTC, 2 starts"
    assert shown["Machine"] == "1 rank, cpu"
    assert shown["Versions"] == "nemo_oprd 0.1.0, python 3.12.1, torch 2.13.0, megatron-core 0.19.2"
    write_settings(run, teacher={"weights": "ema", "ema_decay": 0.99, "system_prompt": "Be brief."})
    shown = card(write_report([run], file).read_text())
    assert shown["Teacher"] == "the moving average of the student, decay 0.99"
    assert shown["Teacher's system prompt"] == "Be brief."
    several = [
        {"hf_path": "m/one", "data_sources": ["gsm8k", "math"], "weight": 2.0, "bridge": "b", "engine": "vllm"},
        {"checkpoint": "m/two", "name": "rest", "data_sources": None, "chat_template_args": {"thinking": True}},
    ]
    write_settings(run, teachers=several, teacher={"weights": "own", "reads": "text"})
    shown = card(write_report([run], file).read_text())
    assert "Teacher" not in shown and shown["Teacher reads"] == "the text, in its own tokens"
    assert shown["Teacher gsm8k+math"] == (
        "m/one, data sources gsm8k, math, weight 2.0, bridge b, computed by vLLM servers"
    )
    assert shown["Teacher rest"] == f"m/two ({size}), all other data sources"
    assert shown["Teacher rest's chat template's arguments"] == "{'thinking': True}"
    (start,) = json.loads((run / "environment.json").read_text())[:1]
    start["model_sizes"]["student"] = {"model_type": "qwen2"}
    (run / "environment.json").write_text(json.dumps([start]))
    assert card(write_report([run], file).read_text())["Student"] == "models/student (qwen2)"


def test_settings_of_a_single_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", lr=3e-4)
    write_settings(run, seed=7, rollout={"per_prompt": 1, "endpoint": "http://me:secret@host:1"})
    page = write_report([run], tmp_path / "report.html").read_text()
    chosen = {row[0]: row[1:] for row in rows(section(page, "Settings")) if row}
    assert chosen["train.lr"] == ["0.0003", "1e-05"] and chosen["seed"] == ["7", "0"]
    assert chosen["data.validation.sums"] == ["sums.jsonl", "\N{EM DASH}"]
    assert not {"rollout.per_prompt", "output"} & chosen.keys()  # the default, and the run's own name
    everything = {row[0]: row[1:] for row in rows(section(page, "All settings")) if row}
    assert everything["rollout.per_prompt"] == ["1"] and everything["environment.packages.torch"] == ["2.13.0"]
    assert everything["rollout.endpoint"] == ["http://...@host:1"] and "secret" not in page
    assert "<details>" in page and 'href="#settings"' in page


def test_where_time_went(runs: list[Path], page: str) -> None:
    """Phases and the rest add up to the time between the first and the last line."""
    part = section(page, "Where time and memory went")
    run = read_run(runs[0], "a")
    assert training_minutes(run)[6] == pytest.approx(6 * 15.0 / 60)
    texts = [html.unescape(text) for text in re.findall(r"<dd>(.*?)</dd>", part)]
    assert texts[:4] == [
        "2.2 %: 9 s, 1.5 s per step", "4.5 %: 18 s, 3 s per step", "6.8 %: 27 s, 4.5 s per step",
        "9.0 %: 36 s, 6 s per step",
    ]  # fmt: skip
    assert texts[4] == "77.5 %: 5 min 10 s" and texts[5] == "6 min 40 s"
    assert texts[6:9] == ["3.6 GB", "0.25 GB", "126.5 tokens/s"]
    shares = [float(share) for share in re.findall(r"flex:([\d.]+)", part)]
    assert sum(shares[: len(shares) // 2]) == pytest.approx(1, abs=1e-4)


def test_responses_before_and_after(page: str) -> None:
    part = re.findall(r"<section><h2>Responses on sums.*?</section>", page, flags=re.DOTALL)
    assert len(part) == 2  # one per run
    samples = re.findall(r'<article class="sample(.*?)">(.*?)</article>', part[0], flags=re.DOTALL)
    kinds = [classes.replace("is-", "").split() for classes, _ in samples]
    assert sum("wrong" in kind for kind in kinds) == 6  # of 8: problems 32 to 39
    assert sum("changed" in kind for kind in kinds) == 6
    assert sum("truncated" in kind for kind in kinds) >= 3
    assert f"{len(samples)} of {PROBLEMS} problems" in part[0]
    first = samples[0][1]
    assert first.count("<dt>") == 4  # the answer, before, after, teacher
    assert re.search(r"before training.*after step 6.*teacher", first, flags=re.DOTALL)


def test_prompts_are_decoded_with_the_run_s_tokenizer(runs: list[Path], tmp_path: Path) -> None:
    from nemo_oprd.tools.toy import pair

    text = write_report(runs[:1], tmp_path / "without.html").read_text()
    assert "a prompt of 3 tokens" in text
    run = make_run(tmp_path / "with")
    main(["grade", str(run), "--judge", "text"])
    (run / "hf").mkdir()
    pair.write_tokenizer(run / "hf")
    expected = pair.ALPHABET[5 - 3] + pair.ALPHABET[6 - 3] + pair.ALPHABET[7 - 3]
    assert f"<h3>{expected}</h3>" in write_report([run], tmp_path / "with.html").read_text()


def test_tokens(runs: list[Path], page: str) -> None:
    part = re.findall(r"<section><h2>Tokens of training responses.*?</section>", page, flags=re.DOTALL)[0]
    articles = re.findall(r'<article class="sample(.*?)">(.*?)</article>', part, flags=re.DOTALL)
    assert [classes.split() for classes, _ in articles[:4]] == [
        ["is-wrong"],
        ["is-wrong", "is-truncated"],
        ["is-right"],
        ["is-right", "is-largest"],
    ]
    assert ["step 1" in body for _, body in articles] == [True] * 4 + [False] * 4
    (line, *_), body = (
        (json.loads(text) for text in (runs[0] / "rollouts" / "token_metrics_0000001.jsonl").open()),
        articles[0][1],
    )
    spans = re.findall(r'<span(?: class="([^"]*)")?(?: title="([^"]*)")?>(.*?)</span>', body, flags=re.DOTALL)
    spans = spans[-TOKENS:]
    assert [html.unescape(text).replace("⏎", "") for *_, text in spans] == line["tokens"]
    assert "cosine" not in spans[0][1] and f"KL {line['kl'][0]:.3g}" in spans[0][1]  # no row of the representation
    assert f"cosine {line['cosine'][5]:.3g}, representation loss {line['rep_loss'][5]:.3g}" in spans[5][1]


def test_levels_rise_with_the_distance(runs: list[Path]) -> None:
    panel = token_panel(0, read_run(runs[0], "a"))
    assert panel is not None and [scale.measure.name for scale in panel.scales] == [
        "cosine",
        "rep_loss",
        "kl",
        "log_ratio",
    ]
    cosine, loss, kl, _ = panel.scales
    assert [cosine.level(value) for value in (1.0, 0.5, None)] == [0, 8, 0]
    assert loss.level(1e-9) == 0 and loss.level(1e9) == 8 and kl.level(0.0) == 0
    low, high = (float(value) for value in cosine.ends)
    assert low > high and cosine.level((low + high) / 2) == 4


def test_long_responses_are_cut_in_the_middle(runs: list[Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "long")
    file = run / "rollouts" / "token_metrics_0000006.jsonl"
    line = {"step": 6, "token_ids": list(range(1600)), "kl": [0.1] * 1600}
    file.write_text(json.dumps(line) + "\n")
    page = write_report([run], tmp_path / "report.html").read_text()
    assert (
        "… 100 tokens …" in page
        and ">499 </span><em>" in page
        and ">600 </span>" in page
        and ">550 </span>" not in page
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"step": 6}', "no token_ids or step"),
        ('{"step": 6, "token_ids": [1, 2], "kl": [0.5]}', "columns of other lengths than token_ids"),
    ],
)
def test_damaged_values_per_token(tmp_path: Path, line: str, message: str) -> None:
    run = make_run(tmp_path / "a")
    (run / "rollouts" / "token_metrics_0000006.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"token_metrics_0000006\.jsonl, line 1.*{message}"):
        write_report([run], tmp_path / "report.html")


def test_an_unfinished_run_refreshes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=4)
    page = write_report([run], tmp_path / "report.html").read_text()
    assert '<meta http-equiv="refresh" content="30">' in page and "4 of 6, unfinished" in page
    metrics = run / "metrics.jsonl"
    for step in (5, 6):
        metrics.write_text(metrics.read_text() + json.dumps({"step": step, "time": 2000.0, "rep/loss": 0.1}) + "\n")
    assert read_run(run, "a").unfinished  # the evaluation after the last step is missing
    metrics.write_text(metrics.read_text() + json.dumps({"step": 6, "time": 2100.0, "val/sums/avg@2": 0.5}) + "\n")
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "http-equiv" not in page and ", unfinished" not in page


def test_a_held_out_set_alone_is_awaited(tmp_path: Path) -> None:
    """As a set of data.validation is; without either nothing is evaluated."""
    run = make_run(tmp_path / "a", steps=6)
    config = yaml.safe_load((run / "config.yaml").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith("val/")} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for share, awaited in ((0.1, True), (0.0, False)):
        data = {**config["data"], "validation": {}, "held_out": share}
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "data": data}))
        assert read_run(run, "a").unfinished is awaited


def test_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is written until the run is finished, the last time after its last line."""
    run = make_run(tmp_path / "a", steps=5)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        lines = [{"step": 6, "time": 2000.0, "rep/loss": 0.1}, {"step": 6, "time": 2100.0, "val/sums/avg@2": 0.5}]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(lines[len(waits) - 1]) + "\n")

    monkeypatch.setattr(command.time, "sleep", wait)
    command.run(Namespace(runs=[str(run)], output=None, follow=7.0, steps=None))
    assert waits == [7.0, 7.0] and capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "refresh" not in (run / "report.html").read_text()
    with pytest.raises(ValueError, match="--follow 0.0: expected seconds above 0"):
        command.run(Namespace(runs=[str(run)], output=None, follow=0.0, steps=None))


def test_the_commands_of_its_page(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    lines = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)[0].splitlines()
    (tmp_path / "runs").mkdir()
    for run in runs:
        (tmp_path / "runs" / run.name).symlink_to(run)
    monkeypatch.chdir(tmp_path)
    for line in lines:
        main(line.partition("#")[0].split()[1:])
    assert len(lines) == 4 and (runs[0] / "report.html").exists() and (tmp_path / "runs" / "compare.html").exists()


def test_accuracy_over_time_and_entropies(page: str) -> None:
    figures = dict(re.findall(r"<figcaption><h3>(.*?)</h3><p>(.*?)</p>", page))
    assert figures["Accuracy on sums over time"].endswith("circle area: peak memory (3.6 GB, 3.6 GB)")
    legend = re.search(r"<h3>Entropies</h3>.*?</figcaption>", page, flags=re.DOTALL)
    assert legend and re.findall(r"</i><bdi>(.*?)</bdi></span>", legend[0]) == [
        "a, student",
        "a, teacher",
        "b, student",
        "b, teacher",
    ]
    for title in ("Policy-gradient loss", "Top-k overlap", "KL of student from teacher", "Peak memory"):
        assert title in figures


def test_a_bridge_has_its_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "bridge").mkdir()
    curves = {name: {"cosine": {"2": value, "8": value / 2}} for name, value in (("bridge", 0.8), ("before", 0.1))}
    (run / "bridge" / "bridge.json").write_text(json.dumps({"report": {"layers": {"1:2": {"curves": curves}}}}))
    assert "<h3>Cosine similarity by rank</h3>" in write_report([run], tmp_path / "report.html").read_text()
    (run / "bridge" / "bridge.json").write_text("{")
    assert "Cosine similarity by rank" not in write_report([run], tmp_path / "report.html").read_text()


def test_numbers() -> None:
    assert number("val/x/pass@2", 0.125) == "12.5\N{NO-BREAK SPACE}%" and number("val/x/avg_len", 1234.5) == "1,234"
    assert interval("val/x/maj@4", [0.1, 0.25]) == "[10.0, 25.0]" and interval("x", None) == ""
    gap, small = Difference(-0.125, -0.25, 0.0), Difference(0.0002, 0.0001, 0.0004)
    assert signed("avg", gap.value, gap) == f"{MINUS}12.5" and signed("avg_len", 3.25, gap) == "+3.25"
    # a difference that is real is not shown as 0
    assert [signed("avg", each, small) for each in (small.value, small.low, small.high)] == ["+0.02", "+0.01", "+0.04"]
    assert signed("avg_len", small.low, small) == "+0.0001"
    assert pages.REFRESH_S > 0


def test_every_column_has_its_meaning_in_plain_sight(page: str) -> None:
    """Beside the tables, not behind a pointer that hovers; one line for the names of one metric."""
    validation = section(page, "Validation")
    listed = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html.unescape(validation)))
    columns = set(re.findall(r'<th class="number">(.*?)</th>', validation + section(page, "Paired differences")))
    assert {name for names in listed for name in names.split(", ")} == columns
    assert listed["avg, avg@2"] == MEANINGS["avg"]
    assert set(listed.values()) <= set(MEANINGS.values())


def test_a_metric_without_a_value_is_no_zero_and_no_earlier_value(tmp_path: Path) -> None:
    """Responses of fewer than four words have no diversity: the table says so at the evaluation that has none."""
    run = make_run(tmp_path / "a")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"val/sums/dist_4g": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    student, teacher = rows(section(page, "Validation"))[1:]
    assert student[-1] == "0.500 → - (no response has 4 words)" and teacher[-1] == "- (no response has 4 words)"
    assert student[3] == "9 → 8" and teacher[3] == "", "only diversity may lack a value"
