"""Peak speed of devices in matrix multiplication, the denominator of model FLOPs utilization.

Dense figures of the vendors' data sheets, in 10^12 operations a second. Where a sheet prints only the figure "with
sparsity", half of it stands here: training has no structured sparsity.

======================= ====== ====== ====== =============================================================
device                  bf16   tf32   fp32   source
======================= ====== ====== ====== =============================================================
A100, A800 (all)        312    156    19.5   NVIDIA A100 data sheet
A10                     125    62.5   31.2   NVIDIA A10 data sheet
L4                      121    60     30.3   NVIDIA L4 data sheet
L40S                    362    183    91.6   NVIDIA L40S data sheet
H100, H800, H200 (SXM)  989.4  494.7  66.9   NVIDIA H100 data sheet, H200 data sheet (with sparsity: 1,979)
H100 NVL, H200 NVL      835.5  417.5  60     NVIDIA H100 NVL and H200 NVL data sheets (with sparsity: 1,671)
H100 PCIe, H800 PCIe    756    378    51.2   NVIDIA H100 data sheet (with sparsity: 1,513)
H20                     148    74     44     NVIDIA H20 data sheet
B200                    2250   1125   75     NVIDIA HGX B200 data sheet (8 devices with sparsity: 36,000)
GB200                   2500   1250   80     NVIDIA GB200 NVL72 data sheet (72 devices with sparsity: 360,000)
MI250X, one of two dies 191.5  47.9   47.9   AMD Instinct MI250X data sheet (383 for both dies)
MI300X, MI325X          1307.4 653.7  163.4  AMD Instinct MI300X and MI325X data sheets
======================= ====== ====== ====== =============================================================
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Arithmetic", "arithmetic_of", "peak_tflops"]

Arithmetic = Literal["bf16", "tf32", "fp32"]

# Words of the device's name (lower case) -> peaks. The first entry whose words are all in the name counts.
_PEAKS: tuple[tuple[tuple[str, ...], dict[Arithmetic, float]], ...] = (
    (("gb200",), {"bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}),
    (("b200",), {"bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0}),
    (("h200", "nvl"), {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    (("h100", "nvl"), {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    (("h100", "pcie"), {"bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    (("h800", "pcie"), {"bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    (("h200",), {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("h100",), {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("h800",), {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("h20",), {"bf16": 148.0, "tf32": 74.0, "fp32": 44.0}),
    (("a100",), {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (("a800",), {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (("a10",), {"bf16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (("l40s",), {"bf16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (("l4",), {"bf16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    (("mi250x",), {"bf16": 191.5, "tf32": 47.9, "fp32": 47.9}),
    (("mi300x",), {"bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    (("mi325x",), {"bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
)


def peak_tflops(name: str, arithmetic: Arithmetic) -> float | None:
    """Return the dense peak of a device in 10^12 operations a second; None for one that is not in the table.

    Args:
        name: as the driver tells it, such as ``NVIDIA H100 80GB HBM3``.
        arithmetic: of the matrix multiplications.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3", "bf16")
        989.4
    """
    words = set(name.lower().replace("-", " ").replace("_", " ").split())
    if "mig" in words:
        return None  # a slice of a device
    return next((peaks[arithmetic] for wanted, peaks in _PEAKS if words.issuperset(wanted)), None)


def arithmetic_of(precision: str, float32_precision: str) -> Arithmetic | None:
    """Return what a Trainer's precision multiplies in; None for one without a figure here.

    Args:
        precision: ``trainer.precision``: ``bf16-true``, ``16-mixed``, ``32-true`` ...
        float32_precision: ``torch.get_float32_matmul_precision()``; below ``highest`` float32 runs as TF32.
    """
    if precision.startswith(("bf16", "16")):
        return "bf16"
    if precision.startswith("32"):
        return "fp32" if float32_precision == "highest" else "tf32"
    return None
