"""transformers is optional: without it the core works and the integration says how to install it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_longctx
from lightning_longctx import integrations

_ROOT = Path(lightning_longctx.__file__).parents[1]

# Hides the libraries from imports and from those who ask for their version (torchmetrics does, and then imports them).
_WITHOUT = """
import importlib.metadata as metadata, json, sys
hidden = {"transformers", "tokenizers", "huggingface_hub", "safetensors"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
found = metadata.distribution
def distribution(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.distribution = distribution

import lightning_longctx, lightning_longctx.integrations
answers = {"world": lightning_longctx.Topology().world_size}
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except ImportError as error:
        answers[statement] = str(error)
print(json.dumps(answers))
"""
_STATEMENTS = [
    "from lightning_longctx import CausalLMModule",
    "from lightning_longctx.integrations import CausalLMModule",
    "import lightning_longctx.integrations.transformers",
]


@pytest.mark.slow
def test_core_works_and_integration_names_the_extra() -> None:
    command = [sys.executable, "-c", _WITHOUT, *_STATEMENTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=150)  # noqa: S603
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["world"] == 1
    for statement in _STATEMENTS:
        assert "pip install 'lightning-longctx[hf]'" in answers[statement]


def test_names_are_those_promised() -> None:
    assert sorted(integrations.__all__) == integrations.__all__
    assert set(integrations.__all__) <= set(dir(integrations))
    for name in integrations.__all__:
        assert getattr(integrations, name).__name__ == name
    with pytest.raises(AttributeError, match="Thing"):
        _ = integrations.Thing
