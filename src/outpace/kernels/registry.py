"""Which kernels exist, best first, and which one a device gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outpace.errors import Unsupported
from outpace.kernels.base import Kernels
from outpace.kernels.reference import ReferenceKernels

KERNELS: dict[str, Callable[[], Kernels]] = {"torch": ReferenceKernels}


def select(device: torch.device | str, name: str = "auto") -> Kernels:
    """The best kernels for a device, or the ones named. Unsupported if the name is unknown or not for the device."""
    kind = torch.device(device).type
    if name != "auto" and name not in KERNELS:
        raise Unsupported(f"There are no kernels named {name!r}. Known: auto, {', '.join(KERNELS)}.")
    for candidate in KERNELS if name == "auto" else [name]:
        kernels = KERNELS[candidate]()
        if not kernels.capability.devices or kind in kernels.capability.devices:
            return kernels
    raise Unsupported(f"Kernels {name!r} do not run on device {kind!r}. Use 'auto', or another device.")
