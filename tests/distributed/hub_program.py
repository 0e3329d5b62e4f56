"""Loads weights from the Hub: python hub_program.py '[[REPO, OPTIONS], ...]'; prints what came of each request."""

from __future__ import annotations

import json
import sys
import traceback

import torch

import purestep as ps


def main(requests: str) -> None:
    said = []
    with ps.start(ps.ParallelismConfig(-1), ps.AcceleratorConfig(device="cpu")) as runtime:
        module = ps.shard(torch.nn.Linear(4, 2), runtime=runtime)
        for repo, options in json.loads(requests):
            try:
                params, _ = ps.load_params(module, repo, **options)
                said.append({"weight": params["weight"].tolist(), "bias": params["bias"].tolist()})
            except ps.CheckpointError as error:
                said.append({"error": str(error), "trace": traceback.format_exc()})
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
