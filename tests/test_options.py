"""The names of operations and policies: accepted in any case, refused with the list of right ones."""

import pytest

import mirrored as mr

ENUMS = [mr.ReduceOp, mr.VariableSynchronization, mr.VariableAggregation]
MEMBERS = [member for enum in ENUMS for member in enum]


@pytest.mark.parametrize("member", MEMBERS, ids=str)
@pytest.mark.parametrize("spell", [str.upper, str.lower, str.title])
def test_a_name_in_any_case_is_its_member(member, spell):
    assert type(member).parse(spell(member.name), "op") is member


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_member_is_itself(member):
    assert type(member).parse(member, "op") is member


def test_the_members_are_those_of_tensorflow():
    assert [op.name for op in mr.ReduceOp] == ["SUM", "MEAN"]
    assert [mode.name for mode in mr.VariableSynchronization] == ["AUTO", "NONE", "ON_WRITE", "ON_READ"]
    assert [mode.name for mode in mr.VariableAggregation] == ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    expected = r"reduce_op is 'min'; expected one of 'sum', 'mean' or a member of mr\.ReduceOp, for example mr\.ReduceOp\.SUM"
    with pytest.raises(ValueError, match=expected):
        mr.ReduceOp.parse("min", "reduce_op")


@pytest.mark.parametrize("given", [3, None, mr.VariableAggregation.SUM, sum], ids=repr)
def test_another_type_is_refused_also_when_its_name_would_fit(given):
    with pytest.raises(TypeError, match=r"reduce_op is .*; expected one of 'sum', 'mean'"):
        mr.ReduceOp.parse(given, "reduce_op")
