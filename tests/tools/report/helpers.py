"""Directories of runs as the loggers and callbacks write them, and a reader of the page."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import torch

from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_output import publish_window, run_folder

STEPS = 30
CONFIGURATION = """# torch==2.13.0
# python==3.11.9
trainer:
  max_steps: 30
  accelerator: cpu
  devices: 2
  strategy: {class_path: lightning_longctx.LongContextFSDPStrategy, init_args: {sequence_parallel_size: 2}}
  callbacks:
  - class_path: lightning_longctx.ChannelLoss
model: {class_path: lightning_longctx.CausalLMModule, init_args: {config: tiny-qwen3-moe, optimizer: {lr: 0.003}}}
data: {class_path: lightning_longctx.DynamicBatchingDataModule, init_args: {max_seq_len: 4096}}
"""


def write_metrics(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write ``metrics.csv`` as CSVLogger does: columns in alphabetical order, empty where a row has no value."""
    path.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for row in rows for key in row})
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_run(path: Path, scale: float = 1.0) -> Path:
    """A whole run, with everything that a report can show."""
    rows: list[dict[str, object]] = []
    for step in range(STEPS):
        loss = scale * (5.0 - 0.1 * step)
        rows.append(
            {"channel_loss/code": loss - 0.5, "channel_tokens/code": 300, "channel_loss/coverage": 1.0, "step": step}
        )
        rows[-1] |= {"channel_loss/web": loss + 1.5, "channel_tokens/web": 100, "position_loss/0-4K": loss}
        rows[-1] |= {"position_loss/4K-16K": loss - 1, "position_tokens/0-4K": 3, "position_loss/coverage": 1.0}
        rows.append({"train/loss": loss, "train/grad_norm": 2.0, "train/lr": 0.001, "epoch": 0, "step": step})
        rows[-1] |= {"train/source_tokens": 4000 * (step + 1), "train/tokens_per_s": 2000, "data/source_fill": 0.99}
        rows[-1] |= {"train/target_tokens": 3990 * (step + 1), "train/tflops_per_device": 0.5, "train/mfu": 0.4}
        rows[-1] |= {"train/memory_peak_gib": 7.5, "data/wait_s_p50": 0.001, "data/wait_s_p99": 0.02}
        rows[-1] |= {"data/mix/code": 0.75, "data/mix/web": 0.25, "data/documents_read": 9 * step}
        rows[-1] |= {"offload/bytes": 1e6, "my/metric": 3.0}
    rows.append({"val/loss": 4.25, "val_channel_loss/code": 4.0, "val_channel_loss/web": 5.0, "epoch": 0, "step": 29})
    for step in (15, 30):
        rows.append({"checkpoint/stall_s/weights": 0.5, "checkpoint/stall_s/optimizer": 0.25, "step": step})
        rows.append({"checkpoint/write_s/weights": 3.0, "checkpoint/bytes/weights": 2e9, "step": step})
    write_metrics(path, rows)
    (path / "config.yaml").write_text(CONFIGURATION)
    for first, tokens in ((1, [6, 2, 0, 0]), (16, [2, 2, 2, 2])):
        window = (torch.tensor(tokens), torch.tensor([1, 1, 1, 5]))
        load = RouterLoad(first, first + 14, ("m.0", "m.1"), ("layer_00", "layer_01"), window, padding=0, dropped=0)
        publish_window(load, run_folder(path, resumed=first > 1), [], first)
    return path


@dataclass
class Element:
    """An element of the page."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    parents: tuple[str, ...] = ()


@dataclass
class Page(HTMLParser):
    """A page, read strictly: an element that is not closed where it was opened is an error."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs}, "", tuple(one.name for one in self.open))
        assert len(element.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append(element)
        if tag not in ("meta", "input", "br"):
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"closed and not opened: {tag}"
        assert self.open[-1].name == tag
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, name: str, **attributes: str) -> list[Element]:
        """Elements of a name with these attributes; ``class_`` is one of the classes."""
        wanted = attributes.pop("class_", None)
        return [
            one
            for one in self.elements
            if one.name == name
            and all(one.attributes.get(key) == value for key, value in attributes.items())
            and (wanted is None or wanted in one.attributes.get("class", "").split())
        ]

    @property
    def titles(self) -> list[str]:
        """Of the sections."""
        return [one.text for one in self.all("h2")]

    def facts(self) -> dict[str, str]:
        """The tiles: label and value with its note."""
        names = [one.text for one in self.all("dt")]
        values = [one.text for one in self.all("dd") if "dl" in one.parents]
        return dict(zip(names, values[: len(names)], strict=True))

    def foreign(self) -> list[str]:
        """Whatever the page would load from somewhere."""
        found = [
            one.attributes[key]
            for one in self.elements
            for key in ("src", "srcset", "data", "action")
            if key in one.attributes
        ]
        found += [
            one.attributes["href"] for one in self.elements if not one.attributes.get("href", "#").startswith("#")
        ]
        found += re.findall(r"url\((?!data:)[^)]*\)|@import[^;]*|https?://[^\s\"<]*", self.source)
        return found + [one.name for one in self.elements if one.name in ("link", "iframe", "object", "embed", "base")]

    def curve(self, title: str, name: str) -> list[tuple[float, float]]:
        """The points of a line as they are drawn, in the units of the axes."""
        place = [one.text for one in self.all("figure")]
        (figure,) = [one for one, text in zip(self.all("figure"), place, strict=True) if text.startswith(title)]
        inside = self.elements[self.elements.index(figure) :]
        plot = next(one for one in inside if one.attributes.get("class") == "plot")
        line = next(one for one in inside if one.attributes.get("data-name") == name)
        left, right = map(float, plot.attributes["data-x"].split())
        bottom, top = map(float, plot.attributes["data-y"].split()[:2])
        pairs = re.findall(r"(-?[\d.]+),(-?[\d.]+)", line.attributes["d"])
        return [(left + float(x) / 1000 * (right - left), top - float(y) / 1000 * (top - bottom)) for x, y in pairs]
