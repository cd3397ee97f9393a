"""Estimates, and what a plan says, of figures that compiled programs have had."""

import dataclasses
import json

import pytest

import mirrored as mr
from mirrored._plan.chips import CHIPS, chip_of
from mirrored._plan.modules import Sent
from mirrored._plan.plan import ProgramPlan
from mirrored._program.memory import Memory

GIB = 2**30
#: Of GPT with 111 M parameters on 16 x 512 tokens, compiled for one H100; one H200 takes 15.0 ms.
GPT = ProgramPlan("gpt", ("int32[1,16,513]",), "", Memory(GIB // 2, GIB, 32_832, 1024, 8 * GIB), 5.907e12, 0.0, 57.6e9, (), 7.0)
#: Of ResNet-50 in bfloat16 on 128 pictures; one H200 takes 20.8 ms.
RESNET = ProgramPlan("resnet", (), "", Memory(10**8, 10**8, 2 * 10**7, 1024, 5 * GIB), 3.613e12, 3.612e12, 33.6e9, (), 15.5)


def plan_with(*programs: ProgramPlan, kind: str = "NVIDIA H200", devices: int = 1) -> mr.Plan:
    return mr.Plan("test", devices, 1, CHIPS.get(kind), programs)


@pytest.mark.parametrize(("program", "measured"), [(GPT, 15.0e-3), (RESNET, 20.8e-3)])
def test_estimates_are_within_half_of_what_one_h200_took(program: ProgramPlan, measured: float) -> None:
    estimated = plan_with(program).estimate(program).seconds
    assert measured / 1.5 <= estimated <= measured * 1.5


@pytest.mark.parametrize("kind", sorted(CHIPS))
def test_a_sum_costs_more_on_more_devices_and_less_beside_other_work(kind: str) -> None:
    alone = dataclasses.replace(GPT, collectives=(Sent("all-reduce", 500_000_000, False, 0),))
    beside = dataclasses.replace(GPT, collectives=(Sent("all-reduce", 500_000_000, True, 9),))
    plan = plan_with(alone, beside, kind=kind, devices=256)
    times = [plan.estimate(alone, count).seconds for count in (1, 8, 64, 256)]
    assert times == sorted(times) and times[0] == plan.estimate(GPT).seconds < times[1]
    assert plan.estimate(beside).seconds < plan.estimate(alone).seconds
    assert plan.efficiency(alone, 1) == 1 > plan.efficiency(alone) > 0
    scatter = dataclasses.replace(GPT, collectives=(Sent("reduce-scatter", 500_000_000, False, 0),))
    assert plan.estimate(scatter).links == pytest.approx(plan.estimate(alone).links / 2)


def test_the_text_says_memory_work_collectives_and_that_times_are_estimated() -> None:
    sent = (Sent("all-reduce", 4 * 2**20, False, 0), Sent("all-gather", 2**20, True, 3))
    text = str(plan_with(dataclasses.replace(GPT, collectives=sent), devices=8))
    assert "gpt of int32[1,16,513] (compiled in 7.0 s)" in text
    assert (
        "9.5 GiB of 98.5 GiB (JAX takes 75% of 131.3 GiB): 512.0 MiB trained variables, 1.0 GiB other state, 32.1 KiB arguments"
        in text
    )
    assert (
        "  sends        4.0 MiB in 1 all-reduce, while the device waits\n               1.0 MiB in 1 all-gather, while the "
        in text
    )
    last = dataclasses.replace(GPT, collectives=(Sent("all-reduce", 2**20, False, 1),))
    assert "while the device waits; it still has 1 matrix product to compute\n" in str(plan_with(last))
    assert "estimated    16" in text and "limited by memory" in text and "efficiency   1: 100%, 8:" in text


def test_a_program_that_does_not_fit_says_by_how_much() -> None:
    failure = "Ran out of memory on HBM, the total memory required (26.84G) exceeds available HBM (15.75G)."
    lost = dataclasses.replace(GPT, failure=failure, memory=Memory(7 * GIB, 15 * GIB, 0, 0, 0))
    plan = plan_with(lost, kind="TPU v5 lite", devices=8)
    assert not plan.fits(lost)
    assert plan.fits(GPT) and not plan.fits(dataclasses.replace(GPT, failure=failure))  # whatever its figures
    assert "it needs 26.84G of 15.75G: 7.0 GiB trained variables, 15.0 GiB other state" in str(plan)
    divided = dataclasses.replace(GPT, memory=Memory(GIB, 2 * GIB, 0, 0, 0, saved=21 * GIB))
    assert "in parts     saves 21.0 GiB of variables on each device" in str(plan_with(divided))
    large = dataclasses.replace(GPT, memory=Memory(7 * GIB, GIB, 0, 0, 80 * GIB))
    assert "it needs 88.0 GiB of 60.0 GiB (JAX takes 75% of 80.0 GiB)" in str(plan_with(large, kind="NVIDIA H100 80GB HBM3"))
    assert plan_with(GPT).fits(GPT)
    firsts = [
        str(made).splitlines()[0] for made in (plan_with(GPT), plan_with(GPT, large, kind="TPU v5 lite"), plan_with(kind="?"))
    ]
    unknown = "compiles (this kind of device has no known memory)"
    assert firsts == [f"{said}; plan for test" for said in ("fits", "does not fit: gpt", unknown)]


@pytest.mark.parametrize(
    ("name", "value", "usable"),
    [
        ("XLA_CLIENT_MEM_FRACTION", ".9", 72 * GIB),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5", 40 * GIB),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", 80 * GIB),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", 60 * GIB),
    ],
)
def test_a_gpu_has_what_jax_takes_of_its_memory(name: str, value: str, usable: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    chip, tpu = chip_of("NVIDIA H100 80GB HBM3"), chip_of("TPU v5 lite")
    assert chip is not None and chip.usable == usable
    assert tpu is not None and tpu.usable == tpu.memory and chip_of("?") is None


def test_a_plan_is_data_too() -> None:
    made = json.loads(json.dumps(plan_with(GPT, devices=8).as_dict()))
    [program] = made["programs"]
    assert program["memory"]["peak"] == GPT.memory.peak and program["estimate"]["seconds"] > 0
    assert set(program["efficiency"]) == {"1", "8", "64", "256"} and made["chip"]["name"] == "H200"
    assert "<pre>fits; plan for test" in plan_with(GPT)._repr_html_()


def test_an_unknown_device_has_no_estimates() -> None:
    plan = plan_with(GPT, kind="Some new chip")
    assert "estimated" not in str(plan) and "estimate" not in plan.as_dict()["programs"][0] and plan.fits(GPT)
    with pytest.raises(mr.PlanError, match="no rates are known"):
        plan.estimate(GPT)
