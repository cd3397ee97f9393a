"""Writes the facts of a run as one self-contained HTML page."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence

from .._html import Html, element, join, table
from .._text import bytes_in_words, counted
from . import pictures
from .facts import Facts

#: The page loads no fonts, scripts or images; its colours follow the reader's choice of light or dark.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2430; --quiet: #5b6675; --line: #d7dde5; --soft: #f3f6f9;
  --accent: #2b6cb0; --onaccent: #fff; --warn: #9a4b00; --good: #1d7044; }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --text: #e6eaf0; --quiet: #9aa6b5; --line: #333c49;
  --soft: #1d232c; --accent: #6ba7e5; --onaccent: #10151c; --warn: #f0a860; --good: #6fcf97; } }
* { box-sizing: border-box; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; } p { margin: .4rem 0; }
.quiet, caption { color: var(--quiet); font-size: .9rem; } .warn { color: var(--warn); } .good { color: var(--good); }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.2rem 0; }
.card { flex: 1 1 8rem; background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--quiet); font-size: .85rem; }
.wide { overflow-x: auto; } .wide + p { margin-top: 1.4rem; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; min-width: 4.5rem; }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; }
@media (max-width: 40rem) { th, td { padding-right: .35rem; min-width: 2.8rem; font-size: .75rem; } th { white-space: normal; }
  td:last-child { min-width: 4.2rem; } td:last-child, td code { overflow-wrap: anywhere; } }
.picture { max-width: 40rem; margin: .6rem 0 1.2rem; }
.part, .bus { background: var(--accent); color: var(--onaccent); border-radius: 5px; }
.worker { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .8rem .8rem; margin: .5rem 0; color: var(--quiet); }
.worker .cards { margin: .3rem 0 0; } .worker .card { flex: 0 1 8rem; color: var(--text); } .worker b { font-size: 1rem; }
.bus { padding: .3rem .8rem; margin: .5rem 0; } .split { display: flex; gap: 2px; margin: .2rem 0; }
.split .part { overflow: hidden; height: 2rem; line-height: 2rem; text-indent: .5rem; }
.label { display: flex; justify-content: space-between; margin-top: .4rem; }
.rest { background: var(--soft); border-radius: 5px; } .rest .part { height: .6rem; min-width: 1px; }
"""
_MAX_VARIABLES = 20
_NO_PROFILE = "To see what the devices do in that time, write with mr.profile('run/profile'): around some steps."
_COUNTED = "Waiting for other replicas inside a collective is communication; a collective that runs beside computation is not."


def page(facts: Facts, workers: Sequence[Facts] = ()) -> Html:
    """Write the whole page; given the facts of several workers, show each worker's time."""
    count = len(facts.replicas)
    title = f"{facts.title}: {counted(count, 'replica')}"
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.taken))
    planned = {"Plan": element("pre", facts.plan)} if facts.plan else {}
    times = [_steps(facts), _profiled(facts)]
    if len(workers) > 1:
        times = [_steps_of_all(workers), _profiles(workers)]
    sections = planned | {
        "Devices": _devices(facts),
        "Data": _data(facts),
        "Programs": _programs(facts),
        "Time": join(times),
        "Communication": _communication(facts),
        "Memory": _memory(facts),
        "Copies": _copies(facts),
        "Warnings": _warnings(facts),
    }
    body = join([
        element("h1", title),
        element("p", f"{taken} · {facts.versions}", class_="quiet"),
        _cards(facts),
        *[element("section", join([element("h2", name), content])) for name, content in sections.items()],
    ])  # fmt: skip
    head = join([
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Html(STYLE)),
    ])  # fmt: skip
    return Html(f'<!DOCTYPE html>\n<html lang="en">{element("head", head)}{element("body", body)}</html>\n')


def _quiet(text: str) -> Html:
    return element("p", text, class_="quiet")


def _table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    return element("div", table(headings, rows), class_="wide")


def _cards(facts: Facts) -> Html:
    known = {
        "replicas": len(facts.replicas),
        "workers": facts.num_workers,
        "programs": len(facts.programs),
        "variables": len(facts.variables),
        "of variables on each device": bytes_in_words(sum(state.num_bytes for state in facts.variables)),
        "warnings": len(facts.warnings),
    }
    cards = [
        join([element("b", value), element("span", name.removesuffix("s") if value == 1 else name)])
        for name, value in known.items()
    ]
    return element("div", join(element("div", card, class_="card") for card in cards), class_="cards")


def _devices(facts: Facts) -> Html:
    kinds = ", ".join(dict.fromkeys(replica.kind for replica in facts.replicas))
    way = f" Replicas add up by {facts.adds_up_by}." if facts.adds_up_by else ""
    return join([_quiet(f"Devices of kind {kinds}.{way}"), pictures.topology(facts.replicas)])


def _data(facts: Facts) -> Html:
    if not facts.datasets:
        return _quiet("No dataset of this strategy is in use.")
    parts: list[Html] = []
    for dataset in facts.datasets:
        parts.append(element("p", join([element("b", dataset.name), ": ", dataset.how, "."])))
        parts.append(pictures.split(dataset.num_rows, len(facts.replicas)))
    return join(parts)


def _programs(facts: Facts) -> Html:
    if not facts.programs:
        return _quiet("No program was compiled yet. A step is compiled when strategy.run first calls it.")
    rows = [(element("code", p.name), p.num_written, p.num_read, p.cause or "first call of the function") for p in facts.programs]
    return _table(("function", "writes", "only reads", "compiled because"), rows)


def _profiled(facts: Facts) -> Html:
    """Show what the last profile says of the devices' time."""
    found = facts.profiled
    if found is None:
        return _quiet(_NO_PROFILE)
    source = join([f"profile of {counted(found.num_steps, 'step')} in ", element("code", found.folder)])
    if not (shares := found.shares()):
        return element("p", join(["What the devices did is unknown (", source, "): ", found.reason, "."]), class_="warn")
    note = join([f"What {counted(found.num_devices, 'device')} did while they worked (", source, f"). {_COUNTED}"])
    kinds = {f"of it {kind}": share for kind, share in found.kinds().items()}
    if len(kinds) > 1:
        shares |= kinds
    return join([element("p", note, class_="quiet"), pictures.shares(shares)])


def _steps(facts: Facts) -> Html:
    compiled = _quiet(f"{counted(facts.num_compiled, 'compilation')} of steps: {facts.compile_seconds:.3g} s.")
    if not facts.shares:
        return join([compiled, _quiet("Too few steps of strategy.run were taken to say where their time goes.")])
    steps = f"The last {counted(facts.num_steps, 'step')} of strategy.run, with a median of {1e3 * facts.step_seconds:.3g} ms"
    note = (
        ", without compilations. The loop waits for devices when it is ahead of them; between the steps is the time of your own "
        "program, and of results that it reads."
    )
    return join([compiled, _quiet(steps + note), pictures.shares(facts.shares)])


def _steps_of_all(workers: Sequence[Facts]) -> Html:
    """Show the workers' steps side by side, so that readers find the worker that delays the others."""
    names = list(dict.fromkeys(name for facts in workers for name in facts.shares))
    rows = [
        [f.worker, f.num_steps, f"{1e3 * f.step_seconds:.3g} ms", f"{f.compile_seconds:.3g} s"]
        + [f"{f.shares[name]:.0%}" if f.shares else "" for name in names]
        for f in workers
    ]
    note = (
        "The last steps of strategy.run, without compilations. Workers take their steps together, so look for the one that "
        "waits least."
    )
    return join([_quiet(note), _table(("worker", "steps", "median", "compilations", *names), rows)])


def _profiles(workers: Sequence[Facts]) -> Html:
    """Show the profiles of several workers, side by side."""
    found = [(facts.worker, work) for facts in workers if (work := facts.profiled) is not None]
    if not found:
        return _quiet(_NO_PROFILE)
    rows = [
        (worker, work.num_steps, *([f"{share:.0%}" for share in work.shares().values()] or ["", ""]), work.reason or work.folder)
        for worker, work in found
    ]
    note = f"What the devices of each worker did while they worked, by its last profile. {_COUNTED}"
    return join([_quiet(note), _table(("worker", "steps", "computation", "communication", "profile"), rows)])


def _communication(facts: Facts) -> Html:
    rows = collections.Counter((program.name, exchange) for program in facts.programs for exchange in program.exchanges)
    if not rows:
        return _quiet("No program communicates.")
    cells = [
        (element("code", name), e.name, e.count, bytes_in_words(e.num_bytes), programs, e.where)
        for (name, e), programs in rows.items()
    ]
    listed = _table(("function", "collective", "how many", "bytes of each replica", "programs", "line"), cells)
    largest = sorted(rows, key=lambda row: -row[1].num_bytes)[:8]
    drawn = pictures.bars([(f"{name}: {e.name}", e.num_bytes, None) for name, e in largest])
    return join([_quiet("What one run of each program exchanges; a collective in a loop is counted once."), drawn, listed])


def _memory(facts: Facts) -> Html:
    total = sum(state.num_bytes for state in facts.variables)
    telling = [replica for replica in facts.replicas if replica.in_use is not None]
    if telling:
        note = f"In use on each device, by everything in it; the variables take {bytes_in_words(total)} of it."
    elif facts.variables:
        note = "These devices do not say how much memory is in use. The variables take, on each:"
    else:
        return _quiet("There are no variables.")
    shown = (telling or facts.replicas)[: pictures.MAX_DEVICES]
    rows = [(f"replica {r.number}, {r.device}", total if r.in_use is None else r.in_use, r.limit) for r in shown]
    largest = sorted(facts.variables, key=lambda state: -state.num_bytes)[:_MAX_VARIABLES]
    kinds = {True: "sync-on-read", False: "mirrored"}
    named = {v: f"{kinds[v.is_on_read]} {v.division}".strip() for v in largest}
    cells = [(element("code", v.name), str(v.shape), v.dtype, bytes_in_words(v.num_bytes), kind) for v, kind in named.items()]
    listed = _table(("variable", "shape", "dtype", "bytes on each device", "kind"), cells)
    left = len(facts.variables) - len(largest)
    rest = [_quiet(f"and {counted(left, 'smaller variable')}.")] * bool(left)
    return join([_quiet(note), pictures.bars(rows), *[listed] * bool(cells), *rest])


def _copies(facts: Facts) -> Html:
    if len(facts.replicas) == 1:
        return _quiet("There is one replica, so there are no copies to compare.")
    last = facts.comparison
    if last is None:
        return _quiet("The copies were not compared yet. strategy.assert_mirrored() compares them now.")
    when = f"Compared {max(facts.taken - last.ended, 0.0):.0f} s before this page was made, in {last.seconds * 1e3:.1f} ms."
    if last.difference:
        return join([element("p", last.difference, class_="warn"), _quiet(when)])
    what = f"All copies of {counted(last.num_variables, 'mirrored variable')} that were compared are equal."
    return join([element("p", what, class_="good"), _quiet(when)])


def _warnings(facts: Facts) -> Html:
    if not facts.warnings:
        return _quiet("None.")
    parts = []
    for message, count in facts.warnings:
        times = element("span", f" ({count} times)", class_="quiet") if count > 1 else ""
        parts.append(element("p", join([message, times]), class_="warn"))
    return join(parts)
