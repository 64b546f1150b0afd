"""From pydantic's errors to one line a person can act on: the key, the value, what is allowed."""

from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(mistakes: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake in words, and how many more there are."""
    errors = mistakes.errors(include_url=False, include_context=True)
    line = _explain_one(errors[0], model, prefix)
    more = len({error["loc"] for error in errors}) - 1
    return f"{line} (and {more} more mistake{'s' if more > 1 else ''})" if more > 0 else line


def _explain_one(error: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    path, owner = _walk(error["loc"], model)
    key = ".".join(part for part in (prefix, *path) if part)
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, path[-1], owner)
    if error["type"] == "missing":
        return f"{key}: missing; {_allowed(owner, path[-1])}"
    reason = _reason(error)
    section = _section(owner, path)
    opening, colon, rest = reason.partition(": ")
    if colon and section and opening in section.model_fields:
        # A check of a whole section names the key it is about itself.
        return f"{key}.{opening}: {rest}"
    allowed = _allowed(owner, path[-1]) if path else ""
    value = _shown(error["input"])
    return f"{key}: {value} is not allowed, {reason}" + (f"; {allowed}" if allowed else "")


def _unknown_key(key: str, name: str, owner: type[BaseModel] | None) -> str:
    known = list(owner.model_fields) if owner else []
    hint = "".join(f"did you mean '{guess}'? " for guess in get_close_matches(name, known, n=1, cutoff=0.5))
    return f"{key}: unknown key; {hint}known here: {', '.join(known)}"


def _allowed(owner: type[BaseModel] | None, name: str) -> str:
    field = owner.model_fields.get(name) if owner else None
    return f"{name} is {field.description}" if field and field.description else ""


def _section(owner: type[BaseModel] | None, path: list[str]) -> type[BaseModel] | None:
    """The model of the section at the end of the path, if that is one (or the only kind of one) there."""
    field = owner.model_fields.get(path[-1]) if owner and path else None
    members = list(_models_in(field.rebuild_annotation())) if field else []
    return members[0] if len(members) == 1 else None


def _reason(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "should be a section of keys and values"
    message = error["msg"]
    for opening in ("Value error, ", "Input "):
        message = message.removeprefix(opening)
    return message[0].lower() + message[1:]


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, date) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _walk(
    location: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None]:
    """Path as written in the file, and the model that holds the last key.

    Pydantic puts the tag of a union (`federation.clusters.sizes`) into the location; the file has none.
    """
    path: list[str] = []
    owner: type[BaseModel] | None = None
    members = [model]
    for step in location:
        tagged = [member for member in members if len(members) > 1 and str(step) in _tags(member)]
        if tagged:
            members = tagged
        elif isinstance(step, int) and path:
            path[-1] += f"[{step}]"
        elif not _is_type_branch(str(step)):
            path.append(str(step))
            owner = members[0] if len(members) == 1 else None
            field = owner.model_fields.get(path[-1]) if owner else None
            members = list(_models_in(field.rebuild_annotation())) if field else []
    return path, owner


def _is_type_branch(step: str) -> bool:
    """Whether a step names the branch of a union of plain types, such as `int` or `literal['auto']`."""
    return step in {"int", "float", "str", "bool"} or step.startswith(
        ("literal[", "constrained-", "tuple[", "function-")
    )


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union) or get_args(annotation):
        for part in get_args(annotation):
            yield from _models_in(part)


def _tags(member: type[BaseModel]) -> Iterator[str]:
    """Discriminator values of a member of a tagged union: those of its literal fields."""
    fields = member.model_fields.values()
    return (value for field in fields for value in get_args(field.annotation) if isinstance(value, str))
