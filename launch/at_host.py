"""What another machine says about itself before ranks start there: `python -m fuelrun.launch.at_host [-m] SCRIPT`.

fuelrun runs it on each machine by the launch agent (ssh), in the job's folder, and compares the answers. Nothing of the
user's is executed. The answer is the last line of the output: login scripts may print before it.
"""

from __future__ import annotations

import json
import socket
import sys

from fuel_parallel.errors import FuelError
from fuel_parallel.version import __version__
from fuelrun.launch import network
from fuelrun.launch.script import Script

SIGN = "fuelrun-host "


def _mpi() -> str:
    """Which MPI mpi4py loads here."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        return MPI.Get_library_version().strip("\0").strip()
    except Exception as error:  # whatever a broken installation raises
        return f"none ({type(error).__name__}: {error})"


def _problem(words: list[str]) -> str:
    """Why the script cannot be run here, "" if it can."""
    try:
        Script.from_command(words).check()
    except FuelError as error:
        return str(error)
    except SyntaxError as error:
        return f"the script is another one there: {error}"
    return ""


def main() -> None:
    """Print the answer."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    answer = {
        "name": socket.gethostname(),
        "version": __version__,
        "mpi": _mpi(),
        "problem": _problem(sys.argv[1:]) if sys.argv[1:] else "",
        "port": port,
        "addresses": {one.name: f"{one.address}/{one.prefix}" for one in network.interfaces()},
    }
    print(f"\n{SIGN}{json.dumps(answer)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
