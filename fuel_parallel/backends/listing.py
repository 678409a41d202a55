"""Which devices can be used, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fuel_parallel.backends.backend import DeviceProperties


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that can be used, `cpu` first, and why others cannot: kinds without any, and devices that fail.

    Goes through the names of devices; printed, it is a table.
    """

    found: tuple[DeviceProperties, ...]
    missing: Mapping[str, str]

    def __iter__(self) -> Iterator[str]:
        return (one.device for one in self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __contains__(self, device: object) -> bool:
        return any(one.device == device for one in self.found)

    def rows(self) -> list[tuple[str, str]]:
        """For each device its name and what it is, and for all else why it is missing."""
        rows = []
        for one in self.found:
            memory = f", {one.memory / 2**30:.1f} GiB" if one.memory else ""
            vendor = f" ({one.vendor})" if one.vendor else ""
            rows.append((one.device, f"{one.name}{vendor}{memory}"))
        return rows + [(kind, f"none: {reason}") for kind, reason in self.missing.items()]

    def __str__(self) -> str:
        return "\n".join(f"{name:<10}  {text}" for name, text in self.rows())
