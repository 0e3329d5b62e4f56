"""One step on one process, against a hand-written torch loop: `python -m benchmarks.step [--rounds 5] [--steps 30]`.

Both sides compute the same: forward, backward, clip to norm 1, fused AdamW, on one thread, same batch.
"""

from __future__ import annotations

import dataclasses
import json

import torch
import tyro

from benchmarks.models import GPT, batch_of_tokens, cross_entropy, purestep_loop
from benchmarks.timing import interleave, report


@dataclasses.dataclass(frozen=True)
class Options:
    rounds: int = 5
    steps: int = 30
    threads: int = 1
    clip: bool = True


def hand_written(tokens: torch.Tensor, clip: bool):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model, tokens).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    tokens = batch_of_tokens()
    seconds = interleave(
        {
            "hand-written": hand_written(tokens, options.clip),
            "purestep donated": purestep_loop(tokens, clip=options.clip, donate=True),
            "purestep pure": purestep_loop(tokens, clip=options.clip, donate=False),
        },
        rounds=options.rounds,
        steps=options.steps,
    )
    print(f"GPT, 4 layers, width 128, batch 8 x 64, torch {torch.__version__}, {options.threads} thread(s)")
    print(json.dumps({name: round(ratio, 3) for name, ratio in report(seconds, "hand-written").items()}))


if __name__ == "__main__":
    main(tyro.cli(Options))
