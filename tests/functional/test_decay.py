"""Decay masks: which parameters, and torch's numbers with two param groups bit for bit."""

import pytest
import torch
from torch import nn

import purestep as ps
from tests.functional.test_param_rules import GainNorm


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.lora_a, self.lora_b = nn.ParameterDict({"main": torch.ones(2, 3)}), nn.Parameter(torch.ones(3, 2))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])


class NormalizingFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.ones(2, 2))


class MyEmbedding(Rotary):
    pass


class LlamaLikeRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3))  # with dims to broadcast over


class Odd(nn.Module):
    """Every kind of parameter a model can have."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.bag = nn.EmbeddingBag(4, 3)
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 3))
        self.linear = nn.Linear(3, 3)
        self.one_output = nn.Linear(3, 1)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.RMSNorm(3), nn.BatchNorm1d(3), LlamaLikeRMSNorm(), GainNorm()]
        )
        self.low_rank = LowRank()
        self.flow = NormalizingFlow()
        self.mine, self.rotary = MyEmbedding(), Rotary()
        self.loose = nn.ParameterList([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
        self.attention = nn.MultiheadAttention(3, 1, bias=True)
        self.prelu = nn.PReLU()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight
        self.normal = nn.Parameter(torch.ones(2, 2))  # a name that only sounds like a norm


DECAYS = {
    "linear.weight",
    "one_output.weight",  # one row, and yet a matrix
    "conv.weight",
    "low_rank.base.weight",
    "low_rank.lora_a.main",
    "low_rank.lora_b",
    "flow.mixing",  # of a class that only sounds like a norm
    "rotary.tables.0",
    "loose.0",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "normal",
}


def decaying(mask, model):
    """Which parameters an update with zero gradients changes."""
    params = {name: torch.ones_like(leaf) for name, leaf in model.named_parameters()}
    grads = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    new, _ = mask.update(grads, mask.init(params), params, step=0)
    return {name for name, leaf in new.items() if not torch.equal(leaf, params[name])}


@pytest.mark.parametrize("make", [ps.adamw, ps.sgd], ids=["adamw", "sgd"])
def test_no_decay_on_vectors_norms_and_embeddings(make):
    model = Odd()
    assert decaying(ps.decay_mask(make(0.1, weight_decay=0.1), model), model) == DECAYS
    everything = {name for name, _ in model.named_parameters()}
    assert decaying(make(0.1, weight_decay=0.1), model) == everything


def test_the_module_may_be_on_meta_or_sharded():
    with torch.device("meta"):
        abstract = Odd()
    for model in (abstract, ps.shard(Odd())):
        assert decaying(ps.decay_mask(ps.adamw(0.1), model), Odd()) == DECAYS


def test_rules_of_ones_own():
    model, optimizer = Odd(), ps.adamw(0.1)
    more = ps.decay_mask(optimizer, model, no_decay=(*ps.NO_DECAY, "low_rank.**"), decay=("wte.*", "PReLU"))
    names = {name for name in DECAYS if not name.startswith("low_rank")}
    assert decaying(more, model) == names | {"wte.weight", "prelu.weight"}
    assert decaying(ps.decay_mask(optimizer, model, no_decay="**.bias"), model) == {
        name for name, _ in model.named_parameters() if not name.endswith(".bias")
    }
    assert decaying(ps.decay_mask(optimizer, model, no_decay=()), model) == {n for n, _ in model.named_parameters()}


def test_the_table_can_be_printed():
    rows = [line.split() for line in ps.decay_mask(ps.adamw(0.1), Odd()).describe().splitlines()]
    table = {row[0]: row[1:] for row in rows}
    assert len(table) == 1 + len(dict(Odd().named_parameters()))
    assert table["wte.weight"] == ["5x3", "Embedding", "no", "decay", "of", "an", "embedding"]
    assert table["linear.weight"] == ["3x3", "Linear", "decay", "-"]
    assert table["temperature"] == ["scalar", "Odd", "no", "decay", "fewer", "than", "two", "dims"]
    assert table["norms.4.scale"] == ["1x3", "LlamaLikeRMSNorm", "no", "decay", "of", "a", "norm"]
    assert {name for name, row in table.items() if "no" not in row} - {"parameter"} == DECAYS


TORCH = {
    "adamw": (ps.adamw, torch.optim.AdamW, {}),
    "adam amsgrad": (ps.adam, torch.optim.Adam, {"amsgrad": True}),
    "sgd": (ps.sgd, torch.optim.SGD, {}),
    "sgd momentum": (ps.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "adagrad": (ps.adagrad, torch.optim.Adagrad, {}),
    "rmsprop": (ps.rmsprop, torch.optim.RMSprop, {}),
}
FUSED = {"adamw", "adam amsgrad", "sgd", "sgd momentum", "adagrad"}


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize(
    ("case", "implementation"),
    [(c, i) for c in TORCH for i in ("fused", "foreach", "for-loop") if i != "fused" or c in FUSED],
)
def test_the_numbers_are_those_of_two_torch_param_groups(case, implementation, inplace):
    ours, theirs, arguments = TORCH[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    mask = ps.decay_mask(ours(0.1, weight_decay=0.1, implementation=implementation, **arguments), model)
    params = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    spared = [leaf for name, leaf in model.named_parameters() if name not in ("1.weight", "3.weight")]
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}[implementation]
    reference = theirs(
        [{"params": [model[1].weight, model[3].weight]}, {"params": spared, "weight_decay": 0.0}],
        lr=0.1,
        weight_decay=0.1,
        **flags,
        **arguments,
    )
    opt_state = mask.init(params)
    for step in range(4):
        grads = {name: torch.randn_like(leaf) for name, leaf in params.items()}
        for name, leaf in model.named_parameters():
            leaf.grad = grads[name].clone()
        reference.step()
        params, opt_state = mask.update(grads, opt_state, params, step=step, inplace=inplace)
        for name, leaf in model.named_parameters():
            assert torch.equal(params[name], leaf), (step, name)


def test_the_state_is_that_of_the_optimizer_alone():
    model = Odd()
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    bare, masked = ps.adamw(0.1), ps.decay_mask(ps.adamw(0.1), model)
    for left, right in (
        (bare, masked),
        (ps.chain(main=bare), ps.chain(main=masked)),
        (ps.chain(main=bare), ps.chain(clip=ps.clip_by_global_norm(1.0), main=masked)),
    ):
        assert [list(slots) for slots in left.init(params).values()] == [list(s) for s in right.init(params).values()]
        assert list(left.init(params)) == list(right.init(params))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.decay_mask(ps.adamw(0.1), None), TypeError, "decay_mask needs the model"),
        (lambda: ps.decay_mask(ps.lookahead(ps.adamw(0.1)), Odd()), TypeError, "lookahead has none; put it around the"),
        (lambda: ps.decay_mask(ps.chain(a=ps.adamw(0.1)), Odd()), TypeError, "chain has none"),
        (lambda: ps.decay_mask(ps.adamw, Odd()), TypeError, "decay_mask goes around an optimizer"),
        (
            lambda: ps.decay_mask(ps.adamw(0.1), Odd(), no_decay=(*ps.NO_DECAY, "haed.*")),
            ValueError,
            r"no parameter is taken by the rule 'haed\.\*'; the parameters are 'pos_embed'",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_default_rules_need_not_take_anything():
    model = nn.Linear(2, 2, bias=False)  # neither vectors, nor norms, nor embeddings
    assert decaying(ps.decay_mask(ps.adamw(0.1), model), model) == {"weight"}
