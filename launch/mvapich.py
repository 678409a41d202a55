"""Starting ranks with MVAPICH 2 and 3, whose mpiexec is MPICH's Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuelrun.launch.engine import Job
from fuelrun.launch.mpich import Mpich


@dataclass(frozen=True)
class Mvapich(Mpich):
    """MVAPICH's mpiexec; the library binds ranks and spins unless told otherwise."""

    name: str = "MVAPICH"

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """Binding is fuelrun's part: the library would put two jobs of a machine onto the same cores.

        The names are those of MVAPICH 2 (MV2_) and 3 (MVP_).
        """
        wanted = {"MV2_ENABLE_AFFINITY": "0", "MVP_ENABLE_AFFINITY": "0"}
        if job.shared_cores:
            wanted |= {"MV2_USE_BLOCKING": "1", "MVP_USE_BLOCKING": "1"}
        added = {name: value for name, value in wanted.items() if name not in environ}
        return super().variables(job, environ) | added
