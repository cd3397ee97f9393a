"""Synchronous data-parallel training for JAX with the programming model of tf.distribute.MirroredStrategy."""

from typing import NoReturn as _NoReturn

from . import _tf_names
from ._jax import versions as _versions

_versions.warn_if_untried()  # before anything that could fail because of it

from . import data as data
from . import losses as losses
from ._checkpoint.checkpoint import Checkpoint as Checkpoint
from ._checkpoint.export import export as export
from ._checkpoint.preemption import PreemptionHandler as PreemptionHandler
from ._cluster.resolvers import ClusterResolver as ClusterResolver
from ._cluster.resolvers import KubernetesClusterResolver as KubernetesClusterResolver
from ._cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
from ._cluster.resolvers import SlurmClusterResolver as SlurmClusterResolver
from ._cluster.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from ._cluster.spec import ClusterSpec as ClusterSpec
from ._errors import CheckpointError as CheckpointError
from ._errors import ClusterConfigError as ClusterConfigError
from ._errors import ClusterStartError as ClusterStartError
from ._errors import CollectiveHangError as CollectiveHangError
from ._errors import ContextError as ContextError
from ._errors import DeviceError as DeviceError
from ._errors import FactorOfReplicasError as FactorOfReplicasError
from ._errors import FactorOfReplicasWarning as FactorOfReplicasWarning
from ._errors import OneProgramError as OneProgramError
from ._errors import PerReplicaError as PerReplicaError
from ._errors import ProgramMismatchError as ProgramMismatchError
from ._errors import RecompilationWarning as RecompilationWarning
from ._errors import ReplicasDivergeError as ReplicasDivergeError
from ._errors import ReplicasDivergeWarning as ReplicasDivergeWarning
from ._errors import StrategyMismatchError as StrategyMismatchError
from ._errors import UnevenReplicasError as UnevenReplicasError
from ._errors import VariableLostError as VariableLostError
from ._errors import WorkerLostError as WorkerLostError
from ._options import AutoShardPolicy as AutoShardPolicy
from ._options import CommunicationImplementation as CollectiveCommunication
from ._options import CommunicationImplementation as CommunicationImplementation
from ._options import CommunicationOptions as CommunicationOptions
from ._options import InputOptions as InputOptions
from ._options import ReduceOp as ReduceOp
from ._options import VariableAggregation as VariableAggregation
from ._options import VariableSynchronization as VariableSynchronization
from ._program.eager import eager as eager
from ._replicas.context import ReplicaContext as ReplicaContext
from ._replicas.frames import in_cross_replica_context as in_cross_replica_context
from ._replicas.per_replica import PerReplica as PerReplica
from ._report.profile import profile as profile
from ._report.report import report as report
from ._strategy.current import get_replica_context as get_replica_context
from ._strategy.current import get_strategy as get_strategy
from ._strategy.current import has_strategy as has_strategy
from ._strategy.strategies import MirroredStrategy as MirroredStrategy
from ._strategy.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from ._strategy.strategies import OneDeviceStrategy as OneDeviceStrategy
from ._strategy.strategy import Strategy as Strategy
from ._strategy.strategy import ValueContext as ValueContext
from ._transforms.function import function as function
from ._transforms.gradients import grad as grad
from ._transforms.gradients import value_and_grad as value_and_grad
from ._transforms.loops import cond as cond
from ._transforms.loops import fori_loop as fori_loop
from ._transforms.loops import scan as scan
from ._variables.tree import VariableTree as VariableTree
from ._variables.variable import Variable as Variable
from .data._input_context import InputContext as InputContext
from .optimizer import Optimizer as Optimizer

__version__ = "0.1.0"

for _thing in list(vars().values()):
    if isinstance(_thing, type) and issubclass(_thing, Exception):
        _thing.__module__ = __name__  # tracebacks show the name to write behind `except`


def __getattr__(name: str) -> _NoReturn:
    raise _tf_names.missing("mirrored", name)
