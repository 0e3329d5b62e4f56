"""Rules about parameters: what they take, in which order, and what is said about those that take nothing."""

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.param_rules import Groups, labelled, param_table


class GainNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(2, 2)) for _ in range(2)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.gain = GainNorm()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))


def leaves(model=None):
    return {param.name: torch.empty(param.shape) for param in param_table(model or Model()).params}


def taken(rule, module=None):
    groups = Groups((("it", (rule,)),), param_table(module))
    return set(groups.split(leaves(), leaves())["it"])


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("blocks.*", set()),  # a star stays between two dots
        ("blocks.0.*.bias", {"blocks.0.0.bias", "blocks.0.1.bias"}),
        ("**.bias", {f"blocks.{i}.{j}.bias" for i in range(2) for j in range(2)}),
        ("gain.gains.?", {"gain.gains.0", "gain.gains.1"}),
        ("temperature", {"temperature"}),
        ("head.weight", {"embed.weight"}),  # a tied weight answers to all its names
        ("Linear", {"blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight", "blocks.1.0.bias", "embed.weight"}),
        ("Embedding", {"embed.weight"}),
        ("GainNorm", {"gain.gains.0", "gain.gains.1"}),  # through the list
        ("ParameterList", {"gain.gains.0", "gain.gains.1"}),
        ("Model", {"temperature"}),
        ("Module", set()),
        (lambda param: param.ndim == 0, {"temperature"}),
        (lambda param: param.shape == (4, 4), {"blocks.0.0.weight", "blocks.1.0.weight"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_rule_takes(rule, wanted):
    assert taken(rule, Model()) == wanted
    assert taken(rule, ps.shard(Model())) == wanted


def test_inherited_classes_count():
    class Mine(nn.Linear):
        pass

    assert [p.classes[:2] for p in param_table(nn.Sequential(Mine(1, 1, bias=False))).params] == [("Mine", "Linear")]


def test_names_and_shapes_need_no_module():
    assert taken("**.bias") == taken("**.bias", Model())
    assert taken(lambda param: param.ndim == 0) == {"temperature"}


def test_the_first_rule_decides():
    groups = Groups(labelled({"biases": "**.bias", "blocks": ["blocks.0.**", "blocks.1.**"], "rest": "**"}, "here"))
    parts = groups.split(leaves(), leaves())
    assert list(parts) == ["biases", "blocks", "rest", None]
    assert [len(part) for part in parts.values()] == [4, 4, 4, 0]
    assert sorted(name for part in parts.values() for name in part) == sorted(leaves())


def test_a_rule_that_asks_for_shapes_is_asked_again_for_another_shape():
    groups = Groups((("it", (lambda param: param.ndim < 2,)),))
    vector, matrix = {"w": torch.ones(2)}, {"w": torch.ones(2, 2)}
    assert list(groups.split(vector, vector)["it"]) == ["w"]
    assert list(groups.split(matrix, matrix)["it"]) == []


@pytest.mark.parametrize(
    ("rules", "module", "message"),
    [
        ({"a": "blcoks.**", "b": "**"}, None, r"here: the rule 'blcoks\.\*\*' of 'a' .*did you mean 'blocks"),
        (
            {"a": "**", "b": "**.bias"},
            None,
            r"the rule '\*\*\.bias' of 'b' takes no parameter, since earlier rules take",
        ),
        ({"a": "Lienar", "b": "**"}, Model(), r"'Lienar' of 'a' takes no parameter.*did you mean 'Linear'"),
        ({"a": "Linear", "b": "**"}, None, "'Linear' of 'a' .*needs the model: module=model"),
        ({"a": lambda p: p.ndim > 9, "b": "**"}, None, "<lambda> of 'a' takes no parameter$"),
        ({"a": "blocks.**"}, None, "no rule takes 'temperature', 'embed.weight', 'gain.gains.0', .* the rule '\\*\\*'"),
        ({"a": ["x.*", "y.*"], "b": "**"}, None, r"'x\.\*' of 'a' .*; the rule 'y\.\*' of 'a' takes no parameter"),
    ],
)
def test_dead_rules_and_unmatched_parameters_are_named(rules, module, message):
    with pytest.raises(ValueError, match=message):
        Groups(labelled(rules, "here"), param_table(module)).check(leaves(), "here", complete=True)


def test_rules_may_leave_parameters_alone_where_that_is_meant():
    Groups(labelled({"a": "blocks.**"}, "here")).check(leaves(), "here")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.freeze(ps.sgd(0.1), ()), ValueError, "freeze: no rules given"),
        (lambda: ps.freeze(ps.sgd(0.1), (3,)), TypeError, "freeze: a rule is a glob .* got 3"),
        (lambda: ps.freeze(ps.sgd(0.1), "x", module=3), TypeError, "take an nn.Module .* got 3"),
        (lambda: ps.monitor_norms({}), ValueError, "monitor_norms takes at least one label"),
        (lambda: ps.monitor_norms("**"), TypeError, r"monitor_norms takes a mapping from labels, got '\*\*'"),
        (lambda: ps.monitor_norms({"a/b": "**"}), ValueError, "'a/b' cannot be a label"),
        (lambda: ps.clip_by_group({"a": "**"}), TypeError, r"clip_by_group, 'a': expected \(rule or rules, max_norm\)"),
        (lambda: ps.partition([]), TypeError, "partition takes a mapping from labels to"),
        (lambda: ps.partition({"a": ("**", ps.sgd)}), TypeError, "partition, 'a': expected an optimizer"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_table_says_which_rule_took_what():
    optimizer = ps.partition(
        {"small": ((lambda p: p.ndim < 2), ps.sgd(0.1)), "rest": ("**", ps.sgd(0.1))}, module=Model()
    )
    lines = optimizer.describe().splitlines()
    assert lines[0].split() == ["parameter", "shape", "held", "by", "group", "rule"]
    assert lines[1].split() == ["temperature", "scalar", "Model", "small", "<lambda>"]
    assert lines[2].split() == ["embed.weight", "5x4", "Embedding", "rest", "'**'"]
    assert len(lines) == 1 + len(leaves())
