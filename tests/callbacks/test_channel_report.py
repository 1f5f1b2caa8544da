"""Values, history, table and picture."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lightning_longctx.callbacks.channel_report import ChannelHistory, save_plot, summary_table
from lightning_longctx.callbacks.channel_settings import ChannelOptions
from lightning_longctx.callbacks.channel_sums import ChannelSums, Count
from lightning_longctx.callbacks.channel_values import ChannelValue, channel_metrics, channel_values, coverage_of
from lightning_longctx.callbacks.source_names import SafeNames, SourceTable


def totals():
    sums = ChannelSums(3, torch.device("cpu"))
    sums.add(torch.tensor([1.0, 2.0, 6.0, 9.0]), torch.tensor([True] * 4), torch.tensor([0, 0, 2, -1]))
    sums.count(Count.TOKENS, torch.tensor([0, 0, 0, 1, 2]))
    return sums.totals()


def test_values_and_metrics() -> None:
    table = SourceTable(["my code", "idle", "web"])
    values = channel_values(totals(), table)
    assert values == {"my code": ChannelValue(1.5, 1.0, 2, 3), "web": ChannelValue(6.0, 2.0, 1, 1)}
    assert coverage_of([totals(), totals()]) == (6, 8)
    options = ChannelOptions(counters=["input_tokens"], log_tokens=False)
    assert channel_metrics(totals(), table, SafeNames(), options, "val_channel", "/dataloader_idx_1") == {
        "val_channel_loss/my_code/dataloader_idx_1": 1.5,
        "val_channel_loss_weighted/my_code/dataloader_idx_1": 1.0,
        "val_channel_input_tokens/my_code/dataloader_idx_1": 3,
        "val_channel_loss/web/dataloader_idx_1": 6.0,
        "val_channel_loss_weighted/web/dataloader_idx_1": 2.0,
        "val_channel_input_tokens/web/dataloader_idx_1": 1,
        "val_channel_loss/coverage/dataloader_idx_1": 0.75,
    }


def test_a_long_history_is_thinned_evenly_and_keeps_both_ends() -> None:
    history = ChannelHistory()
    for step in range(1, 5001):
        values = {"a": ChannelValue(float(step), 0.0, 2)}
        if step > 4000:
            values["late"] = ChannelValue(-float(step), 0.0, 1)
        history.add(step, values)
    assert 500 <= len(history.steps) <= 1000
    assert history.steps[0] == 1
    assert len({b - a for a, b in zip(history.steps, history.steps[1:], strict=False)}) == 1
    assert history.losses["a"] == [float(step) for step in history.steps]
    late = dict(zip(history.steps, history.losses["late"], strict=True))
    assert all(math.isnan(loss) if step <= 4000 else loss == -step for step, loss in late.items())
    assert (history.targets, history.last) == ({"a": 10_000, "late": 1000}, {"a": 5000.0, "late": -5000.0})
    assert "1.000   5000.000" in summary_table(history)


def test_history_goes_on_from_a_state(tmp_path: Path) -> None:
    whole, first, second = ChannelHistory(), ChannelHistory(), ChannelHistory()
    for step in range(1, 2400):
        values = {"a": ChannelValue(1.0 / step, 0.0, 1)}
        whole.add(step, values)
        (first if step < 1500 else second).add(step, values)
        if step == 1499:
            torch.save(first.state_dict(), tmp_path / "state.pt")
            second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert vars(second) == vars(whole)


def test_an_empty_history_has_a_state() -> None:
    history = ChannelHistory()
    history.load_state_dict(ChannelHistory().state_dict())
    assert history.steps == []


def test_the_picture_shows_each_source(tmp_path: Path) -> None:
    history = ChannelHistory()
    for step in range(20):
        history.add(step, {f"source {number}": ChannelValue(3.0 - number, 0.0, 1) for number in range(9)})
    history.add(20, {"once": ChannelValue(1.0, 0.0, 1)})
    save_plot(tmp_path / "new folder" / "a.svg", history, "Loss by source")
    text = (tmp_path / "new folder" / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in [*history.losses, "step", "Loss by source"])
