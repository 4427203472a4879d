"""Apps and estimates over a restart of the gateway."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from server.app import Gateway
from server.registry.gateway_state import FILE_NAME
from tests.server.routes.asgi_gateway import asgi_client, gateway_of, with_data_dir
from worker.config.service import default_config


def started(folder: Path) -> Gateway:
    return gateway_of(config=with_data_dir(default_config(), folder))


def test_changes_survive_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asgi_client(started(tmp_path / "new")) as http:
            await http.put("/api/admin/apps/omni", {"enabled": False})
            await http.put("/api/admin/apps/turnbased", {"enabled": False})
            await http.put("/api/admin/apps/turnbased", {"enabled": True})
            changed = await http.put("/api/config/eta", {"eta_chat_s": 20, "ema_alpha": 0.5, "eta_streaming_s": None})
        async with asgi_client(started(tmp_path / "new")) as http:
            switches = {app["app_id"]: app["enabled"] for app in (await http.get("/api/admin/apps"))["apps"]}
            assert [name for name, enabled in switches.items() if not enabled] == ["omni"]
            assert await http.get("/api/config/eta") == changed and changed["config"]["eta_chat_s"] == 20
            stored = json.loads((tmp_path / "new" / FILE_NAME).read_text())
            assert stored["eta"] == {"eta_chat_s": 20, "ema_alpha": 0.5}, "expected changed values only"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"apps": {"omni": "no"}}', '{"eta": {"eta_chat_s": -1}}', '{"eta": {"eta_chat_s": NaN}}'],
)
def test_damaged_file_is_reported_and_replaced(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text(content)

    async def scenario() -> None:
        async with asgi_client(started(tmp_path)) as http:
            assert len((await http.get("/api/apps"))["apps"]) == 4
            await http.put("/api/admin/apps/omni", {"enabled": False})
        async with asgi_client(started(tmp_path)) as http:
            assert len((await http.get("/api/apps"))["apps"]) == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("nothing is restored") == 1


def test_unknown_values_have_no_effect(tmp_path: Path) -> None:
    stored = {"apps": {"later": False, "omni": False}, "eta": {"eta_later_s": 3, "ema_alpha": 7}, "later": 1}
    (tmp_path / FILE_NAME).write_text(json.dumps(stored))

    async def scenario() -> None:
        async with asgi_client(started(tmp_path)) as http:
            assert len((await http.get("/api/apps"))["apps"]) == 3
            assert (await http.get("/api/config/eta"))["ema_alpha"] == 0.3

    asyncio.run(scenario())


def test_change_that_cannot_be_stored_still_has_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def scenario() -> None:
        async with asgi_client(started(tmp_path / "file")) as http:
            await http.put("/api/admin/apps/omni", {"enabled": False})
            assert len((await http.get("/api/apps"))["apps"]) == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "expected to write" in caplog.text
