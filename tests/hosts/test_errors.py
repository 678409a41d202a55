"""What is wrong with another machine is said before the job starts, in one paragraph with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fuelrun.launch.find import library


def refused(network, *words: str, **environ: str) -> str:
    done = network.run(*words, **environ)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_a_script_that_is_not_on_the_other_machine(network) -> None:
    script = network.write("print(1)")
    (network.folder.parent / "empty").mkdir()
    network.machines[1].run("mount", "--bind", str(network.folder.parent / "empty"), str(network.folder))
    err = refused(network, "-H", network.hosts, script)
    assert f"on 10.77.0.2: there is no script '{script}' in {network.folder}" in err
    assert "in the same place, shared or copied" in err


def test_a_folder_that_is_not_on_the_other_machine(network) -> None:
    script = network.write("print(1)")
    network.machines[1].run("mount", "-t", "tmpfs", "none", str(network.folder.parent))
    assert f"on 10.77.0.2 there is no folder {network.folder}; a job needs" in refused(
        network, "-H", network.hosts, script
    )


def test_a_machine_that_is_down_or_refuses(network) -> None:
    err = refused(network, "-H", "10.77.0.1,10.77.0.9", network.write("print(1)"))
    assert "10.77.0.9 cannot be reached (connect to host 10.77.0.9 port 2022: " in err
    assert "let you in without a password" in err
    false = network.folder / "false"
    false.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    false.chmod(0o755)
    err = refused(network, "-H", network.hosts, "--launch-agent", f"{false} -q", "script.py")
    assert "10.77.0.2 cannot be reached (Permission denied (publickey).); " in err
    assert f"{false} -q 10.77.0.2 true must work" in err


def test_another_mpi_on_the_other_machine(network, tmp_path: Path) -> None:
    """Its Python finds an mpi4py that loads another one."""
    other = tmp_path / "other"
    (other / "mpi4py").mkdir(parents=True)
    (other / "mpi4py" / "__init__.py").write_text("class rc: initialize = True\n")
    text = "MPI Version 9"
    (other / "mpi4py" / "MPI.py").write_text(f"def Get_library_version(): return {text!r}\n")
    agent = tmp_path / "agent of another"
    ours = network.environ["FUEL_LAUNCH_AGENT"]
    agent.write_text(
        "#!/bin/sh\nhost=$1; shift\n"
        f'exec {ours} $host "$(echo "$*" | sed \'s|exec env|exec env PYTHONPATH={other}|\')"\n'
    )
    agent.chmod(0o755)
    err = refused(network, "-H", network.hosts, network.write("print(1)"), FUEL_LAUNCH_AGENT=f"'{agent}'")
    assert f"on 10.77.0.2 mpi4py loads another MPI ({text}) than here ({(library().flavour or '')[:5]}" in err
    assert f"install the same one into {sys.prefix} there" in err


def test_the_way_to_the_other_machine_is_found_and_told(network) -> None:
    done = network.run("doctor", "--no-launch", "-H", network.hosts)
    assert "network between machines" in done.stdout
    assert "10.77.0.0/24 by e1 (10.77.0.1/24)" in done.stdout
    assert "machine 10.77.0.2" in done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("wish", ["docker0", "172.17.0.0/16"])
def test_an_interface_that_does_not_lead_there_is_found_out_before_the_job(network, wish: str) -> None:
    """Asked for by name it is believed, and the other machine has the same address on its own."""
    err = refused(network, "-H", network.hosts, "--interface", wish, network.write("print(1)"))
    assert "10.77.0.2 has our own address 172.17.0.1 in 172.17.0.0/16" in err
