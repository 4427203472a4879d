"""The messages that change a running duplex session. Torch-free."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from worker.describe import cut, shown
from worker.protocol.codec import FromClient, FromServer, SoundField
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError


class Adjust(FromClient):
    """Change the session from the next unit on and keep its context. Answered with `adjusted`.

    Legal after `prepare`, also while paused. Fields that are left out stay. All changes take effect, or none: an
    unknown field is refused with `bad_message`, an unknown setting with `bad_config`, a prompt without room with
    `context_full`. A turn that is spoken is spoken to its end in its voice.
    """

    type: Literal["adjust"] = "adjust"
    config: dict[str, Any] = Field({}, description="settings of the session to change; the others keep their values")
    max_slice_nums: int | None = Field(
        None, ge=1, description="the setting `max_slice_nums`; overrides that of `config`"
    )

    system_prompt: str | None = Field(None, description="new text of the prompt, inserted as in `prepare`")
    ref_audio_base64: SoundField | None = Field(None, description="float32 at 16 kHz: new voice named in the prompt")
    tts_ref_audio_base64: SoundField | None = Field(
        None,
        description="float32 at 16 kHz: new voice of the speech; null: that of `ref_audio_base64` or `ref_audio_path`",
    )
    ref_audio_path: str | None = Field(None, description="name of a voice on the server; overrides `ref_audio_base64`")

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object without empty voices. Raises: WireError bad_message for an unknown field."""
        unknown = [key for key in given if key not in cls.model_fields]
        if unknown:
            expected = "no field but " + ", ".join(name for name in cls.model_fields if name != "type")
            raise WireError(
                ErrorCode.BAD_MESSAGE, f"adjust.{cut(unknown[0])}", expected=expected, got=shown(given[unknown[0]])
            )
        return {key: value for key, value in given.items() if value != "" or not key.endswith("ref_audio_base64")}

    def settings(self) -> dict[str, Any]:
        """The settings to change."""
        limit = {} if self.max_slice_nums is None else {"max_slice_nums": self.max_slice_nums}
        return {**self.config, **limit}

    def ref_audio(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz; None if it stays. Raises: WireError bad_base64, bad_audio."""
        sound = self.ref_audio_base64
        return sound.samples("adjust.ref_audio_base64") if sound else None

    def tts_ref_audio(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz; `ref_audio` by default. Raises: WireError bad_base64, bad_audio."""
        sound = self.tts_ref_audio_base64
        return sound.samples("adjust.tts_ref_audio_base64") if sound else self.ref_audio()


class Adjusted(FromServer):
    """The session has changed."""

    type: Literal["adjusted"] = "adjusted"
    applied: dict[str, Any] = Field(
        description="`config`: the given settings with their values now in force; `true` for each other given field"
    )
    from_unit: int = Field(ge=1, description="number of the first unit that the changes apply to")
    notes: list[str] = Field([], description="one sentence for each change that takes effect later, or not at all")

    @classmethod
    def of(cls, change: Adjust, values: Mapping[str, Any], from_unit: int, notes: list[str]) -> "Adjusted":
        """The answer to a change. values: all settings now in force."""
        given = (name for name in Adjust.model_fields if name not in ("type", "config", "max_slice_nums"))
        applied: dict[str, Any] = {name: True for name in given if getattr(change, name) is not None}
        if settings := change.settings():
            applied["config"] = {name: values[name] for name in settings}
        return cls(applied=applied, from_unit=from_unit, notes=notes)
