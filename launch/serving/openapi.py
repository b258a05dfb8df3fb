"""The parts of the OpenAPI document that FastAPI does not know.

These are the models of request bodies, which reader threads validate (see :mod:`launch.serving.routes`), and the API
key, which :mod:`launch.serving.guard` checks before FastAPI sees a request.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from launch.serving.bodies import ChatBody, CompletionBody, RequestBody, ScoreBody

_SCHEMAS = "#/components/schemas/{model}"


def request_body(kind: type[RequestBody]) -> dict[str, Any]:
    """Return the OpenAPI declaration of a JSON request body, for the argument ``openapi_extra`` of a route."""
    schema = {"$ref": _SCHEMAS.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the models of request bodies and the API key to the OpenAPI document that FastAPI generated."""
    kinds: list[type[RequestBody]] = [CompletionBody, ChatBody, ScoreBody]
    _, models = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_SCHEMAS)
    components = document["components"]
    components["schemas"] |= models["$defs"]
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    # A server without --api_key_file takes requests without a key.
    return document | {"security": [{"key": []}, {}]}
