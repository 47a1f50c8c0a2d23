"""The recipe: what an operator may choose about the guest, read from TOML and checked before any work.

It must not touch anything but the recipe and the operator's script; `build` decides what the values mean.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from image.errors import ImageError

_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?")
"""Source: Debian Policy 5.6.1 (names) and 5.6.12 (versions)."""

_SUITE: Final = re.compile(r"[a-z][a-z0-9-]*")
_URL: Final = re.compile(r"(https?|file|copy)://?[^\s\[\]]+")
_PATTERN: Final = re.compile(r"/[!-~]+")

MAX_DISK_GIB: Final = 1024
"""A typing error is likelier than a bigger disk."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked recipe.

    Attributes:
        suite: Debian's name of the release.
        mirror: Base URL of a Debian archive; empty for the one that APT uses here.
        epoch: Seconds since 1970: the build's clock, and the name of a set of package versions.
        disk_gib: Size of the root file system.
        packages: Debian packages, the operator's `extra_packages` included; sorted, each once.
        drop: Paths (dpkg globs) left out of every package.
        keep: Exceptions to `drop`.
        script: The operator's script; empty for none.
    """

    suite: str
    mirror: str
    epoch: int
    disk_gib: int
    packages: tuple[str, ...]
    drop: tuple[str, ...]
    keep: tuple[str, ...]
    script: bytes


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        ImageError: The file or the script is missing, or a value is not what it must be.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ImageError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ImageError(f"the recipe {path} is not TOML: {error}") from error
    return parse_recipe(fields, path.parent)


def parse_recipe(fields: dict[str, Any], directory: Path) -> Recipe:
    """Check a recipe's fields; `directory` is what `script` is relative to.

    Raises:
        ImageError: Naming the key that is missing, unknown or wrong.
    """
    known = {"suite", "mirror", "epoch", "disk_gib", "packages", "drop", "keep", "extra_packages", "script"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ImageError(f"recipe: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(known))}")
    packages = _texts(fields, "packages", _PACKAGE) + _texts(fields, "extra_packages", _PACKAGE)
    return Recipe(
        suite=_text(fields, "suite", _SUITE),
        mirror=_text(fields, "mirror", _URL, default=""),
        epoch=_number(fields, "epoch", 1, 2**32 - 1),
        disk_gib=_number(fields, "disk_gib", 1, MAX_DISK_GIB),
        packages=tuple(sorted(set(packages))),
        drop=_texts(fields, "drop", _PATTERN),
        keep=_texts(fields, "keep", _PATTERN),
        script=_script(fields, directory),
    )


def _text(fields: dict[str, Any], key: str, pattern: re.Pattern[str], default: str | None = None) -> str:
    value = fields.get(key, default)
    if value is None:
        raise ImageError(f"recipe: {key!r} is missing")
    if value == default:
        return value
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ImageError(f"recipe: {key!r} is {value!r}, which does not match {pattern.pattern}")
    return value


def _texts(fields: dict[str, Any], key: str, pattern: re.Pattern[str]) -> tuple[str, ...]:
    values: object = fields.get(key, [])
    if not isinstance(values, list):
        raise ImageError(f"recipe: {key!r} must be a list of strings")
    return tuple(_text({key: value}, key, pattern) for value in values)  # pyright: ignore[reportUnknownVariableType]


def _number(fields: dict[str, Any], key: str, least: int, most: int) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ImageError(f"recipe: {key!r} must be a whole number from {least} to {most}, not {value!r}")
    return value


def _script(fields: dict[str, Any], directory: Path) -> bytes:
    value = fields.get("script", "")
    if not isinstance(value, str):
        raise ImageError("recipe: 'script' must be a path beside the recipe, or empty")
    if not value:
        return b""
    try:
        return (directory / value).read_bytes()
    except OSError as error:
        raise ImageError(f"recipe: cannot read the script {directory / value}: {error.strerror}") from error
