"""Reading /sys and /proc: small files that may be missing, unreadable or odd, which all mean "not known"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from fuel_parallel.errors import DataError
from fuel_parallel.topology.cores import parse_list

DOMAINS = "sys/devices/system/node"
LONGEST = 1 << 16
"""No file that is read here is longer."""


class Sysfs(NamedTuple):
    """The files of a machine, of this one with the root "/"."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """What is in a file, stripped; "" if it cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(LONGEST).decode(errors="replace").strip()
        except (OSError, ValueError):
            return ""

    def number(self, path: str) -> int | None:
        """A whole number in a file; None if there is none."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None

    def names(self, path: str, pattern: str = ".*") -> list[str]:
        """The names in a folder that match a pattern as a whole, numbers in them in numerical order."""
        try:
            found = [p.name for p in (self.root / path).iterdir() if re.fullmatch(pattern, p.name)]
        except OSError:
            return []
        return sorted(found, key=lambda name: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", name)])

    def cores(self, path: str) -> frozenset[int]:
        """The cores of a list in a file; none if it is no such list."""
        return _cores(self.text(path))

    def allowed_cores(self, process: str = "self") -> frozenset[int]:
        """The cores that a process may run on, by its affinity; none if that is not known."""
        found = re.search(r"^Cpus_allowed_list:\s*(\S+)", self.text(f"proc/{process}/status"), re.MULTILINE)
        return _cores(found[1]) if found else frozenset()

    def domains(self) -> dict[int, frozenset[int]]:
        """The cores of each NUMA domain, by its index."""
        return {int(name[4:]): self.cores(f"{DOMAINS}/{name}/cpulist") for name in self.names(DOMAINS, r"node\d+")}

    def target(self, path: str) -> Path | None:
        """Where a link points to; None if it is none."""
        whole = self.root / path
        try:
            return whole.resolve(strict=True) if whole.exists() else None
        except (OSError, RuntimeError):
            return None


def _cores(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_list(text))
    except DataError:
        return frozenset()
