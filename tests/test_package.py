"""The public face: what it names exists, and importing it costs nothing."""

import subprocess
import sys

import pytest

import purestep as ps


@pytest.mark.parametrize("name", [name for name in ps.__all__ if not name.startswith("_")])
def test_every_public_name_exists_and_is_documented(name):
    assert getattr(ps, name).__doc__
    assert name in dir(ps)


@pytest.mark.parametrize("package", ["state", "sharding", "functional", "training"])
def test_the_packages_say_what_they_hold(package):
    module = getattr(ps, package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module 'purestep.{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'purestep' has no attribute 'nothing'"):
        _ = ps.nothing


CHEAP = {
    "the package": "import purestep",
    "configs": "import purestep as ps; ps.TrainConfig, ps.AcceleratorConfig, ps.ConfigError, ps.main",
    "describe and verify": "import purestep as ps; ps.describe, ps.verify, ps.CheckpointError",
}


@pytest.mark.parametrize("name", CHEAP)
def test_torch_is_not_imported_before_it_is_needed(name):
    code = f"{CHEAP[name]}; import sys; print(sorted({{'torch', 'accelerate'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
