"""How values of several replicas become one: the operations and the policies of variables."""

from __future__ import annotations

import enum
from typing import Any, Self


class NamedChoice(enum.Enum):
    """An enum that accepts its members' names in any case, and says all of them when it does not."""

    @classmethod
    def parse(cls, given: Any, argument: str) -> Self:
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            for member in cls:
                if member.name == given.upper():
                    return member
        names = ", ".join(repr(member.name.lower()) for member in cls)
        error = ValueError if isinstance(given, str) else TypeError
        raise error(
            f"{argument} is {given!r}; expected one of {names} or a member of mr.{cls.__name__}, "
            f"for example mr.{cls.__name__}.{next(iter(cls)).name}."
        )


class ReduceOp(NamedChoice):
    """Say how values are combined: `SUM` or `MEAN`; their names are accepted everywhere, in any case.

    >>> mr.ReduceOp.SUM
    <ReduceOp.SUM: 'SUM'>

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    MEAN = "MEAN"


class VariableSynchronization(NamedChoice):
    """Say when the copies of a variable are brought together.

    * `AUTO`: the same as `ON_WRITE`.
    * `ON_WRITE`: mirrored. Every write leaves the same value on all replicas.
    * `ON_READ`: each replica has its own value; reading it outside a replica aggregates them.
    * `NONE`: exists in TensorFlow's enum and is refused there too.

    >>> mr.VariableSynchronization.ON_READ.name
    'ON_READ'

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(NamedChoice):
    """Say how the replicas' values of one variable become one value.

    * `NONE`: they are not combined. A mirrored variable then takes only values that are provably the
      same on every replica; a sync-on-read variable cannot be read outside a replica.
    * `SUM`, `MEAN`: over all replicas.
    * `ONLY_FIRST_REPLICA`: the value of replica 0.

    >>> mr.VariableAggregation.MEAN.name
    'MEAN'

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableAggregation
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
