"""Bodies of errors below /v1 and elsewhere, ids of requests, and the list of models."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from models.checkpoint.embedded import DEFAULT
from server.access.identity import Identity
from server.app import build_app
from server.doors.errors import ApiError
from server.doors.model_names import ModelNames
from tests.server.routes.asgi_gateway import asgi_client, gateway_of
from worker.config.service import default_config

EVIL = {"origin": "https://evil.example"}
BROWSER = {"accept": "text/html"}


@cache
def application() -> FastAPI:
    app = build_app(gateway_of())

    @app.get("/v1/fails")
    async def fails() -> None:
        raise RuntimeError("a detail")

    @app.get("/v1/number")
    async def number(n: int) -> int:
        return n

    @app.get("/api/refuses")
    async def refuses() -> None:
        raise ApiError(429, "requests: expected at most 1, got 2", headers={"retry-after": "7"})

    return app


def response_to(method: str, path: str, **options: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with asgi_client(application()) as client:
            return await client.raw.request(method, path, **options)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "type_", "param", "code"),
    [
        ("GET", "/v1/no_such_path", {}, 404, "invalid_request_error", None, "not_found"),
        ("GET", "/v1/no_such_path", {"headers": BROWSER}, 404, "invalid_request_error", None, "not_found"),
        ("GET", "/realtime/x", {}, 404, "invalid_request_error", None, "not_found"),
        ("DELETE", "/v1/models", {}, 405, "invalid_request_error", None, "method_not_allowed"),
        ("GET", "/v1/models/llama", {}, 404, "invalid_request_error", "model", "model_not_found"),
        ("GET", "/v1/number?n=x", {}, 400, "invalid_request_error", "n", "invalid_value"),
        ("GET", "/v1/number", {}, 400, "invalid_request_error", "n", "missing_required_parameter"),
        ("GET", "/v1/fails", {}, 500, "server_error", None, "internal_error"),
        ("POST", "/v1/models", {"headers": EVIL}, 403, "permission_error", None, None),
    ],
)  # fmt: skip
def test_errors_below_v1_have_openai_bodies(
    method: str, path: str, options: dict[str, Any], status: int, type_: str, param: str | None, code: str | None
) -> None:
    response = response_to(method, path, **options)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (error["type"], error["param"], error["code"]) == (type_, param, code)
    assert "a detail" not in error["message"]


def test_a_body_that_is_no_json_names_no_field() -> None:
    headers = {"content-type": "application/json"}
    response = response_to("POST", "/v1/realtime/client_secrets", content=b"{", headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, None, "invalid_json"), error


def test_errors_of_other_paths_keep_detail() -> None:
    assert response_to("GET", "/api/no_such_path").json() == {"detail": "Not Found"}
    refused = response_to("GET", "/api/refuses")
    assert refused.json() == {"detail": "requests: expected at most 1, got 2"}
    assert refused.headers["retry-after"] == "7"


def test_every_response_has_request_id() -> None:
    paths = ("/livez", "/v1/models", "/v1/fails", "/api/refuses", "/no_such_path")
    ids = {response_to("GET", path).headers["x-request-id"] for path in paths}
    assert len(ids) == len(paths) and all(one.startswith("req_") for one in ids)


def test_lists_one_model_and_retrieves_aliases() -> None:
    listed = response_to("GET", "/v1/models").json()
    [model] = listed["data"]
    assert model["task"] == "omni"
    assert listed["object"] == "list" and model["id"] == DEFAULT.name and model["object"] == "model"
    assert isinstance(model["created"], int) and model["owned_by"]
    for name in (DEFAULT.name, "gpt-realtime-2.1", "gpt-4o-mini-tts", "tts-1-hd", "gpt-4o-mini-realtime-preview"):
        found = response_to("GET", f"/v1/models/{name}").json()
        assert found.keys() == model.keys() and found["id"] == name


def test_name_and_aliases_come_from_settings() -> None:
    config = default_config()
    api = config.api.model_copy(update={"model_name": "house/omni", "model_aliases": ("ours-*",)})
    names = ModelNames.of(config.model_copy(update={"api": api}))
    assert names.resolve("house/omni") == names.resolve("ours-1") == "house/omni"
    alone = ModelNames("house", speech="house", has_omni=False)
    assert alone.resolve_speech("house") == alone.resolve_any("house") == "house", "no omni model has the name"
    assert alone.task_of("house") == "speech"
    sounds = config.model.model_copy(
        update={"s3gen_path": Path("s3gen_meanflow.safetensors"), "speech_path": Path("voices")}
    )
    every, anyone = ModelNames.of(config.model_copy(update={"model": sounds})), Identity()
    assert {name: every.task_of(name) for name in every.all} == {
        config.omni_name: "omni",
        "voices": "speech",
        "s3gen_meanflow": "conversion",
    }
    assert every.resolve_any("s3gen_meanflow") == "s3gen_meanflow"
    named = [every.resolve_conversion_for(name, anyone) for name in ("s3gen_meanflow", "tts-1")]
    assert named == ["s3gen_meanflow", config.omni_name]
    without = ModelNames("house", speech="voices", speech_aliases=("tts-*",), conversion="voices", has_omni=False)
    assert without.all == ["voices"] and without.resolve_conversion_for("tts-1", anyone) == "voices"
    for other in (DEFAULT.name, "gpt-realtime", "OURS-1", ""):
        with pytest.raises(ApiError) as refused:
            names.resolve(other)
        assert refused.value.status == 404 and refused.value.code == "model_not_found"
