"""The OpenAPI document, from the bodies that are validated."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from launch.serving.bodies import Body, ChatBody, CompletionBody, ScoreBody

_BODIES: dict[str, tuple[type[Body], str]] = {
    "/v1/completions": (CompletionBody, "Complete one prompt or several."),
    "/v1/chat/completions": (ChatBody, "Answer a conversation."),
    "/v1/score": (ScoreBody, "Log-probabilities of given tokens."),
}
_READ = {
    "/": "A page for people.",
    "/health": "200 while the engine can be expected to answer.",
    "/metrics": "Prometheus.",
    "/version": "The installed version.",
    "/openapi.json": "This document.",
    "/v1/models": "The one model.",
    "/v1/models/{name}": "The one model, by its name.",
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_SAID = {
    "400": "Wrong in itself.",
    "401": "No valid key.",
    "403": "Not a name of this server.",
    "404": "No such model.",
    "405": "Not with this method.",
    "408": "Not finished, or not sent, in time.",
    "413": "Too large.",
    "415": "Not JSON.",
    "429": "Too many wait.",
    "431": "Too large a head.",
    "503": "Not now.",
}


@functools.cache
def document(version: str) -> dict[str, Any]:
    """The document, version 3.1."""
    kinds = [kind for kind, _ in _BODIES.values()]
    names, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {status: {"description": text, "content": error} for status, text in _SAID.items()}
    paths: dict[str, Any] = {
        path: {
            "get": {
                "summary": text,
                "parameters": [_NAME] if "{name}" in path else [],
                "responses": {"200": {"description": "That."}, **errors},
            }
        }
        for path, text in _READ.items()
    }
    for path, (kind, text) in _BODIES.items():
        schema = {"application/json": {"schema": names[kind, "validation"]}}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": schema},
                "responses": {"200": {"description": "Done; events where a stream was asked for."}, **errors},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "diffumesh", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
