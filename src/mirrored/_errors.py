"""Everything the library raises or warns with. Each is also a built-in class, so `except ValueError` works."""

from __future__ import annotations

from ._exit_codes import BAD_CONFIGURATION, RESTART


class ReplicasDivergeError(ValueError):
    """Say that copies which must be the same on every replica are not, or cannot be shown to be."""


class CollectiveHangError(ValueError):
    """Say that only some replicas would reach a collective, so that all would wait for ever."""


class FactorOfReplicasError(ValueError):
    """Say that a gradient would be summed over the replicas twice."""


class UnevenReplicasError(ValueError):
    """Say that the replicas hold different shapes where equal ones are needed."""


class PerReplicaError(TypeError):
    """Say that a PerReplica was used as if it were one array."""


class OneProgramError(TypeError):
    """Say that Python tried to branch on a value that differs by replica."""


class ContextError(RuntimeError):
    """Say that something was called in the wrong context (replica, cross-replica, foreign trace)."""


class StrategyMismatchError(RuntimeError):
    """Say that values, variables or scopes of two strategies were mixed."""


class DeviceError(ValueError):
    """Say that a device does not exist, is named twice, or can no longer be made."""


class TFRecordError(ValueError):
    """Say that a TFRecord file is damaged, cut short, or written in another way than was said."""


class ClusterConfigError(ValueError):
    """Say that the description of a cluster is wrong, so that starting again would not help; a script ends with code 76."""

    exit_code = BAD_CONFIGURATION


class ClusterStartError(RuntimeError):
    """Say that the workers of a cluster did not come together: one is missing, or a port is taken; ends with code 75.

    Where starting again would not help, because JAX had started before the strategy was made, with 76.
    """

    def __init__(self, *args: object, exit_code: int = RESTART) -> None:
        super().__init__(*args)
        self.exit_code = exit_code


class WorkerLostError(RuntimeError):
    """Say that another worker is gone, or did not come where all must."""


class ProgramMismatchError(RuntimeError):
    """Say that the workers came to different programs, which would wait for each other or give wrong numbers."""


class CheckpointError(RuntimeError):
    """Say that a checkpoint cannot be restored, does not fit, or that saving has failed again and again."""


class FactorOfReplicasWarning(UserWarning):
    """Warn that an update is R times the one that a single device would make."""


class RecompilationWarning(UserWarning):
    """Warn that a function is compiled again and again, and name the argument that causes it."""
