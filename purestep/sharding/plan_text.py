"""How a plan is written: a table for people, and the lines that a diff compares."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from purestep._sizes import size
from purestep.sharding.accounting import Account, UnitBytes, replicated
from purestep.sharding.plan import Plan, PlanParam, PlanUnit

_LEFT = ("unit", "class", "dtype", "reshard")
_SHOWN_LEAVES = 5  # of what is whole on every rank


def table(plan: Plan) -> str:
    """A plan as a page of text. Units that are alike but for a number in their path share a line."""
    account = plan.account()
    groups = _alike(plan, account)
    names = ["unit", "class", "units", "params", "dtype", *_byte_columns(plan)]
    names += ["reshard"] * plan.topology.is_sharded
    rows = [_row(plan, units) for units in groups]
    rows.append(_total(plan, account))
    columns = {name: [row.get(name, "") for row in rows] for name in names}
    return "\n".join([*_header(plan), "", *_aligned(columns), "", *_footer(plan, account)])


def diff(a: Plan, b: Plan) -> str:
    """A line diff of two plans; empty when they are equal."""
    return "\n".join(difflib.unified_diff(_lines(a), _lines(b), fromfile="self", tofile="other", lineterm="", n=1))


def _header(plan: Plan) -> list[str]:
    step = plan.step
    lines = [str(plan.topology)]
    if plan.source:
        lines.append(f"units from {plan.source}")
    if step.optimizer:
        lines.append(f"optimizer {step.optimizer}" + (", averaged parameters (EMA)" if step.ema else ""))
    if step.microbatches > 1:
        policy = f", gradients reduced as {step.policy} says" if plan.topology.is_sharded else ""
        lines.append(f"{step.microbatches} microbatches a step{policy}")
    return lines


def _byte_columns(plan: Plan) -> list[str]:
    shown = {
        "opt_state": bool(plan.step.optimizer),
        "ema": plan.step.ema,
        "gathered": plan.topology.is_sharded,
        "sent": plan.topology.world_size > 1,
    }
    return ["bytes/rank", "grads", *(name for name, is_shown in shown.items() if is_shown)]


def _alike(plan: Plan, account: Account) -> list[list[tuple[PlanUnit, UnitBytes]]]:
    """Units with their bytes, those that follow one another and differ only in a number of their path together."""
    groups: list[list[tuple[PlanUnit, UnitBytes]]] = []
    last = None
    for unit, num_bytes in zip(plan.units, account.units, strict=True):
        params = tuple((p.shape, p.dtype, p.trainable, p.ignored, p.slots) for p in unit.params)
        kind = (_pattern(unit.path), unit.module_class, params, unit.settings, unit.note, num_bytes)
        if kind != last:
            groups.append([])
        groups[-1].append((unit, num_bytes))
        last = kind
    return groups


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _row(plan: Plan, units: list[tuple[PlanUnit, UnitBytes]]) -> dict[str, str]:
    unit, num_bytes = units[0]
    path = unit.path or "(root)"
    reshard = unit.reshard_after_forward
    notes = [_dtypes(unit.params)]
    if plan.topology.is_sharded and unit.settings.param_dtype != "fp32":
        notes.append(f"as {unit.settings.param_dtype}")
    return {
        "unit": path if len(units) == 1 else f"{path} ... {units[-1][0].path}",
        "class": unit.module_class,
        "units": "" if len(units) == 1 else f"{len(units)} x",
        "params": f"{unit.numel:,}",
        "dtype": " ".join(notes),
        "bytes/rank": size(num_bytes.params) + (" host" if num_bytes.on_host else ""),
        "grads": size(num_bytes.grads),
        "opt_state": size(num_bytes.opt_state),
        "ema": size(num_bytes.ema),
        "gathered": size(num_bytes.gathered),
        "sent": size(num_bytes.traffic.total),
        "reshard": f"to {reshard}" if not isinstance(reshard, bool) else "yes" if reshard else "no",
    }


def _total(plan: Plan, account: Account) -> dict[str, str]:
    return {
        "unit": "total",
        "params": f"{sum(unit.numel for unit in plan.units):,}",
        "bytes/rank": size(account.params),
        "grads": size(account.grads),
        "opt_state": size(account.opt_state),
        "ema": size(account.ema),
        "gathered": f"peak {size(account.peak.gathered)}",
        "sent": size(account.sent),
    }


def _dtypes(params: Sequence[PlanParam]) -> str:
    return ", ".join(dict.fromkeys(param.dtype for param in params))


def _footer(plan: Plan, account: Account) -> list[str]:
    """What does not fit the columns."""
    kept = ["params", *(name for name in ("opt_state", "ema") if name in _byte_columns(plan)), "buffers"]
    parts = ", ".join(f"{name} {size(getattr(account, name))}" for name in kept)
    lines = [f"a rank keeps {size(account.kept)}: {parts}"]
    if account.on_host:
        lines.append(f"  {size(account.on_host)} of it on the host")
    without = "" if plan.step.optimizer else ", without an optimizer's state"
    lines.append(
        f"at the peak it holds {size(account.peak.bytes)}, activations not counted{without}: {account.peak.at}"
    )
    if plan.topology.world_size > 1:
        kinds = {
            "all-gather in forward": account.traffic.gather_forward,
            "in backward": account.traffic.gather_backward,
            "reduce-scatter": account.traffic.reduce_scatter,
            "all-reduce": account.traffic.all_reduce,
        }
        sent = ", ".join(f"{name} {size(num)}" for name, num in kinds.items() if num)
        lines.append(f"a step sends {size(account.sent)}" + (f": {sent}" if sent else ""))
    notes = dict.fromkeys(unit.note for unit in plan.units if unit.note)
    lines += [f"units that no rule names: {note}" for note in notes]
    whole = replicated(plan)
    if whole:
        named = ", ".join(f"{name} {size(num)}" for name, num in whole[:_SHOWN_LEAVES])
        more = f" and {len(whole) - _SHOWN_LEAVES} more" if len(whole) > _SHOWN_LEAVES else ""
        lines.append(f"whole on every rank: {named}{more}")
    return lines


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    align = [str.ljust if name in _LEFT else str.rjust for name in columns]
    return ["  ".join(f(c, w) for f, c, w in zip(align, line, widths, strict=True)).rstrip() for line in lines]


def _lines(plan: Plan) -> list[str]:
    """Everything a plan says, exact, a line each."""
    account, step = plan.account(), plan.step
    lines = [
        str(plan.topology),
        f"forward methods: {', '.join(plan.forward_methods) or 'forward only'}",
        f"units from {plan.source or 'the caller'}",
        f"optimizer {step.optimizer or 'not given'}{', EMA' if step.ema else ''}",
        f"microbatches {step.microbatches}, {step.policy}, DDP reduces in {step.ddp_reduce_dtype}",
        *(f"other state {leaf.name} {leaf.dtype}{list(leaf.shape)}" for leaf in step.other_slots),
    ]
    for unit, num_bytes in zip(plan.units, account.units, strict=True):
        lines.append(f"unit {unit.path or '(root)'} {unit.module_class} {unit.settings} shards={unit.shards}")
        lines += [f"  note {unit.note}"] * bool(unit.note)
        lines += [_param_line(param) for param in unit.params]
        lines.append(f"  bytes {_exact(num_bytes)}")
    for leaf in plan.buffers:
        lines.append(f"buffer {leaf.name} {leaf.dtype}{list(leaf.shape)}{'' if leaf.persistent else ' not persistent'}")
    totals = ("params", "grads", "opt_state", "ema", "buffers", "kept", "sent")
    lines.append("total " + " ".join(f"{name}={getattr(account, name)}" for name in totals))
    lines.append(f"peak {account.peak.bytes} ({account.peak.at}), gathered {account.peak.gathered}")
    return lines


def _exact(unit: UnitBytes) -> str:
    state = f"params={unit.params} grads={unit.grads} opt_state={unit.opt_state} ema={unit.ema}"
    return f"{state} gathered={unit.gathered} sent={unit.traffic.total}"


def _param_line(param: PlanParam) -> str:
    words = [f"  {param.name} {param.dtype}{list(param.shape)}"]
    words += ["frozen"] * (not param.trainable) + ["ignored"] * param.ignored
    words += [
        f"{slot.name}:{slot.dtype}{'' if slot.shape == param.shape else list(slot.shape)}" for slot in param.slots
    ]
    return " ".join(words)
