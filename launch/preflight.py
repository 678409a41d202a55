"""Asking the other machines of a job before it starts: are they there, and do they have what a rank needs?

An MPI's own words for an unreachable host, a missing script or another MPI on one of sixty machines are a page long, or
a hang. Here each machine is asked by the same remote shell that the MPI will use, all at once.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fuel_parallel.errors import LaunchError
from fuel_parallel.version import __version__
from fuelrun.launch.at_host import SIGN

AGENT = "FUEL_LAUNCH_AGENT"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Never a question for a password, which nobody would see; and no minutes for a machine that is down."""

_ANSWERS_WITHIN_S = 60.0
_AT_ONCE = 32
_NO_FOLDER, _NO_PYTHON = 191, 192
_REFUSED = 255  # ssh's own status


class Answer(msgspec.Struct, frozen=True):
    """What a machine says about itself.

    Args:
        name: Its own host name.
        version: Of fuel-parallel there.
        mpi: What the MPI library says there.
        problem: Why the script cannot be run there, "" if it can.
        port: A port that was free.
        addresses: Of its interfaces, as in {"eth0": "10.0.0.1/24"}.
    """

    name: str
    version: str
    mpi: str
    problem: str
    port: int
    addresses: dict[str, str]

    def address_in(self, network: str) -> str | None:
        """Its address in a network."""
        inside = ipaddress.ip_network(network, strict=False)
        for words in self.addresses.values():
            address = ipaddress.ip_interface(words).ip
            if address in inside:
                return str(address)
        return None


def agent_words(given: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The remote shell: `--launch-agent`, else FUEL_LAUNCH_AGENT, else ssh. Raises LaunchError if it cannot be run."""
    text = given or environ.get(AGENT) or ""
    try:
        words = tuple(shlex.split(text)) or SSH
    except ValueError as error:
        raise LaunchError(f"the launch agent '{text}' is no command line: {error}") from None
    from shutil import which

    program = which(words[0])
    if program is None:
        remedy = "install an ssh client" if words == SSH else "it comes from --launch-agent or FUEL_LAUNCH_AGENT"
        raise LaunchError(f"there is no program '{words[0]}' to reach other machines with; {remedy}")
    return (os.path.abspath(program), *words[1:])


def ask(
    hosts: Sequence[str], agent: tuple[str, ...], script: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, Answer]:
    """The answers of machines by the names they were given; raises LaunchError for the first that cannot be used.

    Args:
        hosts: The machines to ask.
        agent: The remote shell and its options.
        script: `[-m] NAME`, which must be there; () for none.
        environ: Variables that Python needs there (PYTHONPATH and the like).
    """
    command = _remote_command(script, environ)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        outcomes = list(threads.map(lambda host: _ask_one(host, agent, command), hosts))
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if problems:
        more = f" ({len(problems) - 1} more of {len(hosts)} machines cannot be used either)" if problems[1:] else ""
        raise LaunchError(problems[0] + more)
    return {host: answer for host, answer in zip(hosts, outcomes, strict=True) if isinstance(answer, Answer)}


def compare(host: str, answer: Answer, *, mpi: str, network: str) -> str:
    """Why a machine cannot take ranks of this job, "" if it can.

    Args:
        host: As the user calls it.
        answer: What it said.
        mpi: What the MPI library says here.
        network: The network between the machines.
    """
    if answer.problem:
        return f"on {host}: {answer.problem}; every machine needs the script in the same place, shared or copied"
    if answer.version != __version__:
        return (
            f"on {host} there is fuel-parallel {answer.version}, here {__version__}; "
            f"install the same one into {sys.prefix} there"
        )
    if _edition(answer.mpi) != _edition(mpi):
        return (
            f"on {host} mpi4py loads another MPI ({_edition(answer.mpi)}) than here ({_edition(mpi)}): ranks would "
            f"not find each other; install the same one into {sys.prefix} there"
        )
    if answer.address_in(network) is None:
        has = ", ".join(f"{name} {address}" for name, address in answer.addresses.items())
        return (
            f"{host} has no address in {network}, the network that was chosen here (it has {has}); "
            "name another with --interface"
        )
    return ""


def _remote_command(script: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """One word for the remote shell, whichever it is: it starts /bin/sh, and that the rest."""
    folder = shlex.quote(os.getcwd())
    python = shlex.quote(sys.executable)
    variables = [f"{name}={value}" for name, value in environ.items()]
    run = shlex.join(["env", *variables, sys.executable, "-m", "fuelrun.launch.at_host", *script])
    steps = f"cd {folder} 2>/dev/null || exit {_NO_FOLDER}; test -x {python} || exit {_NO_PYTHON}; exec {run}"
    return f"exec /bin/sh -c {shlex.quote(steps)}"


def _ask_one(host: str, agent: tuple[str, ...], command: str) -> Answer | str:
    """The answer, or in a sentence why there is none."""
    by_hand = shlex.join([*agent, host, "true"])
    try:
        child = subprocess.run(
            [*agent, host, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{host} has not answered within {_ANSWERS_WITHIN_S:.0f} s; try it by hand: {by_hand}"
    except OSError as error:
        return f"cannot run {agent[0]} to reach {host}: {error.strerror}"
    for line in reversed(child.stdout.splitlines()):
        if line.startswith(SIGN):
            try:
                return msgspec.json.decode(line.removeprefix(SIGN), type=Answer)
            except msgspec.DecodeError:
                break
    last = (child.stderr.strip().splitlines() or ["no message"])[-1].strip()
    if child.returncode == _NO_FOLDER:
        return (
            f"on {host} there is no folder {os.getcwd()}; a job needs its folder in the same place on every machine, "
            "by a shared file system or a copy"
        )
    if child.returncode == _NO_PYTHON:
        return (
            f"on {host} there is no {sys.executable}; a job needs the same Python environment in the same place on "
            "every machine, by a shared file system or a copy"
        )
    if child.returncode == _REFUSED:
        return (
            f"{host} cannot be reached ({last}); a machine must be up and let you in without a password: {by_hand} "
            "must work"
        )
    return (
        f"on {host} Python could not say whether ranks can run there (exit status {child.returncode}: {last}); "
        f"{sys.executable} there needs the same packages as here"
    )


def _edition(text: str) -> str:
    """Of all that a library says about itself its name and version, as in "MPICH Version: 5.0.2"."""
    return " ".join((text.splitlines() or [""])[0].partition(", ")[0].split())
