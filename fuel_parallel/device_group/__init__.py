"""One process, several devices: `DeviceGroup`, and which of several algorithms its collectives take."""

from fuel_parallel.device_group.group import DeviceGroup

__all__ = ["DeviceGroup"]
