"""`skip_nonfinite`: an update that is not taken when a gradient is infinite or NaN."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.functional.transforms import Leaves, Slots, global_norm
from purestep.functional.wrapping import Init, Update, Wrapper
from purestep.sharding.finiteness import all_finite, nonfinite_leaves
from purestep.state.names import some
from purestep.state.placement import local_tensor


class NonFiniteError(ArithmeticError):
    """Gradients were infinite or NaN, once more than allowed."""


@dataclass(frozen=True)
class skip_nonfinite(Wrapper):  # noqa: N801 - written and printed as a call
    """An optimizer that takes no update when an element of a gradient is infinite or NaN.

    All ranks decide alike. Then parameters, optimizer state and averages are the old ones bit for bit, and so, in
    `train_step`, are buffers; only the step counts. The metric `skipped` is 1.0 then, else 0.0. How many updates in a
    row were skipped is `opt_state/skip_nonfinite/in_a_row`, so it survives a resume. Each update waits for the device
    once.

    Put it around a whole chain: a clip makes NaN of every gradient.

    Args:
        optimizer: any, chains too.
        max_consecutive: how many updates in a row may be skipped; 0 to raise at the first.

    Raises:
        TypeError: something is no optimizer.
        ValueError: `max_consecutive` is no integer of at least 0.
        NonFiniteError: at an update past the limit: with the step and the first leaf that is not finite, on every rank.
            Nothing has been changed then.

    >>> import torch, purestep as ps
    >>> optimizer = ps.skip_nonfinite(ps.sgd(0.1), max_consecutive=1)
    >>> params, metrics = {"w": torch.ones(1)}, {}
    >>> opt_state, bad = optimizer.init(params), {"w": torch.tensor([torch.nan])}
    >>> params, opt_state = optimizer.update(bad, opt_state, params, step=0, metrics=metrics)
    >>> params["w"], metrics["skipped"], opt_state["skip_nonfinite"]
    (tensor([1.]), 1.0, {'in_a_row': tensor(1)})
    >>> optimizer.update(bad, opt_state, params, step=1)
    Traceback (most recent call last):
    ...
    purestep.functional.guarding.NonFiniteError: step 1: the gradient of 'w' is not finite, ...
    """

    _: KW_ONLY
    max_consecutive: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.max_consecutive
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"skip_nonfinite: max_consecutive must be an integer of at least 0, got {limit!r}")

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes."""
        return (*super().reports, "skipped")

    def wrapped_init(self, init: Init, params: Leaves) -> Slots:
        """The inner state, and the count of skips in a row."""
        device = next((local_tensor(leaf).device for leaf in params.values()), torch.device("cpu"))
        return self.with_own(init(params), {"in_a_row": torch.zeros((), dtype=torch.int64, device=device)})

    def wrapped_update(
        self,
        update: Update,
        grads: Leaves,
        opt_state: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool,
        metrics: dict[str, Any] | None,
    ) -> tuple[Leaves, Slots]:
        """The update, or what there was before it."""
        rest, own = self.own(opt_state)
        in_a_row = own["in_a_row"]
        is_finite = all_finite(grads)
        if is_finite:
            params, rest = update(grads, rest, params, step=step, inplace=inplace, metrics=metrics)
            count = in_a_row.zero_() if inplace else torch.zeros_like(in_a_row)
        else:
            self._refuse_past_limit(in_a_row, grads, step)
            if metrics is not None and "grad_norm" in super().reports:
                metrics.setdefault("grad_norm", global_norm(grads))
            count = in_a_row.add_(1) if inplace else in_a_row + 1
        if metrics is not None:
            metrics["skipped"] = float(not is_finite)
        return params, self.with_own(rest, {"in_a_row": count})

    def _refuse_past_limit(self, in_a_row: Tensor, grads: Leaves, step: int) -> None:
        skipped = int(in_a_row)
        if skipped < self.max_consecutive:
            return
        names = nonfinite_leaves(grads)
        others = f" (and those of {len(names) - 1} more)" if len(names) > 1 else ""
        before = f"after {skipped} skipped in a row" if skipped else "and none may be skipped"
        raise NonFiniteError(
            f"step {step}: the gradient of {some(names[:1])}{others} is not finite, {before} "
            f"(max_consecutive={self.max_consecutive}). Look at the batch of this step, lower the learning rate, or "
            "clip; the state before the step is unchanged"
        )
