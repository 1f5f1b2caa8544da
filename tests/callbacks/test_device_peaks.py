"""The table of device peaks: names as drivers tell them, the docstring's figures, and a second opinion."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.throughput import _CUDA_FLOPS

from lightning_longctx.callbacks import device_peaks
from lightning_longctx.callbacks.device_peaks import arithmetic_of, peak_tflops
from lightning_longctx.callbacks.speed import device_peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_names_of_drivers(name: str, peak: float | None) -> None:
    assert peak_tflops(name, "bf16") == peak


def test_the_docstring_shows_the_table() -> None:
    rows = re.findall(r"^([A-Z]\S.*?)\s{1,}([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+\S", device_peaks.__doc__ or "", re.M)
    shown = {tuple(map(float, figures)) for _, *figures in rows}
    assert shown == {(peaks["bf16"], peaks["tf32"], peaks["fp32"]) for _, peaks in device_peaks._PEAKS}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("NVIDIA H100 80GB HBM3", "h100 sxm"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_lightning_says_the_same_where_its_figures_are_dense(name: str, theirs: str) -> None:
    assert peak_tflops(name, "bf16") == pytest.approx(_CUDA_FLOPS[theirs][torch.bfloat16] / 1e12)
    assert peak_tflops(name, "tf32") == pytest.approx(_CUDA_FLOPS[theirs]["tfloat32"] / 1e12)
    assert peak_tflops(name, "fp32") == pytest.approx(_CUDA_FLOPS[theirs][torch.float32] / 1e12)


@pytest.mark.parametrize(
    ("precision", "float32", "arithmetic"),
    [
        ("bf16-true", "highest", "bf16"),
        ("16-mixed", "highest", "bf16"),
        ("32-true", "highest", "fp32"),
        ("32-true", "high", "tf32"),
        ("64-true", "highest", None),
        ("transformer-engine", "highest", None),
    ],
)
def test_arithmetic_of_a_precision(precision: str, float32: str, arithmetic: Any) -> None:
    assert arithmetic_of(precision, float32) == arithmetic


def test_the_host_has_no_peak() -> None:
    assert device_peak(torch.device("cpu"), "32-true") is None
