"""The picture: what is drawn, and which files can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.probe.command import probe
from lightning_longctx.tools.probe.options import ProbeOptions
from lightning_longctx.tools.probe.plot import check_plot, save_plot
from tests.tools.probe.helpers import data_module


@pytest.mark.parametrize("dp", [1, 2])
def test_policies_without_a_row_are_left_out(dp: int) -> None:
    report, _ = probe(data_module([6, 4, 3, 7] * 20, 10), ProbeOptions(micro_batches=5, dp=dp))
    save_plot(Path("probe.svg"), report.policies, report.buckets)
    picture = Path("probe.svg").read_text()
    assert picture.count("<!-- adaptive -->") == 1 + dp  # bar and fill; balance from two ranks on
    assert "<!-- fixed -->" not in picture
    assert ("<!-- one data-parallel rank -->" in picture) == (dp == 1)


@pytest.mark.parametrize("name", ["probe", "probe.txt", "probe.png.gz"])
def test_other_files_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="must name a .png, .pdf or .svg file"):
        check_plot(Path(name))
