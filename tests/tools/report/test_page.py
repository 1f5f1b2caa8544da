"""The page of a run: what it shows, that it is whole and needs nothing else, and that nothing in a run can break it."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_longctx.callbacks.router_picture import FULL
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.scores import write_score
from lightning_longctx.cli import main
from lightning_longctx.tools.report.curves import CHARTS
from lightning_longctx.tools.report.html import tag
from lightning_longctx.tools.report.page import page_of
from lightning_longctx.tools.report.run import Run
from lightning_longctx.tools.report.series import Series
from tests.checkpoint.helpers import save, writer
from tests.contracts.source import ROOT
from tests.tools.report.helpers import CONFIGURATION, STEPS, Page, write_metrics, write_run


def report(*words: str | Path, code: int = 0) -> Page:
    assert main(["report", *map(str, words), "--out", "page.html"]) == code
    return Page(Path("page.html").read_text())


def test_a_whole_run_shows_every_part() -> None:
    page = report(write_run(Path("runs/version_0")))
    assert page.titles == [
        "Overview",
        "Loss",
        "Loss by source",
        "Loss by position in the document",
        "Experts",
        "Data",
        "Speed",
        "Checkpoints",
        "Other metrics",
        "Configuration",
    ]
    assert page.foreign() == []
    links = [one.attributes["href"].removeprefix("#") for one in page.all("a")]
    assert links == [one.attributes["id"] for one in page.all("section")]
    charts = {one.text for one in page.all("h3")}
    assert {spec.title for section in ("Loss", "Data", "Speed", "Checkpoints") for spec in CHARTS[section]} <= charts
    assert "my/metric" in charts


def test_facts_are_those_of_the_run() -> None:
    page = report(write_run(Path("run")), "--json", "out/run.json")
    facts = page.facts()
    assert facts["Steps"] == f"{STEPS}of {STEPS}"
    assert facts["Tokens"].startswith("120,000")
    assert facts["Time of training"].startswith("1 min 0 s")  # 120,000 tokens at 2,000 a second
    assert facts["Training loss"] == "2.1from 5"
    assert facts["Validation loss"] == "4.25lowest 4.25 at step 29"
    assert facts["Source fill"].startswith("99.00 %")
    assert facts["Waited for checkpoints"] == "1.5 s2 saves; 2.5 % of training"
    (setup,) = page.all("p", class_="setup")
    assert setup.text.startswith(
        "tiny-qwen3-moe, 4,096 tokens a document, LongContextFSDPStrategy, sequence parallel 2, cpu x 2"
    )
    content = json.loads(Path("out/run.json").read_text())["runs"][0]
    assert content["facts"]["train_loss"] == pytest.approx(2.1)
    assert content["facts"]["training_s"] == pytest.approx(60)
    assert content["versions"] == {"torch": "2.13.0", "python": "3.11.9"}
    assert content["curves"]["train/loss"]["value"] == pytest.approx([5 - 0.1 * step for step in range(STEPS)])


def test_lines_are_drawn_where_the_values_are() -> None:
    page = report(write_run(Path("run")))
    drawn = page.curve("Loss", "training")
    assert [step for step, _ in drawn] == pytest.approx(list(range(STEPS)), abs=0.01)
    assert [value for _, value in drawn] == pytest.approx([5 - 0.1 * step for step in range(STEPS)], abs=0.001)


def test_sources_are_a_table_with_the_largest_first() -> None:
    page = report(write_run(Path("run")))
    rows = [re.sub(r"\s+", " ", one.text) for one in page.all("tr")]
    code = next(row for row in rows if row.startswith("code"))
    assert code == "code4.5001.600-2.9004.00075.0%75.0%"
    assert rows.index(code) < next(number for number, row in enumerate(rows) if row.startswith("web"))


def test_the_heat_map_shows_each_window() -> None:
    page = report(write_run(Path("run")))
    (slider,) = page.all("input")
    assert slider.attributes["data-captions"] == "steps 1 to 15|steps 16 to 30"
    style = page.all("div", class_="heat")[0].attributes["style"]
    picture = re.search(r"url\(data:image/png;base64,([^)]*)\)", style)
    assert picture is not None
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture[1]))).convert("RGBA")).astype(int)
    assert pixels.shape == (2 * 2, 4, 4)  # windows x layers, experts, RGBA
    # First window, layer 0: 3 times its share (full orange), its share (clear), none (full blue).
    assert pixels[0, :, 3].tolist() == [round(255 * min(1, 2 / FULL)), 0, 255, 255]
    assert pixels[0, 0, 0] > pixels[0, 0, 2]
    assert pixels[0, 2, 0] < pixels[0, 2, 2]
    assert pixels[2, :, 3].tolist() == [0, 0, 0, 0]  # the second window is fair


def test_nothing_in_a_run_becomes_markup() -> None:
    evil = "<script>alert(1)</script>"
    path = write_metrics(
        Path("<b>run"),
        [
            {
                "step": step,
                "train/loss": 2.0,
                f"channel_loss/{evil}": 2 + step,
                "channel_loss/coverage": 1.0,
                "a\"'>&amp;": step,
            }
            for step in range(3)
        ],
    )
    (path / "config.yaml").write_text(
        "# <i>==1\n# torch==</td><img>\nmodel: {config: '</pre><img src=x onerror=alert(2)>'}\n"
    )
    page = report(path)
    assert len(page.all("script")) == 1
    assert page.all("img") + page.all("b") + page.all("i", src="x") == []
    assert page.foreign() == []
    assert [one for one in page.all("path") if one.attributes.get("data-name") == evil]
    everything = page.all("html")[0].text
    for text in (evil, "</pre><img src=x onerror=alert(2)>", "<b>run", "a\"'>&amp;", "</td><img>"):
        assert text in everything


def test_text_and_attributes_are_escaped() -> None:
    text = """a "b" 'c' <d> &amp; </p>"""
    (paragraph, line) = Page(tag("p", text, tag("span", "x", data_name=text), None, class_="k", hidden=False)).elements
    assert (paragraph.text, paragraph.attributes) == (f"{text}x", {"class": "k"})
    assert line.attributes == {"data-name": text}


def test_what_is_not_there_is_told_in_one_line_each() -> None:
    page = report(write_metrics(Path("run"), [{"step": 9, "train/loss": 2.5}, {"step": 19, "train/loss": 2.25}]))
    assert page.titles == ["Overview", "Loss", "What else a run can show"]
    told = [one.text for one in page.all("li")]
    for word in ("ChannelLoss", "MoERouterHeatmap", "AsyncDCPCheckpoint", "validation_sources", "longctx fit"):
        assert len([text for text in told if word in text and "group_by" not in text]) == 1, word
    assert not [text for text in told if "TrainingMetrics` in" in text]


def test_a_loss_that_is_no_number_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "train/loss": 2.0 if step < 3 else float("nan")} for step in range(5)]
    page = report(write_metrics(Path("run"), rows), "--json", "run.json", code=1)
    said = "train/loss is no number at step 3 (2 logged values in all)."
    assert said in capsys.readouterr().out
    assert page.all("p", class_="finding")[0].text == said
    assert len(page.all("path", class_="bad")) == 1
    assert "last number 2" in page.facts()["Training loss"]
    content = json.loads(Path("run.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert content["runs"][0]["facts"]["train_loss"] is None


def test_a_loss_that_never_was_a_number_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "train/loss": float("nan"), "my/metric": float("inf")} for step in range(5)]
    page = report(write_metrics(Path("run"), rows), code=1)
    assert page.facts()["Training loss"] == "nanat no step a number"


def test_values_at_the_end_of_the_range_break_nothing() -> None:
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate([1.7e308, 2.0, -1.7e308, 3.0, 0.0])]
    page = report(write_metrics(Path("run"), rows), code=1)
    drawn = page.curve("Loss", "training")
    assert [step for step, _ in drawn] == pytest.approx([1, 3, 4], abs=0.01)
    assert [value for _, value in drawn] == pytest.approx([2, 3, 0], abs=0.01)


def test_a_source_that_only_validation_has_is_in_the_table() -> None:
    rows = [{"step": 0, "channel_loss/web": 2.0, "channel_loss/coverage": 1.0}, {"step": 1, "channel_loss/web": 1.5}]
    rows.append({"step": 1, "val_channel_loss/held out": 1.25})
    told = [re.sub(r"\s+", " ", one.text) for one in report(write_metrics(Path("run"), rows)).all("tr")]
    assert told[1:] == ["web2.0001.500-0.500-", "held out---1.250"]


def test_a_source_has_one_colour_in_all_charts() -> None:
    rows = [
        {"step": step, "channel_loss/coverage": 1.0}
        | {f"channel_loss/{name}": 2.0 + step for name in ("code", "web")}
        | {"channel_tokens/code": 10, "channel_tokens/web": 90, "data/mix/code": 0.1, "data/mix/web": 0.9}
        for step in range(3)
    ]
    lines = report(write_metrics(Path("run"), rows)).all("path", class_="line")
    colours = {(one.attributes["data-name"], one.attributes["class"]) for one in lines if "data-name" in one.attributes}
    assert colours == {("web", "line c0"), ("code", "line c1")}


def test_checkpoints_of_the_folder_are_listed() -> None:
    folder = Path("work/kept")
    checkpoints = writer(folder, keep=9)
    for step in (5, 10):
        save(checkpoints, step)
    names = {found.commit.step: found.path.name for found in scan(folder) if found.commit is not None}
    write_score(FileSystem(), folder, names[5], 2.5)
    write_score(FileSystem(), folder, names[10], 3.5)
    path = write_run(Path("work/runs/version_0"))
    told = "  - {class_path: lightning_longctx.AsyncDCPCheckpoint, init_args: {dirpath: kept}}\nmodel:"
    (path / "config.yaml").write_text(CONFIGURATION.replace("model:", told, 1))
    rows = [one.text for one in report(path).all("tr") if one.text.startswith("step-")]
    assert [row.startswith(names[step]) for row, step in zip(rows, (10, 5), strict=True)] == [True, True]
    assert re.fullmatch(rf"{names[5]}5weights \+ optimizer[\d.]+ k?B2.5best", rows[1])
    assert rows[0].endswith("3.5")


def test_several_runs_are_compared() -> None:
    first, second = write_run(Path("a/version_0")), write_run(Path("b/version_0"), scale=0.5)
    text = (second / "config.yaml").read_text().replace("0.003", "0.001")
    (second / "config.yaml").write_text(text)
    page = report(first, second)
    rows = [one.text for one in page.all("tr")]
    assert "a/version_0b/version_0" in rows[0]
    assert "Training loss2.1from 51.05from 2.5" in rows
    assert "model.optimizer.lr0.0030.001" in rows
    assert "code1.6000.550-1.050" in rows
    assert not [row for row in rows if row.startswith("trainer.")], "only what differs"
    drawn = page.curve("Loss", "b/version_0, training")
    assert [value for _, value in drawn] == pytest.approx([2.5 - 0.05 * step for step in range(STEPS)], abs=0.01)


def test_a_large_run_makes_a_small_page() -> None:
    series = Series(np.arange(100_000), 2 + np.random.default_rng(0).normal(size=100_000))
    keys = [
        "train/loss",
        "channel_loss/coverage",
        *(f"{kind}/{n}" for kind in ("channel_loss", "other") for n in range(100)),
    ]
    run = Run("big", Path("big"), dict.fromkeys(keys, series), datetime.now(UTC))
    text = page_of([run], "0")
    assert len(text) < 3e6
    page = Page(text)
    band = [one for one in page.all("path", class_="band")][0]
    assert band.attributes["d"].count("L") == 2 * 500 - 1  # largest and smallest of 500 buckets
    assert "60 further keys" in page.all("html")[0].text


def test_charts_name_keys_that_are_documented() -> None:
    table = (ROOT / "docs" / "callbacks.md").read_text()
    for section, specs in CHARTS.items():
        for key, _ in (pair for spec in specs for pair in spec.keys):
            known = key.removesuffix("_mean") if section == "Experts" else key
            assert f"`{known}" in table, key


def test_what_a_module_logs_beside_the_keys_of_this_suite_is_shown() -> None:
    own = ["train/accuracy", "val/loss_of_speech", "val/loss/dataloader_idx_1", "moe/auxiliary", "checkpoint/age"]
    known = ["moe/tokens_max/layer_00", "moe/min_vio_mean", "train/tokens_per_s_per_device", "data/x", "offload/x"]
    known += ["checkpoint/bytes/weights", "data/mix/code", "train/loss"]
    page = report(write_metrics(Path("run"), [dict.fromkeys([*own, *known], 1.5) | {"step": step} for step in (1, 2)]))
    charts = [one.text for one in page.all("h3")]
    assert [key for key in own if key in charts] == own
    assert [key for key in known if key in charts] == []


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_values_that_are_no_numbers_break_no_fact(value: str) -> None:
    keys = ["train/source_tokens", "train/target_tokens", "data/tokens_packed", "data/tokens_padding", "moe/max_vio"]
    keys += ["moe/dead_experts", "data/wait_s_p50", "checkpoint/stall_s/weights"]
    rows = [dict.fromkeys(keys, value) | {"step": 0, "data/wait_s_p99": 1}, {"step": 1, "train/source_tokens": 7}]
    facts = report(write_metrics(Path("run"), rows)).facts()
    assert facts == {"Steps": "1", "Tokens": "7", "Waited for checkpoints": "0 s1 save"}


def test_runs_are_compared_as_far_as_their_configurations_are_known() -> None:
    runs = [write_metrics(Path(name), [{"step": 1, "my/metric": 1.0}]) for name in "abc"]
    assert "Configuration" not in report(*runs).titles
    (runs[0] / "config.yaml").write_text("trainer: {max_steps: 3}\n")
    assert "same configuration" not in report(*runs).all("html")[0].text
    (runs[2] / "config.yaml").write_text("trainer: {max_steps: 3}\n")
    assert "a and c have the same configuration." in report(*runs).all("html")[0].text
    (runs[2] / "config.yaml").write_text("trainer: {max_steps: 4}\n")
    assert "trainer.max_steps34" in [one.text for one in report(*runs).all("tr")]


@pytest.mark.parametrize("text", ["model: &m {inner: *m}", "[" * 3000])
def test_a_configuration_without_an_end_is_shown_as_it_is(text: str) -> None:
    runs = [write_metrics(Path(name), [{"step": 1, "my/metric": 1.0}]) for name in "ab"]
    (runs[0] / "config.yaml").write_text(text)
    assert text in report(*runs).all("html")[0].text


def test_a_path_that_is_no_text_breaks_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_metrics(Path(os.fsdecode(b"r\xffn")), [{"step": 1, "train/loss": float("nan")}])
    page = report(path, "--json", "run.json", code=1)
    assert page.all("h1")[0].text == "r?n"
    assert "r?n: train/loss is no number" in capsys.readouterr().out
    assert json.loads(Path("run.json").read_text())["runs"][0]["name"] == path.name
