"""Plans of the examples, kept in tests/golden as JSON, so that a change of what ranks hold or send is seen in review.

Write them anew, after a change that is meant, with `python -m tests.golden_plans`; then read the difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import purestep as ps

FOLDER = Path(__file__).parent / "golden"
TOPOLOGIES = {"local": (1, 1), "ddp2": (2, 1), "fsdp2x2": (1, 2), "fsdp2x4": (1, 4), "hsdp2x2": (2, 2)}


def build_lm() -> tuple[torch.nn.Module, Any, Any]:
    """Model, loss and optimizer of examples/lm.py at its default flags; the model on the meta device."""
    sys.path.insert(0, str(FOLDER.parent.parent / "examples"))
    try:
        import lm
        import lm_model
    finally:
        sys.path.pop(0)
    config, optimizer = lm.ModelConfig(), lm.OptimizerConfig()
    with torch.device("meta"):
        model = lm_model.GPT(layers=config.layers, heads=config.heads, width=config.width, dropout=config.dropout)
    chain = ps.chain(clip=ps.clip_by_global_norm(optimizer.clip), adamw=ps.adamw(optimizer.lr))
    return model, lm_model.loss, chain


def plan_of_lm(topology: str) -> ps.Plan:
    """The plan of examples/lm.py on a topology."""
    model, _, optimizer = build_lm()
    return model.sharding_spec.resolve(model, ps.Topology(*TOPOLOGIES[topology])).with_optimizer(optimizer)


def text_of(plan: ps.Plan) -> str:
    """A plan as JSON whose lines are as long as fits."""
    return _json(json.loads(json.dumps(plan.to_dict()))) + "\n"


def _json(value: Any, indent: str = "") -> str:
    line = json.dumps(value)
    if len(indent + line) <= 120 or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        parts, (start, end) = [f"{json.dumps(key)}: {_json(item, inner)}" for key, item in value.items()], "{}"
    else:
        parts, (start, end) = [_json(item, inner) for item in value], "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{end}"


def main() -> None:
    """Write every golden plan."""
    for name in TOPOLOGIES:
        path = FOLDER / f"lm-{name}.json"
        path.write_text(text_of(plan_of_lm(name)), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
