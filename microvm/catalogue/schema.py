"""From parameter models to the schemas that clients see, and from arguments to validated models.

Schemas are inlined (no `$ref`), have plain object roots, refuse unknown names, and never say `null`: a
parameter that is not given is absent. Validation coerces nothing and names the path of what it refuses,
never its value, which may be secret. It must not know any tool. Its neighbours: `params` and `results` hold
the models.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from microvm.catalogue.strict_json import shown_name
from microvm.errors import RequestError


class Params(BaseModel):
    """Base of every parameter model: exact types, no unknown names, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Shown(BaseModel):
    """Base of every result model; a field that is None is left out, unless the tool keeps it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


P = TypeVar("P", bound=Params)


def parse(model: type[P], arguments: object) -> P:
    """Validate a call's arguments.

    Args:
        model: The tool's parameters.
        arguments: What `strict_json.loads` gave.

    Raises:
        RequestError: `invalid_argument` with the path in `detail`.
    """
    if not isinstance(arguments, dict):
        raise _refuse("", "the arguments must be a JSON object")
    members = cast("dict[str, Any]", arguments)
    _check_names("", members, model)
    try:
        return model.model_validate(members)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path, why = _path(first["loc"]), _reason(first["type"], first["msg"])
        if not path:  # a rule over several fields begins with the name of the one to mend
            path, _, why = why.partition(": ")
        raise _refuse(path, why) from None


_COMPARED: Final = 80  # a name of megabytes would keep the comparison busy for seconds


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely stands for; None where nothing is near."""
    return next(iter(difflib.get_close_matches(name[:_COMPARED], list(known), n=1, cutoff=0.6)), None)


def _check_names(path: str, members: Mapping[str, Any], model: type[BaseModel]) -> None:
    for name, value in members.items():
        where = f"{path}.{name}" if path else name
        field = model.model_fields.get(name)
        if field is None:
            raise _unknown(path, name, model)
        if value is None:
            raise _refuse(where, "null is not a value; leave the argument out")
        inner = _model_of(field.annotation)
        if inner is not None and isinstance(value, dict):
            _check_names(where, cast("dict[str, Any]", value), inner)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None`, or either of them annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        return next(filter(None, map(_model_of, get_args(annotation))), None)
    return None


def _unknown(path: str, name: str, model: type[BaseModel]) -> RequestError:
    known = list(model.model_fields)
    close = nearest(name, known)
    where = f"{path}: " if path else ""
    advice = f"did you mean {close}?" if close else f"known: {', '.join(known) or 'none'}"
    detail = {"path": f"{path}.{name[:80]}" if path else name[:80]}
    return RequestError(
        "invalid_argument",
        f"{where}unknown argument {shown_name(name)}; {advice}",
        {**detail, "nearest": close} if close else detail,
    )


def _refuse(path: str, why: str) -> RequestError:
    return RequestError("invalid_argument", f"{path}: {why}" if path else why, {"path": path})


def _path(location: tuple[int | str, ...]) -> str:
    steps: list[str] = []
    for step in location:
        if isinstance(step, int):
            steps.append(f"[{step}]")
        elif step != "[key]":
            steps.append(("." if steps else "") + step[:80])
    return "".join(steps)


def _reason(kind: str, message: str) -> str:
    if kind == "missing":
        return "this argument is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


_DROPPED: Final = frozenset({"title"})


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON Schema 2020-12, inlined.

    No `$ref`, `$defs`, `title` or `$schema`, no combinator at the root, no branch for null: what clients
    and the APIs behind them choke on.
    """
    generated = model.model_json_schema(mode="validation")
    definitions = cast("dict[str, Any]", generated.pop("$defs", {}))
    schema = cast("dict[str, Any]", _inline(generated, definitions))
    schema.pop("description", None)  # the class's docstring; the tool has its own
    schema.setdefault("properties", {})
    return schema


def _inline(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    members = _without_null(cast("dict[str, Any]", node))
    reference = members.get("$ref")
    if isinstance(reference, str):
        target = dict(definitions[reference.rsplit("/", 1)[-1]])
        target.pop("description", None)
        members = {**target, **{name: value for name, value in members.items() if name != "$ref"}}
    result: dict[str, Any] = {}
    for name, value in members.items():
        if name == "properties":
            properties = cast("dict[str, Any]", value)
            result[name] = {key: _inline(sub, definitions) for key, sub in properties.items()}
        elif name not in _DROPPED and not (name == "default" and value is None):
            result[name] = _inline(value, definitions)
    return result


def _without_null(members: dict[str, Any]) -> dict[str, Any]:
    """`X | None` as X: absence is how "nothing" is said."""
    branches = members.get("anyOf")
    if not isinstance(branches, list):
        return members
    kept = [branch for branch in cast("list[dict[str, Any]]", branches) if branch.get("type") != "null"]
    if len(kept) != 1:
        return members
    rest = {name: value for name, value in members.items() if name != "anyOf"}
    return {**kept[0], **rest}
