"""The compile report of a worker through the gateway, and what else a worker may answer."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from server.routes.compile_reports import MAX_BYTES
from tests.server.routes.asgi_gateway import asgi_client, gateway_of

REPORT = {"header": {"what": "worker"}, "rows": [{"name": "llm", "bucket": {"n": 1}}], "live": None}


def _get(answer: httpx.Response | httpx.HTTPError, status: int, worker: str = "worker_1") -> dict:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    async def scenario() -> dict:
        workers = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        async with workers, asgi_client(replace(gateway_of(2), http=workers)) as http:
            return await http.get(f"/workers/{worker}/compile_report", status)

    got = asyncio.run(scenario())
    expected = ["http://127.0.0.1:10/compile_report"] if worker == "worker_1" else []
    assert asked == expected, f"expected requests {expected}, got {asked}"
    return got


def test_report_of_named_worker_is_forwarded() -> None:
    assert _get(httpx.Response(200, json=REPORT), 200) == REPORT


def test_unknown_worker_is_404() -> None:
    assert _get(httpx.Response(200, json=REPORT), 404, "worker_7") == {"detail": "Worker not found: worker_7"}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (httpx.Response(404), 404),
        (httpx.Response(503, json={"detail": "loading"}), 503),
        (httpx.Response(500), 502),
        (httpx.Response(302, headers={"Location": "http://127.0.0.1:1/"}), 502),
        (httpx.Response(200, content=b"<html>"), 502),
        (httpx.Response(200, json=["report"]), 502),
        (httpx.Response(200, content=b" " * (MAX_BYTES + 1)), 502),
        (httpx.ConnectError("refused"), 502),
        (httpx.ReadTimeout("slow"), 502),
    ],
    ids=["no route", "not ready", "failed", "redirect", "no JSON", "list", "too long", "refused", "slow"],
)
def test_worker_without_report_is_an_error_that_names_it(answer: httpx.Response | httpx.HTTPError, status: int) -> None:
    detail = _get(answer, status)["detail"]
    assert detail.startswith("worker_1 (127.0.0.1:10): "), detail
