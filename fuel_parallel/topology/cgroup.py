"""What a control group lets its processes have: a container's two cores of sixty-four."""

from __future__ import annotations

from fuel_parallel.topology.sysfs import Sysfs


def quota(sysfs: Sysfs) -> float | None:
    """How many cores' time a container gets, by its cgroup (version 1 or 2); None where there is no limit.

    The least of all groups that this process is in.
    """
    found = []
    for line in sysfs.text("proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" or "cpu" in names.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                found.append(_quota_of(sysfs, "/".join(parts[:depth]), number == "0"))
    return min((q for q in found if q is not None), default=None)


def _quota_of(sysfs: Sysfs, group: str, unified: bool) -> float | None:
    if unified:
        share, _, period = sysfs.text(f"sys/fs/cgroup/{group}/cpu.max").partition(" ")
        if share.isdigit() and period.isdigit() and int(period):
            return int(share) / int(period)
        return None
    for folder in ("cpu", "cpu,cpuacct"):
        share_us = sysfs.number(f"sys/fs/cgroup/{folder}/{group}/cpu.cfs_quota_us")
        period_us = sysfs.number(f"sys/fs/cgroup/{folder}/{group}/cpu.cfs_period_us")
        if share_us is not None and share_us > 0 and period_us:
            return share_us / period_us
    return None
