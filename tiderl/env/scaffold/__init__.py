"""Writes the package that `tiderl env new NAME` promises.

Invariant: either the whole package folder appears, or nothing does; an existing path is never
touched, and the written environment passes `tiderl env check` as it stands.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import sys
import tempfile
from dataclasses import dataclass
from importlib import resources
from keyword import iskeyword
from pathlib import Path

from tiderl.errors import ConfigError, ResourceError

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_OURS = ("tide", "tiderl", "gymnasium")

# Template file -> path in the new package; both are formatted with the names of the package.
_FILES = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "init.py.tmpl": "src/{module}/__init__.py",
    "environment.py.tmpl": "src/{module}/environment.py",
    "test_environment.py.tmpl": "tests/test_{module}.py",
}


@dataclass(frozen=True)
class Names:
    """All names derived from the one the user gave.

    Args:
        package: distribution and folder name, `my-env`.
        module: import name, `my_env`.
        env_id: `my/Env-v0`.
        class_name: `MyEnv`.
    """

    package: str
    module: str
    env_id: str
    class_name: str


def derive_names(name: str) -> Names:
    """`my-env` -> id `my/Env-v0`; `maze-run-fast` -> `maze/RunFast-v0`; `foo` -> `foo/Foo-v0`.

    Raises:
        ConfigError: `name` is no usable package name, or would hide a module or namespace.
    """
    if not _NAME.fullmatch(name):
        words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
        while words and not words[0][0].isalpha():
            words.pop(0)
        hint = "-".join(words) or "my-env"
        raise ConfigError(
            f"{name!r} is not a package name",
            where="tiderl env new",
            fix=f"use lower-case words joined by '-', beginning with a letter, for instance {hint!r}",
        )
    words = re.split(r"[-_]", name)
    module = "_".join(words)
    if module in sys.stdlib_module_names or iskeyword(module) or words[0] in _OURS:
        raise ConfigError(
            f"the name {name!r} is taken by Python or by TideRL",
            where="tiderl env new",
            fix=f"choose another, for instance 'my-{words[-1]}'",
        )
    title = "".join(word.capitalize() for word in (words[1:] or words))
    if not title[0].isalpha():
        title = "Env" + title
    camel = "".join(word.capitalize() for word in words)
    return Names(name, module, f"{words[0]}/{title}-v0", camel)


def render(names: Names) -> dict[str, str]:
    """The files of the package: relative path -> text."""
    values = {
        "package": names.package,
        "module": names.module,
        "env_id": names.env_id,
        "class_name": names.class_name,
    }
    folder = resources.files(__name__) / "templates"
    return {
        path.format(**values): string.Template((folder / template).read_text("utf-8")).substitute(values)
        for template, path in _FILES.items()
    }


def write_package(name: str, parent: Path) -> tuple[Names, Path]:
    """Write the package `name` as a new folder of that name in `parent`.

    Returns:
        The derived names and the folder.

    Raises:
        ConfigError: bad name, `parent` is no folder, or the folder exists already.
        ResourceError: the file system refused (no space, no permission); nothing is left behind.
    """
    names = derive_names(name)
    target = parent / name
    if not parent.is_dir():
        raise ConfigError(f"{str(parent)!r} is not a folder", fix="create it, or give another --into")
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{str(target)!r} exists already", fix="choose another name or another --into folder"
        )
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
        for path, text in render(names).items():
            file = temporary / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        temporary.chmod(0o755)
        os.rename(temporary, target)
    except OSError as error:
        raise ResourceError(
            f"cannot write {str(target)!r}: {error.strerror or error}",
            fix="free some space or give another --into folder",
        ) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return names, target
