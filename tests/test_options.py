"""The names of operations and policies, and what else users choose: right or refused."""

import numpy as np

import mirrored as mr
from mirrored._text import version_of

ENUMS = {
    mr.ReduceOp: ["SUM", "MEAN", "MAX", "MIN"],
    mr.VariableSynchronization: ["AUTO", "NONE", "ON_WRITE", "ON_READ"],
    mr.VariableAggregation: ["NONE", "SUM", "MEAN", "MAX", "MIN", "ONLY_FIRST_REPLICA"],
    mr.CommunicationImplementation: ["AUTO", "RING", "NCCL", "MPI"],
    mr.Storage: ["WHOLE", "PARTS", "PARTS_OF_WORKER"],
    mr.AutoShardPolicy: ["AUTO", "FILE", "DATA", "OFF"],
}


def test_a_member_and_its_name_in_any_case_are_the_member() -> None:
    for enum, names in ENUMS.items():
        assert [member.name for member in enum] == names
        for member in enum:
            for given in (member, member.name, member.name.lower(), member.name.title()):
                assert enum.parse(given, "op") is member


def test_errors_of_a_cluster_say_whether_to_start_again() -> None:
    assert (mr.ClusterStartError("worker 1 is missing").exit_code, mr.ClusterConfigError("wrong").exit_code) == (75, 76)


def test_a_package_that_is_only_on_the_path_has_no_version() -> None:
    assert version_of("numpy") == np.__version__ and version_of("no-such-package") == "not installed"
