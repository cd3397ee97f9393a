"""What of a worker's machine decides about last bits is known, and a difference is put into words; anything else is not."""

from pathlib import Path

import pytest

from mirrored._workers import machine

X86 = "processor\t: 0\nflags\t\t: fpu sse sse4_2 ssse3 aes avx avx2 fma avx512f rdtscp\n\nprocessor\t: 1\nflags\t\t: sse9\n"


def test_the_devices_the_instructions_of_cpus_and_the_flags_of_xla_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2  --xla_dump_to=/tmp/0 --xla_force_host_platform_device_count=2")
    for text, found in {
        X86: "avx avx2 avx512f fma sse sse4_2 ssse3",
        "Features : fp asimd aes sve2 bf16\n": "asimd bf16 sve2",
        "": "",
    }.items():
        (tmp_path / "cpuinfo").write_text(text)
        words = machine.words(["cpu", "cpu"], str(tmp_path / "cpuinfo"))
        assert words == sorted(["--xla_cpu_max_isa=AVX2", "cpu", *found.split()])
    gpus = machine.words(["NVIDIA H100", "NVIDIA H100"], str(tmp_path / "cpuinfo"))
    assert gpus == ["--xla_cpu_max_isa=AVX2", "NVIDIA H100"], "what their host can do changes no number"
    monkeypatch.delenv("XLA_FLAGS")
    assert machine.words(["cpu"], str(tmp_path / "none")) == ["cpu"]
    assert machine.words(["cpu"])[0] != machine.words(["cpu"])[-1], "this machine's"


def test_a_difference_names_the_workers_and_what_they_have_and_have_not() -> None:
    old, new = ["avx2", "cpu"], ["avx2", "avx512f", "cpu"]
    assert machine.difference([new]) == machine.difference([old] * 3) == ""
    assert machine.difference([new, new, old, old]) == "workers 2, 3 without avx512f"
    assert machine.difference([old, [*new, "--x"], ["cpu"]]) == "worker 1 with --x avx512f; worker 2 without avx2"
    assert machine.difference([["A"], ["B"]]) == "worker 1 without A and with B"


def test_what_another_worker_says_is_not_trusted() -> None:
    for odd in (None, 1, "avx2", {"avx2": 1}, [1, None, ["avx2"]]):
        assert machine.difference([["avx2"], odd]) == "worker 1 without avx2"
    assert machine.difference([[], ["\x1b[31m" + "x" * 1000]]).startswith(r"worker 1 with \x1b[31mxxx")
    assert len(machine.difference([[], *([f"{number}" * 1000] for number in range(9))])) < 1100
