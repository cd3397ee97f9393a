"""The environment: every variable is in one table, and none is left changed. tests/test_house.py sees that one file reads it."""

import re

import pytest

from mirrored import _env
from mirrored._env import EnvironmentVariable, at_least

VARIABLE, FALLBACK = EnvironmentVariable("MIRRORED_TEST", "a test's"), EnvironmentVariable("MIRRORED_TEST_2", "its fallback")


#: Names that have small letters, as Open MPI and gRPC spell them.
SMALL = {"OMPI_MCA_orte_hnp_uri", "grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"}


def set_to(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    monkeypatch.setenv(name, value or "")
    if value is None:
        monkeypatch.delenv(name)


def test_a_number_is_raised_for_the_block_only_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, fallback, inside in [
        (None, None, "16"),
        ("8", None, "16"),
        ("40", None, "40"),
        (None, "40", "40"),
        (None, "8", "16"),
        ("8", "40", "16"),
        ("40", "8", "40"),
        ("", "40", "40"),
        ("many", None, "16"),
        ("-5", None, "16"),
    ]:
        set_to(monkeypatch, VARIABLE.name, before)
        set_to(monkeypatch, FALLBACK.name, fallback)
        with pytest.raises(KeyError), at_least(VARIABLE, 16, FALLBACK):
            assert (VARIABLE.get(), FALLBACK.get()) == (inside, fallback)
            raise KeyError
        assert VARIABLE.get() == before


def test_numbers_are_read_and_what_is_none_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, number in {None: 0, "": 0, "12": 12, "1.5": 0, "-3": 0, "0x8": 0, " 8": 0}.items():
        set_to(monkeypatch, VARIABLE.name, text)
        assert VARIABLE.get_int() == number
    flag = "--xla_force_host_platform_device_count="
    for flags, count in {
        None: 0, "": 0, "--xla_cpu_foo=3": 0, f"{flag}8": 8, f"--xla_a=1 {flag}8 --xla_b=2": 8, f"{flag}8 {flag}4": 4, flag: 0
    }.items():  # fmt: skip
        set_to(monkeypatch, "XLA_FLAGS", flags)
        assert _env.forced_host_devices() == count


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ({}, None),
        ({"no_proxy": "a.org"}, None),
        ({"HTTP_PROXY": "http://p:1"}, None),  # gRPC reads none in capital letters
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://p:1"}, "gpu-0"),
        ({"https_proxy": "http://p:1", "no_proxy": "a.org,10.0.0.0/8"}, "a.org,10.0.0.0/8,gpu-0"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "a.org", "no_grpc_proxy": "b.org"}, "b.org,gpu-0"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "a.org", "no_grpc_proxy": ""}, "gpu-0"),
    ],
)
def test_a_host_is_kept_out_of_the_proxy_that_there_is_for_grpc_alone(
    given: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env.os, "environ", dict(given))
    _env.connect_directly("gpu-0")
    assert _env.os.environ == given | ({"no_grpc_proxy": after} if after else {}), "what other libraries read is as it was"


def test_the_table_names_each_variable_once_and_says_what_for() -> None:
    names = [variable.name for variable in _env.TABLE]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in names if name not in SMALL)
    assert all(len(variable.use) > 20 for variable in _env.TABLE)
    declared = {value for value in vars(_env).values() if isinstance(value, EnvironmentVariable)}
    assert declared == set(_env.TABLE)


def test_nothing_is_written_where_the_number_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code of other threads may be reading the environment, which a write would move under it."""
    monkeypatch.setenv(VARIABLE.name, "16")
    written: list[object] = []

    class Watched(dict):
        def __setitem__(self, *item: object) -> None:
            written.append(item)

    monkeypatch.setattr(_env.os, "environ", Watched(_env.os.environ))
    with at_least(VARIABLE, 16, FALLBACK):
        assert VARIABLE.get() == "16"
    assert written == []
