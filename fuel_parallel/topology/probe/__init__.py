"""What this machine consists of, as the kernel and the vendors' libraries say: `fuelrun topology probe`."""

from fuel_parallel.topology.probe.machine import probe

__all__ = ["probe"]
