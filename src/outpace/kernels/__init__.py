"""The arithmetic of a decoder: one contract (base), one implementation per way of computing it, one registry."""

from outpace.kernels.base import Capability, Kernels, Matrix
from outpace.kernels.registry import KERNELS, select

__all__ = ["KERNELS", "Capability", "Kernels", "Matrix", "select"]
