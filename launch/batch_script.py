"""A batch script for SLURM, as text: plain enough to be read, changed and kept with the project.

Everything that a user gives is checked or quoted, so that no name, path or value can become an option or a command.
What stands in an #SBATCH line is read by SLURM and not by the shell; there is no quoting in it that all versions
understand alike, so characters that would need some are refused.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template

from fuel_parallel.errors import ArgumentError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMS = {
    "time": (re.compile(r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED"), "90 (minutes), 2:00:00 or 1-12:00"),
    "array": (re.compile(r"(\d+(-\d+(:\d+)?)?)(,\d+(-\d+(:\d+)?)?)*(%\d+)?"), "0-9, 1,3,5 or 0-99%4 (4 at a time)"),
    "gpus-per-node": (re.compile(r"([A-Za-z0-9_.\-]+:)?\d+"), "8 or a100:8"),
}


@dataclass(frozen=True)
class BatchScript:
    """What is to be asked of SLURM, and what is to run.

    Args:
        command: What starts the ranks: the words of a fuelrun.
        directives: Long options of sbatch and their values, in order; an empty value for a flag.
        folder: The working folder of the ranks; "" for that of the submission.
        environment: A folder with a virtual environment, or a conda environment by folder or name.
        conda: `environment` is one of conda.
        modules: What `module load` is to load first.
        variables: To be set for fuelrun and the ranks.
        more: Lines of further options for sbatch, each the words of one option.
    """

    command: tuple[str, ...]
    directives: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    environment: str = ""
    conda: bool = False
    modules: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    more: tuple[tuple[str, ...], ...] = ()

    def text(self) -> str:
        """The script. Raises `ArgumentError` for what cannot stand in one.

        >>> print(BatchScript(("fuelrun", "my train.py"), (("nodes", "2"), ("requeue", ""))).text())
        #!/bin/bash
        # Ranks under SLURM, written by fuelrun sbatch. Submit it with: sbatch FILE
        #SBATCH --nodes=2
        #SBATCH --requeue
        <BLANKLINE>
        # exec: fuelrun takes this shell's place, gets the signals for the batch script, and passes them on to ranks.
        exec fuelrun 'my train.py'
        <BLANKLINE>
        """
        lines = [f"#SBATCH {_directive(name, value)}" for name, value in self.directives]
        lines += [f"#SBATCH {' '.join(_sbatch_word(word, '--sbatch-args') for word in words)}" for words in self.more]
        setup = "".join(f"\n{line}" for line in self._setup())
        template = Template(files("fuelrun.launch").joinpath("templates/job.sbatch").read_text())
        return template.substitute(
            login=" -l" if self.modules else "",  # the profile of a login shell is what defines `module`
            directives="\n".join(lines),
            setup=f"{setup}\n" if setup else "",
            command=shlex.join(_shell_word(word) for word in self.command),
        )

    def _setup(self) -> list[str]:
        lines = [f"module load {shlex.quote(_shell_word(module))} || exit" for module in self.modules]
        where = shlex.quote(_shell_word(self.environment))
        if self.environment and self.conda:
            lines += ['source "$(conda info --base)/etc/profile.d/conda.sh" || exit', f"conda activate {where} || exit"]
        elif self.environment:
            lines.append(f"source {where}/bin/activate || exit")
        for name, value in self.variables.items():
            if _VARIABLE.fullmatch(name) is None:
                raise ArgumentError(f"--env {name}={value}: a variable's name has letters, digits and _ only")
            lines.append(f"export {name}={shlex.quote(_shell_word(value))}")
        if self.folder:
            lines.append(f"cd -- {shlex.quote(_shell_word(self.folder))} || exit")
        return lines


def _shell_word(word: str) -> str:
    if "\0" in word:
        raise ArgumentError(f"{word!r} holds a NUL character, which no command can take")
    return word


def _directive(name: str, value: str) -> str:
    if not value:
        return f"--{name}"
    if name in _FORMS and _FORMS[name][0].fullmatch(value) is None:
        raise ArgumentError(f"--{name} {value}: expected {_FORMS[name][1]}")
    return f"--{name}={_sbatch_word(value, f'--{name}')}"


def _sbatch_word(word: str, option: str) -> str:
    bad = next((letter for letter in word if not letter.isprintable() or letter in "\"'`\\"), None)
    if bad is not None:
        raise ArgumentError(
            f"{option} {word!r} holds {bad!r}, which cannot stand in an #SBATCH line; take letters, digits, blanks and "
            "signs other than quotes and backslashes"
        )
    return word if word and not re.search(r"[\s#]", word) else f'"{word}"'


def job_name(script: str) -> str:
    """A name for the job of a script: what SLURM and file systems take of its own.

    >>> job_name("examples/train gpt.py")
    'train-gpt'
    """
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_.+]+", "-", stem).strip("-.") or "job"


def log_file(folder: str, name: str, *, array: bool) -> str:
    """The pattern for the file of a job's output, one for each task of an array.

    >>> log_file("logs", "train", array=True)
    'logs/train-%A_%a.log'
    """
    if "/" in name:
        raise ArgumentError(f"--job-name {name} holds a /, but names the log file as well; leave the / out")
    path = f"{folder.rstrip('/') or '/'}/{name}" if folder else name
    return path.replace("%", "%%") + ("-%A_%a.log" if array else "-%j.log")
