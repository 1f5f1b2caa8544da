"""``longctx init NAME > run.yaml``: a recipe to start from, also where there is no clone of the repository.

A recipe is a file of ``examples/``, which a wheel holds as ``lightning_longctx/recipes/``. In a clone the folder itself
is read, so nothing is written twice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.spelling import nearest
from lightning_longctx.tools.configuration import ReadConfiguration

__all__ = ["find_recipe", "main", "recipe_list", "recipes", "summary_of"]

# Where its commands find a recipe in a clone. Who asks for it here has it in the working folder.
_CLONE = re.compile(r"\bexamples/(launch/)?")
_USAGE = "usage: longctx init NAME > run.yaml"


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx init``: one name.
        read: not needed: nothing is configured yet.

    Returns:
        0, or 2 without a name. The list then goes to the standard error, since the output may be a file already.

    Raises:
        ConfigurationError: no such recipe, or more than one word.
    """
    found = recipes()
    if list(words) in (["-h"], ["--help"]):
        print(recipe_list(found))
        return 0
    if not words:
        print(recipe_list(found), file=sys.stderr)
        return 2
    if len(words) > 1:
        fix = f"Write `longctx init {words[0]} > run.yaml`, then edit the file or add flags to `longctx fit`."
        raise ConfigurationError("longctx init", "must get one name", " ".join(words), fix)
    try:
        path = find_recipe(words[0], found)
    except ConfigurationError:
        print(recipe_list(found), file=sys.stderr)
        raise
    sys.stdout.write(_CLONE.sub("", path.read_text(encoding="utf-8")))
    return 0


def recipes() -> dict[str, Path]:
    """All recipes by name: configurations without their ending, other files with it."""
    package = Path(str(files("lightning_longctx")))
    folder = package / "recipes"
    if not folder.is_dir():  # a clone: nothing was built
        folder = package.parent / "examples"
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".yaml", ".py", ".sh"))
    named = {path.stem if path.suffix == ".yaml" else path.name: path for path in paths}
    return dict(sorted(named.items(), key=lambda item: item[1].suffix != ".yaml"))


def find_recipe(name: str, found: Mapping[str, Path]) -> Path:
    """The recipe of a name, of the beginning of one name alone, or of a file name.

    Raises:
        ConfigurationError: none, with the nearest one.
    """
    plain = name.removesuffix(".yaml")
    beginnings = [known for known in found if known.startswith(plain)] if plain else []
    if plain in found:
        return found[plain]
    if len(beginnings) == 1:
        return found[beginnings[0]]
    near = beginnings[0] if beginnings else nearest(plain, found)
    fix = f"Did you mean `longctx init {near}`?" if near else f"There are: {', '.join(found)}."
    raise ConfigurationError("longctx init", "must name a recipe", repr(name), fix)


def recipe_list(found: Mapping[str, Path]) -> str:
    """The usage, and each name with its line."""
    width = max(map(len, found), default=0) + 2
    lines = [f"  {name:{width}}{summary_of(path)}" for name, path in found.items()]
    return "\n".join([_USAGE, "", "recipes:", *lines])


def summary_of(path: Path) -> str:
    """What a file says of itself: the text of its first line that has any, behind the signs of a comment."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().lstrip("#\"'").strip()
            if text and not line.startswith("#!"):
                return text.removesuffix('"""')
    return ""
