"""Which kernels ran is known, and a change of them is told."""

import torch

import purestep as ps
from purestep.functional import implementation_change, implementations

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}


def test_each_part_that_can_choose_says_what_it_chose():
    muon = ps.muon(0.1, owns=("w",), companion=ps.adamw(0.1, implementation="for-loop"))
    inner = ps.chain(clip=ps.clip_by_global_norm(1.0), last=ps.sgd(0.1, implementation="foreach"))
    cases = [
        (ps.adamw(0.1), {"adamw": "fused"}),
        (ps.adamw(0.1, implementation="for-loop"), {"adamw": "for-loop"}),
        (ps.lion(0.1), {"lion": "foreach"}),
        (ps.adafactor(), {"adafactor": "for-loop"}),
        (muon, {"muon/adamw": "for-loop"}),
        (ps.chain(clip=ps.clip_by_global_norm(1.0), all=muon), {"all/adamw": "for-loop"}),
        (ps.chain(outer=inner), {"outer/last": "foreach"}),
        (ps.from_torch(torch.optim.AdamW, fused=True), {"AdamW": "fused"}),
        (ps.from_torch(torch.optim.AdamW, foreach=False), {"AdamW": "for-loop"}),
        (ps.from_torch(torch.optim.AdamW), {"AdamW": "default (cpu)"}),
    ]
    for optimizer, wanted in cases:
        assert implementations(optimizer, PARAMS) == wanted


def test_auto_depends_on_the_parameters():
    assert implementations(ps.adamw(0.1), {"w": torch.ones(2, dtype=torch.complex64)}) == {"adamw": "foreach"}


def test_only_a_change_is_told():
    saved = implementations(ps.adamw(0.1), PARAMS)
    now = implementations(ps.adamw(0.1, implementation="foreach"), PARAMS)
    assert "(adamw: 'fused' -> 'foreach'): results will differ in the last bits" in implementation_change(saved, now)
    assert implementation_change(saved, saved) is None
    assert implementation_change(None, now) is None
    assert implementation_change({}, now) is None  # another optimizer is not another implementation
