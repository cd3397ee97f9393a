"""The environment: every variable is in one table, and none is left changed."""

import ast
import os
import re
from pathlib import Path

import pytest

import mirrored as mr
from mirrored import _env
from mirrored._env import EnvironmentVariable, at_least

VARIABLE, FALLBACK = EnvironmentVariable("MIRRORED_TEST", "a test's"), EnvironmentVariable("MIRRORED_TEST_2", "its fallback")
SOURCES = sorted(Path(mr.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("before", "fallback", "inside"),
    [
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
    ],
)
def test_a_number_is_raised_for_the_block_only_and_never_lowered(
    before: str | None, fallback: str | None, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in ((VARIABLE, before), (FALLBACK, fallback)):
        if value is None:
            monkeypatch.delenv(variable.name, raising=False)
        else:
            monkeypatch.setenv(variable.name, value)
    with at_least(VARIABLE, 16, FALLBACK):
        assert VARIABLE.get() == inside
        assert FALLBACK.get() == fallback
    assert VARIABLE.get() == before


def test_the_number_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE.name, "3")
    with pytest.raises(KeyError), at_least(VARIABLE, 16, FALLBACK):
        raise KeyError
    assert VARIABLE.get() == "3"
    monkeypatch.delenv(VARIABLE.name)
    with pytest.raises(KeyError), at_least(VARIABLE, 16, FALLBACK):
        raise KeyError
    assert VARIABLE.get() is None


@pytest.mark.parametrize(("text", "number"), [(None, 0), ("", 0), ("12", 12), ("1.5", 0), ("-3", 0), ("0x8", 0), (" 8", 0)])
def test_what_is_no_number_counts_as_unset(text: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE.name, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE.name, text)
    assert VARIABLE.get_int() == number


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (None, 0),
        ("", 0),
        ("--xla_cpu_foo=3", 0),
        ("--xla_force_host_platform_device_count=8", 8),
        ("--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", 8),
        ("--xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=4", 4),
        ("--xla_force_host_platform_device_count=", 0),
    ],
)
def test_the_count_of_devices_in_xla_flags(flags: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert _env.forced_host_devices() == count


def test_the_table_names_each_variable_once_and_says_what_for() -> None:
    names = [variable.name for variable in _env.TABLE]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in names if name != "OMPI_MCA_orte_hnp_uri")  # Open MPI's spelling
    assert all(len(variable.use) > 20 for variable in _env.TABLE)
    declared = {value for value in vars(_env).values() if isinstance(value, EnvironmentVariable)}
    assert declared == set(_env.TABLE)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_other_file_touches_the_environment(source: Path) -> None:
    if source.name == "_env.py":
        return
    touched = [
        node.lineno
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv", "environb"}
    ]
    assert touched == []


def test_a_step_leaves_the_environment_as_it_was(strategy2: mr.MirroredStrategy) -> None:
    before = dict(os.environ)
    strategy2.run(lambda: mr.get_replica_context().all_reduce("sum", 1.0))
    assert dict(os.environ) == before


def test_tf_config_is_ignored_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mirrored"):
        mr.MirroredStrategy(["cpu:0"])
        assert "TF_CONFIG" not in caplog.text
        monkeypatch.setenv("TF_CONFIG", "{not json")
        assert mr.MirroredStrategy(["cpu:0"]).num_workers == 1
    assert "TF_CONFIG is set, but MirroredStrategy is for one machine and ignores it" in caplog.text
