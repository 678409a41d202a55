"""Every exception that a user of fuel-parallel can meet, one family under `FuelError`.

A message says what was wrong, the value that was given, what was expected and what to do about it.
Where Python has a fitting built-in (`ValueError`, `TypeError`, `IndexError`), the error is that as well, so that
code written against the array API standard catches what it expects.
"""

from __future__ import annotations


class FuelError(Exception):
    """Base of all errors raised on purpose by fuel-parallel."""


class ShapeError(FuelError, ValueError):
    """Shapes, axes or sizes that do not fit together."""


class AxisError(ShapeError, IndexError):
    """An axis that a tensor does not have."""


class UnknownNameError(FuelError, AttributeError):
    """A name that a tensor or the library does not have; the message says what it is called here."""


class DTypeError(FuelError, TypeError):
    """A dtype that an operation does not take, or dtypes that do not promote to a common one."""


class ArgumentError(FuelError, ValueError):
    """An argument with a value outside of what the function accepts."""


class DeviceError(ArgumentError):
    """A device that is not there or not known, or operands that lie on different devices."""


class IndexingError(FuelError, IndexError):
    """An index that is out of bounds, or of a kind that cannot be used for indexing."""


class GradientError(FuelError, ValueError):
    """A gradient that cannot be taken: a loss that is not a scalar, a graph that was already released."""


class RealizeError(FuelError, RuntimeError):
    """A kernel failed while a plan ran; the message names the op and the script line that built it."""


class CommunicatorError(FuelError, RuntimeError):
    """A collective that cannot be built or run on this communicator."""


class CollectiveMismatchError(CommunicatorError):
    """Ranks that are about to run different collectives, or that wait for each other for ever."""


class CollectiveTimeoutError(CommunicatorError):
    """A collective that has waited for longer than `--timeout`; it ends the job with exit status 124."""


class LaunchError(FuelError, RuntimeError):
    """Ranks could not be started, or the launcher and the MPI library do not belong together."""


class TopologyError(FuelError, ValueError):
    """A topology does not hold together: an id twice, a link without ends, a device that is not there."""


class TopologyFileError(TopologyError):
    """A topology file that cannot be used; the message begins with the file, the line and the key."""


class DataError(FuelError, ValueError):
    """A file or data set that cannot be used: missing, empty, wrongly encoded or too short."""


class ScheduleError(FuelError, ValueError):
    """A pipeline schedule that cannot be read or cannot run; the message names the action and the rank, or the cell."""


class CheckpointError(FuelError, RuntimeError):
    """A checkpoint that cannot be written, found or read, or that does not hold what was asked for."""


class ReplicaError(FuelError, RuntimeError):
    """Replicas of a model that no longer hold the same."""


class CacheError(FuelError, RuntimeError):
    """A page, prefix or sequence of a KV cache that is used when it is not there: freed, ended, never begun."""


class OutOfPagesError(CacheError):
    """A KV cache has no page left that it could give; nothing was changed."""
