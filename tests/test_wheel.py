"""What is in a wheel, built from the tree and from the source archive: all that `pip install` users get."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.contracts.source import ROOT

pytest.importorskip("hatchling", reason="builds the package; part of the extra `test`")


def build(kind: str, tree: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = (path for path in folder.iterdir() if path.is_dir())
    return tree


@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_a_wheel_holds_the_package_and_the_recipes(origin: str, unpacked: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build("wheel", ROOT if origin == "tree" else unpacked, tmp_path))
    names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_longctx"}
    assert "lightning_longctx/py.typed" in names
    for example in (ROOT / "examples").iterdir():
        if example.suffix in (".yaml", ".py", ".sh"):
            assert wheel.read(f"lightning_longctx/recipes/{example.name}") == example.read_bytes()


def test_an_installed_wheel_prints_a_recipe_without_the_repository(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "lightning_longctx", "init", "quickstart"]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "examples" / "quickstart.yaml").read_text().replace("examples/", "")
