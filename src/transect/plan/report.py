"""A serving plan in words, and as JSON with the keys of ``bench serve``."""

from __future__ import annotations

from typing import Any

from .serving import GROWTH, LEAST_RATE, Estimated, FleetPlan, SimulatedChoice, levels

NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
SHARES = (50, 90, 99)


def lines(plan: FleetPlan, title: str, top: int = 8) -> list[str]:
    """Return the plan as lines of text."""
    best = plan.answers[0]
    found = [title, f"target: {plan.target}", ""]
    found += _table(plan)
    found += ["", f"best: {_needs(best)}", *("  " + line for line in _about(plan, best))]
    for other in plan.answers[1:]:
        found.append(f"next: {_needs(other)}; {_difference(plan, best, other)}")
    if plan.estimated:
        found += ["", "by arithmetic alone:"]
        found += [f"  {_arithmetic(each)}" for each in plan.estimated[:top]]
    seen: dict[str, str] = {}
    for choice, why in plan.refused:
        seen.setdefault(why, str(choice))
    found += [f"impossible: {choice}: {why}" for why, choice in list(seen.items())[:3]]
    return found


def _table(plan: FleetPlan) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("cards", "engines", "req/s", "most/engine", *(f"{NAMES[n]} p{s}" for n in NAMES for s in SHARES), "KV", "hits",
         "$/h", "$/M out", "J/token", "choice")
    ]  # fmt: skip
    for each in plan.answers:
        summary, cost = each.level.summary, plan.cost(each)
        cells = [str(each.cards), str(each.engines), f"{each.rate:.1f}", f"{each.most.rate:.2f}"]
        cells += [_time(summary[name][f"p{share}"]) for name in NAMES for share in SHARES]
        cells += [f"{summary['kv_usage']['max']:.0%}", f"{summary['prefix_hit_share']:.0%}"]
        cells += [_money(cost.get("dollars_per_hour")), _money(cost.get("dollars_per_million_output_tokens"))]
        cells += [f"{cost['joules_per_output_token']:.2f}" if cost["joules_per_output_token"] else "-"]
        rows.append((*cells, each.choice.card.name + ", " + each.choice.how))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _needs(answer: SimulatedChoice) -> str:
    engines = f"{answer.engines} engine{'s' if answer.engines > 1 else ''}"
    return f"{answer.cards} x {answer.choice.card.name} as {engines} of {answer.choice.how}"


def _about(plan: FleetPlan, answer: SimulatedChoice) -> list[str]:
    summary, choice = answer.level.summary, answer.choice
    total = sum(answer.parts.values())
    parts = sorted(answer.parts.items(), key=lambda part: -part[1])[:4]
    found = [
        f"one engine keeps the target up to {answer.most.rate:.2f} requests/s; above, {_missed(answer.missed)} fails: "
        f"{answer.cause}",
        f"a step takes {_time(total)} on average: " + ", ".join(f"{name} {part / total:.0%}" for name, part in parts),
        f"KV cache of an engine: {choice.kv_tokens:,} tokens, {summary['kv_usage']['mean']:.0%} used on average",
    ]
    cost = plan.cost(answer)
    if "dollars_per_user_hour" in cost:
        found.append(f"${cost['dollars_per_user_hour']:.4f} for a user and hour")
    if answer.breaks:
        found.append(
            f"at {GROWTH:g} times the load {_missed(answer.breaks)} breaks first "
            f"({_figure(answer.grown.summary, answer.breaks[0])}): {answer.breaks_cause}"
        )
    else:
        found.append(f"at {GROWTH:g} times the load the target is still kept")
    return found


def _missed(names: list[str]) -> str:
    return names[0].replace(".", " ") if names else "nothing"


def _figure(summary: dict[str, Any], name: str) -> str:
    what, share = name.split(".")
    return _time(summary[what][share])


def _difference(plan: FleetPlan, best: SimulatedChoice, other: SimulatedChoice) -> str:
    costs = [plan.cost(each).get("dollars_per_hour") for each in (best, other)]
    if costs[0] and costs[1]:
        more = f"{costs[1] / costs[0] - 1:+.0%} dollars"
    else:
        more = f"{other.cards - best.cards:+d} cards"
    return f"{more}; bound by {_missed(other.missed)}: {other.cause}"


def _arithmetic(each: Estimated) -> str:
    if each.rate < LEAST_RATE:
        return f"{each.choice}: misses the target at any rate"
    what = f"{each.cards} x {each.choice.card.name}, {each.choice.how}"
    return f"{what}: {each.rate:.2f} requests/s an engine, bound by {each.bound}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _money(dollars: float | None) -> str:
    return "-" if dollars is None else f"{dollars:.2f}"


def as_json(plan: FleetPlan, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as plain values: ``settings`` and ``levels`` as ``bench serve`` has them, the levels of the best
    choice, its load first; ``choices`` and what else there is."""
    best = plan.answers[0]
    return {
        "settings": settings | {"target": str(plan.target)},
        "levels": levels(best),
        "choices": [_json(plan, answer) for answer in plan.answers],
        "by_arithmetic": [
            {"choice": str(each.choice), "cards": each.cards, "engines": each.engines, "rate": each.rate,
             "bound": each.bound}
            for each in plan.estimated
        ],
        "refused": [{"choice": str(choice), "why": why} for choice, why in plan.refused],
    }  # fmt: skip


def _json(plan: FleetPlan, answer: SimulatedChoice) -> dict[str, Any]:
    choice = answer.choice
    return {
        "choice": str(choice),
        "gpu": choice.card.name,
        "cards": answer.cards,
        "engines": answer.engines,
        "tensor_parallel_size": choice.layout.tensor,
        "pipeline_parallel_size": choice.layout.pipeline,
        "data_parallel_size": answer.engines,
        "quantization": choice.weights,
        "kv_cache_dtype": choice.cache,
        "kv_cache_tokens": choice.kv_tokens,
        "requests_per_second": answer.rate,
        "most_requests_per_second_of_an_engine": answer.most.rate,
        "missed_above": answer.missed,
        "bound_by": answer.cause,
        "step_seconds": dict(answer.parts),
        "cost": plan.cost(answer),
        "load_grown_by_half": {
            "breaks": answer.breaks, "cause": answer.breaks_cause,
            **{name: answer.grown.summary[name] for name in ("ttft", "itl", "e2e")},
        },
        "level": {"load": answer.level.rate, "load_unit": "requests/s", **answer.level.summary},
    }  # fmt: skip
