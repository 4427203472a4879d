"""The path of GPT-Live sessions."""

from fastapi import FastAPI, WebSocket

from server.doors.gpt_live.socket import GptLiveDoor

GPT_LIVE_PATH = "/v1/live/sessions"


def add_gpt_live_socket(app: FastAPI, door: GptLiveDoor) -> None:
    """Serve the socket of GPT-Live sessions."""

    @app.websocket(GPT_LIVE_PATH)
    async def gpt_live(websocket: WebSocket) -> None:
        await door.serve(websocket)
