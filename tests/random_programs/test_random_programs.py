"""The generator itself: a seed is a program, all of the grammar is used, and what is wrong is found."""

import contextlib
import re
from collections import Counter
from typing import Any

import jax
import pytest
from parameters import nightly
from random_programs import lockstep
from random_programs.grammar import LIBRARIES, MAPS, SMALL_MAPS, TRANSFORMATIONS, Program
from random_programs.harness import (
    CALLS,
    PLACES,
    Outcome,
    Way,
    alone,
    check,
    executed,
    follow,
    judge,
    judge_without_casts,
    ways_of,
)
from random_programs.run import report

#: What further programs must have.
WORDS = """
    checkpoint fori_loop while_loop switch vmap associative_scan stop_gradient ys.mean weighted_mean minimize psum ema mr.cond
    rows.scan rows.cond rows.fori_loop so_far total=total global_batch_size=total bfloat16), EQX_NORM linen.BatchNorm
    nnx.Optimizer carry['tx'] right.assign_add last.assign follow
"""
#: Words of a step that is right -> words that damage it, and how it must end then.
DAMAGES = {
    "mr.losses.compute_average_loss(l)": ("mr.losses.already_divided(l.mean())", {"wrong"}),
    "rows = replicas": ("rows = batch", {"wrong", "refused"}),
    "dropout(h, k, b['id'])": ("dropout(h, k, jnp.arange(h.shape[0]))", {"wrong"}),
    "optimizer.apply_gradients(gradients)": ("optimizer.apply_gradients(jax.tree.map(lambda g: 0.5 * g, gradients))", {"wrong"}),
    "average.assign(0.9 * average": ("average.assign(0.8 * average", {"wrong"}),
    "b['weight']), (h, aux)": ("b['weight'] ** 2), (h, aux)", {"wrong"}),
    "return l + penalty, (h": ("return l + 50 * penalty, (h", {"wrong"}),
    "v[name].assign(new)": ("v[name].assign(0.5 * new)", {"wrong"}),
    "return mr.losses.mean_over_own_rows(l.mean())": ("return l.mean()", {"wrong", "warned"}),
}


def test_a_seed_is_a_program() -> None:
    assert Program(7).text == Program(7).text != Program(8).text
    assert ways_of(Program(7)) == ways_of(Program(7))


def test_all_of_the_grammar_is_used() -> None:
    programs = [Program(seed) for seed in range(600)]
    text = "\n".join(program.text for program in programs)
    last = lambda pattern: max(re.split(r"\{[hw]\}", pattern), key=len)  # noqa: E731  (of a map, its longest part)
    libraries = [re.split(r"\{\w\}", pattern.replace("{{", "{").replace("}}", "}"))[0] for pattern in LIBRARIES]
    assert [pattern for pattern in (*map(last, MAPS + SMALL_MAPS), *libraries, *TRANSFORMATIONS) if pattern not in text] == []
    assert [word for word in WORDS.split() if word not in text] == []
    names = [set().union(*(way.names() for way in ways_of(program))) for program in programs[:300]]
    counts = Counter(re.sub(r" with \d", "", name) for chosen in names for name in chosen)
    possible = {f"{place.name}, {call}, even" for place in PLACES for call in CALLS}
    possible |= {f"{place.name}, {call}, odd" for place in PLACES[1:] for call in CALLS[:2]}
    assert set(counts) == possible and min(counts.values()) > 5
    assert min(map(len, names)) == 3


@pytest.mark.slow
def test_programs_are_those_of_one_device() -> None:
    outcomes = check(1)
    assert len(outcomes) >= 3 and {outcome.kind for _, _, outcome in outcomes} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "jit"), [*((old, lockstep.jit) for old in DAMAGES), *nightly(("rows = replicas", jax.jit))])
def test_a_damaged_step_is_found(old: str, jit: Any) -> None:
    new, kinds = DAMAGES[old]

    def is_simple(p: Program) -> bool:
        return old in p.text and ("rows." in p.text or "replicas" not in old) and not ("stop_gradient" in p.text or p.is_small)

    program = next(program for program in map(Program, range(1000)) if is_simple(program))
    way = Way("R2", 2)
    right = alone(executed(program.seed, program.text), way.sizes, jit)
    with lockstep.patched() if jit is lockstep.jit else contextlib.nullcontext():
        outcome = judge(program, executed(program.seed, program.text.replace(old, new)), way, right)
    assert outcome.kind in kinds, (program.text, outcome)


@pytest.mark.slow
def test_a_refusal_counts_as_one_if_the_line_that_it_says_works() -> None:
    way, own = Way("R3", 3, sizes=(2, 2)), "mr.losses.mean_over_own_rows(l.mean())"
    program = next(p for p in map(Program, range(1000)) if own in p.text and "rows.gather" in p.text)
    right = alone(executed(program.seed, program.text), way.sizes, lockstep.jit)
    with lockstep.patched():
        outcome = judge(program, executed(program.seed, program.text), way, right)
        assert outcome.kind == "refused"
        assert follow(program, way, right, outcome) == outcome
        assert follow(program, way, right, Outcome("refused", "ValueError: no")).kind == "stuck"
        program.text = program.text.replace("b['y']", "(b['y'] + 1)").replace("b['x'] @", "b['x'] * 2 @")
        assert follow(program, way, right, outcome).kind == "stuck"


@pytest.mark.slow
def test_a_program_of_16_bits_is_wrong_only_if_it_is_so_in_32() -> None:
    way, old = Way("R2", 2), "optimizer.apply_gradients(gradients)"
    program = next(p for p in map(Program, range(1000)) if p.is_small and old in p.text and "bfloat16)" in p.text)
    with lockstep.patched():
        assert judge_without_casts(program, way, lockstep.jit).kind == "ok"
        program.text = program.text.replace(*next((o, n) for o, (n, _) in DAMAGES.items() if o == old))
        assert judge_without_casts(program, way, lockstep.jit).kind == "wrong"


def test_the_report_fails_for_what_is_wrong_and_for_too_many_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    fine = [(seed, "R1", Outcome("ok")) for seed in range(99)]
    assert report(fine, 1.0) == 0
    assert report([*fine, (99, "R1", Outcome("refused", "ValueError: (3,)"))], 1.0) == 0
    assert "refused 1 times, first: seed 99, R1: ValueError: (3,)" in capsys.readouterr().out
    assert report([*fine, *((99 + i, "R1", Outcome("refused", "ValueError")) for i in range(3))], 1.0) == 1
    assert report([*fine, (99, "R2", Outcome("wrong"))], 1.0) == 1
    assert "--seed 99" in capsys.readouterr().out
