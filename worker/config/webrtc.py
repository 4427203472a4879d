"""Settings of WebRTC calls. Torch-free."""

from typing import Annotated

from pydantic import Field

from worker.config.settings import HIDDEN, SettingProblem, Settings


class WebRtcConfig(Settings):
    """WebRTC calls of the Realtime API, in processes of their own."""

    enabled: bool = Field(True, description="accept calls; they need the extra `webrtc`")
    processes: int = Field(1, ge=1, le=64, description="most processes that hold the connections of calls")
    max_calls: int = Field(32, ge=1, le=1000, description="most calls of one process")
    preload: bool = Field(False, description="start the processes with the gateway; false: with the calls")
    addresses: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=["192.0.2.7", "127.0.0.1"],
        description="addresses of this machine for the media of calls; none: all but the loopback addresses",
    )
    public_address: str | None = Field(
        None,
        pattern=r"^[0-9A-Fa-f:.]{2,45}$",
        examples=["203.0.113.9"],
        description="address that a NAT forwards to this machine, port by port; calls offer it too",
    )
    min_port: int | None = Field(None, ge=1024, le=65_535, description="first UDP port of calls; null: any free port")
    max_port: int | None = Field(None, ge=1024, le=65_535, description="last UDP port of calls")
    stun_url: str | None = Field(
        None,
        pattern=r"^stun:[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?$",
        examples=["stun:stun.example.org:3478"],
        description="STUN server, which tells the public address behind a NAT; null: none",
    )
    turn_url: Annotated[str | None, HIDDEN] = Field(
        None,
        pattern=r"^turns?:[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?(\?transport=(udp|tcp))?$",
        examples=["turn:turn.example.org:3478?transport=udp"],
        description="TURN server, which relays media where no direct path exists; null: none",
    )
    turn_username: str | None = Field(None, max_length=200, description="user name for the TURN server")
    turn_credential: Annotated[str | None, HIDDEN] = Field(
        None, max_length=500, repr=False, description="password for the TURN server"
    )
    playback_delay_ms: int = Field(
        200,
        ge=0,
        le=2000,
        description="milliseconds for which the sound of a response is held back; below 160 there is a gap, since its "
        "first unit has 160 ms less than a second of sound",
    )
    pictures_per_s: float = Field(
        1.0, ge=0.1, le=2.0, description="pictures a second that the model gets of a call's video"
    )

    def _conflicts(self) -> list[SettingProblem]:
        found = []
        if (self.min_port is None) != (self.max_port is None):
            missing = "min_port" if self.min_port is None else "max_port"
            found.append(SettingProblem(missing, "a port, since both ends of the range belong together", "null"))
        elif self.min_port is not None and self.max_port is not None and self.max_port < self.min_port:
            found.append(SettingProblem("max_port", f"at least min_port ({self.min_port})", str(self.max_port)))
        if (self.turn_username is None) != (self.turn_credential is None):
            missing = "turn_username" if self.turn_username is None else "turn_credential"
            found.append(SettingProblem(missing, "text, since user name and password belong together", "null"))
        return found
