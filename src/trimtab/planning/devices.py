"""Published peak figures of devices."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import TrimtabError, nearest


@dataclass(frozen=True, slots=True)
class Device:
    """`memory` in bytes, `flops` of dense bfloat16 products per second, `bandwidth` of its memory in bytes per s."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    source: str


_NVIDIA = "nvidia.com, {} datasheet; the bfloat16 figure is half the one given with sparsity"
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40e9, 312e12, 1.555e12, "nvidia.com, A100 datasheet (SXM)"),
        Device("a100-80gb", 80e9, 312e12, 2.039e12, "nvidia.com, A100 datasheet (SXM)"),
        Device("l40s", 48e9, 362e12, 0.864e12, "nvidia.com, L40S datasheet"),
        Device("h100", 80e9, 989e12, 3.35e12, _NVIDIA.format("H100 (SXM)")),
        Device("h200", 141e9, 989e12, 4.8e12, _NVIDIA.format("H200 (SXM)")),
        Device("b200", 180e9, 2250e12, 8e12, _NVIDIA.format("DGX B200, an eighth of it;")),
        Device("mi300x", 192e9, 1307e12, 5.3e12, "amd.com, Instinct MI300X data sheet"),
    )
}


def device(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise TrimtabError(f"unknown device {name!r}{nearest(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]
