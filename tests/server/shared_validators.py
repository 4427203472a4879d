"""Validators, response fields and paths of FastAPI's routes, shared by all applications of a process."""

from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import routing
from fastapi._compat import v2


def share_validators() -> None:
    """Make each validator of a parameter, a body or a response once in this process.

    FastAPI makes about 400 for each application, and the tests make hundreds of applications with the same routes. A
    validator has no state.
    """
    make: Callable[..., Any] = v2.TypeAdapter
    kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def shared(annotated: Any, *, config: Any) -> Any:
        if config is not None:
            return make(annotated, config=config)
        # Also by text: `int | str` equals `str | int` and validates differently. The entry keeps the objects whose
        # addresses the text has, so that no later object has them.
        origin = annotated.__origin__
        key = origin, repr(origin), repr(annotated.__metadata__)
        if key not in kept:
            kept[key] = annotated, make(annotated, config=config)
        return kept[key][1]

    v2.TypeAdapter = shared


def share_response_fields_and_paths() -> None:
    """Make each field of a response and each pattern of a path once in this process: nothing changes them later."""
    make = routing.create_model_field
    kept: dict[tuple[Any, ...], Any] = {}

    def shared(*, name: str, type_: Any, mode: Any) -> Any:
        key = name, type_, repr(type_), mode
        if key not in kept:
            kept[key] = make(name=name, type_=type_, mode=mode)
        return kept[key]

    routing.create_model_field = shared
    routing.compile_path = cache(routing.compile_path)
