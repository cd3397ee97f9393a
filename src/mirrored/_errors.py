"""The library's errors and warnings. Each is also a built-in class, so `except ValueError` works."""

from __future__ import annotations

import inspect


class ReplicasDivergeError(ValueError):
    """Copies that must be the same on every replica differ, or cannot be shown to be the same."""


class CollectiveHangError(ValueError):
    """Only some replicas would reach a collective, so that they would wait for ever."""


class FactorOfReplicasError(ValueError):
    """A gradient would be summed over the replicas twice."""


class UnevenReplicasError(ValueError):
    """The replicas hold different shapes where they need equal ones."""


class PerReplicaError(TypeError):
    """A PerReplica was used as if it were one array."""


class OneProgramError(TypeError):
    """Python needed an array's value inside a step, which is traced once for all steps and replicas."""


class ContextError(RuntimeError):
    """Something was called in the wrong context (replica, cross-replica, foreign trace)."""


class StrategyMismatchError(RuntimeError):
    """Values, variables or scopes of two strategies were mixed."""


class VariableLostError(RuntimeError):
    """The value of a variable is lost, because a program that was overwriting it failed."""


class DeviceError(ValueError):
    """A device does not exist, does not start, is named twice, or can no longer be made."""


class PlanError(RuntimeError):
    """A planned program, for devices that are not here, needs a value; or JAX cannot compile for these devices."""


class TFRecordError(ValueError):
    """A TFRecord file is damaged, cut short, or not compressed as the program said."""


#: The description of the cluster is wrong: starting again would not help.
BAD_CONFIGURATION = 76


class ClusterConfigError(ValueError):
    """The description of a cluster is wrong, so starting again would not help. The script ends with code 76."""

    exit_code = BAD_CONFIGURATION


#: Another worker was lost, or all are stuck: start the job again.
RESTART = 75


class ClusterStartError(RuntimeError):
    """The workers of a cluster did not come together: one is missing, or a port is taken. The script ends with code 75.

    If JAX had started before the strategy was made, starting again would not help, and the code is 76.
    """

    def __init__(self, *args: object, exit_code: int = RESTART) -> None:
        super().__init__(*args)
        self.exit_code = exit_code


class WorkerLostError(RuntimeError):
    """Another worker is gone, or did not reach a point that all workers must reach."""


class ProgramMismatchError(RuntimeError):
    """The workers run different programs, which would deadlock or give wrong numbers."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be restored or does not fit, or saving has failed repeatedly."""


class FactorOfReplicasWarning(UserWarning):
    """An update is R times as large as on a single device."""


class ReplicasDivergeWarning(UserWarning):
    """A step returns a state that was the same on all replicas and now differs."""


class UnevenReplicasWarning(UserWarning):
    """A mean gives equal weight to replicas with different numbers of rows."""


class SameNoiseWarning(UserWarning):
    """A step combines random numbers that are the same on all replicas with each replica's own rows."""


class RecompilationWarning(UserWarning):
    """A function is compiled again and again. The message names the argument that causes this."""


#: An error of the user's program.
FAILED = 1
#: Ctrl-C.
INTERRUPTED = 130
#: The machine was about to be taken away, and the state is saved: 128 + SIGTERM, as if the signal had ended the process.
PREEMPTED = 143

#: Seconds after a SIGTERM during which further ones count as the same notice: systemd and Slurm may signal all processes of a
#: job, and the launcher and `srun` forward theirs, so two come within milliseconds. A user who insists is slower.
NOTICE_SECONDS = 1.0

for _thing in list(vars().values()):
    if isinstance(_thing, type):
        _thing.__module__ = "mirrored"  # tracebacks show the name that users write after `except`
        _where = f"the page Troubleshooting of the documentation, under {_thing.__name__}"
        _thing.__doc__ = f"{inspect.cleandoc(_thing.__doc__ or '')}\n\nMessages, causes, cures: {_where}."
