"""Routes that list the kinds of conversation and switch them on and off. Knows FastAPI and `apps`."""

from fastapi import APIRouter, HTTPException

from server.registry.apps import App, Apps, UnknownAppError
from server.routes.bodies import AppInfo, AppList, AppSwitch, AppSwitches, NamedSwitch, Problem, Switch, Switched

UNKNOWN = {404: {"model": Problem, "description": "there is no such app"}}


def app_routes(apps: Apps) -> APIRouter:
    router = APIRouter()

    def told(app: App) -> AppSwitch:
        return AppSwitch(app_id=app.app_id, name=app.name, route=app.route, enabled=apps.is_enabled(app))

    def switch(app_id: str, on: bool) -> Switched:
        try:
            return Switched(app=told(apps.switch(app_id, on)))
        except UnknownAppError as error:
            raise HTTPException(404, f"Unknown app: {error.got}") from None

    @router.get("/api/apps")
    async def enabled_apps() -> AppList:
        return AppList(apps=[AppInfo(app_id=app.app_id, name=app.name, route=app.route) for app in apps.enabled])

    @router.get("/api/admin/apps")
    async def all_apps() -> AppSwitches:
        return AppSwitches(apps=[told(app) for app in apps.all])

    @router.put("/api/admin/apps/{app_id}", responses=UNKNOWN)
    async def switch_one(app_id: str, wanted: Switch) -> Switched:
        return switch(app_id, wanted.enabled)

    @router.put("/api/admin/apps", responses=UNKNOWN)
    async def switch_named(wanted: NamedSwitch) -> Switched:
        return switch(wanted.app_id, wanted.enabled)

    return router
