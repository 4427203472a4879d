"""Routes that list, enable and disable apps."""

from typing import Any

from fastapi import APIRouter, HTTPException

from server.registry.apps import App, Apps, UnknownAppError
from server.registry.gateway_state import GatewayState
from server.routes.bodies import AppInfo, AppList, AppSwitch, AppSwitches, NamedSwitch, Problem, Switch, Switched

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such app"}}


def app_routes(apps: Apps, state: GatewayState) -> APIRouter:
    router = APIRouter()

    def describe(app: App) -> AppSwitch:
        return AppSwitch(app_id=app.app_id, name=app.name, route=app.route, enabled=apps.is_enabled(app))

    async def set_enabled(app_id: str, enabled: bool) -> Switched:
        try:
            app = apps.set_enabled(app_id, enabled)
        except UnknownAppError as error:
            raise HTTPException(404, f"Unknown app: {error.got}") from None
        await state.store_app(app.app_id, enabled=enabled)
        return Switched(app=describe(app))

    @router.get("/api/apps")
    async def enabled_apps() -> AppList:
        return AppList(apps=[AppInfo(app_id=app.app_id, name=app.name, route=app.route) for app in apps.enabled])

    @router.get("/api/admin/apps")
    async def all_apps() -> AppSwitches:
        return AppSwitches(apps=[describe(app) for app in apps.all])

    @router.put("/api/admin/apps/{app_id}", responses=UNKNOWN)
    async def switch_one(app_id: str, request: Switch) -> Switched:
        return await set_enabled(app_id, request.enabled)

    @router.put("/api/admin/apps", responses=UNKNOWN)
    async def switch_named(request: NamedSwitch) -> Switched:
        return await set_enabled(request.app_id, request.enabled)

    return router
