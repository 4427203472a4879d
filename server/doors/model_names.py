"""The names under which clients of the OpenAI API address the models, and the names that mean the same models."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from server.access.identity import Identity
from server.dispatch.queue import Model
from server.doors.errors import ApiError
from worker.config.service import Config
from worker.describe import cut


class ModelNames:
    """The names of the served models.

    Args:
        served: the name of the omni model in the list of models.
        aliases: patterns of further names, with `*` for any text.
        speech: the name of the speech model; None: none is served.
        speech_aliases: its further names, for requests of speech.
        conversion: the name of the voice conversion; None: none is served.
        has_omni: whether the omni model is served.
    """

    def __init__(
        self,
        served: str,
        aliases: Sequence[str] = (),
        *,
        speech: str | None = None,
        speech_aliases: Sequence[str] = (),
        conversion: str | None = None,
        has_omni: bool = True,
    ):
        self.served, self._aliases = served, tuple(aliases)
        self.speech, self._speech_aliases = speech, tuple(speech_aliases)
        self._conversion, self._has_omni = conversion, has_omni

    @classmethod
    def of(cls, config: Config) -> "ModelNames":
        """The names from the settings; the default name is the last part of the model's path, of a file without its
        ending.
        """
        api, s3gen = config.api, config.model.s3gen_path
        return cls(
            config.omni_name,
            api.model_aliases,
            speech=config.speech_name,
            speech_aliases=api.speech_model_aliases,
            conversion=None if s3gen is None else s3gen.stem,
            has_omni=config.model.omni,
        )

    @property
    def all(self) -> list[str]:
        """The names in the list of models."""
        names = self.served if self._has_omni else None, self.speech, self._conversion
        return list(dict.fromkeys(name for name in names if name is not None))

    def task_of(self, served: str) -> Model:
        """What the model of this name in the list does; of two with one name, the first one."""
        if self._has_omni and served == self.served:
            return "omni"
        return "speech" if served == self.speech else "conversion"

    def resolve(self, name: str) -> str:
        """The name of the omni model. Raises: ApiError 404 `model_not_found` for a name of another model."""
        if self._has_omni and (name == self.served or any(fnmatchcase(name, alias) for alias in self._aliases)):
            return self.served
        raise self._unknown(name)

    def resolve_any(self, name: str) -> str:
        """The name of the model in the list of models, whichever it is. Raises: ApiError 404."""
        return name if name in self.all else self.resolve_speech(name)

    def resolve_speech(self, name: str) -> str:
        """The name of the model that speaks for a request of speech: the speech model comes before the omni model.

        Raises: ApiError 404.
        """
        is_alias = any(fnmatchcase(name, alias) for alias in self._speech_aliases)
        is_omni = self._has_omni and name == self.served
        if self.speech is not None and not is_omni and (name == self.speech or is_alias):
            return self.speech
        return self.resolve(name)

    def resolve_conversion_for(self, name: str, identity: Identity) -> str:
        """As `resolve_for`, for a conversion: names of the omni model, else of the speech model, mean it too."""
        if name == self._conversion:
            return self._allowed(name, identity)
        return self._allowed(self.resolve(name) if self._has_omni else self.resolve_speech(name), identity)

    def resolve_for(self, name: str, identity: Identity) -> str:
        """As `resolve`, for a client. Raises: ApiError, also 403 for a model that the client's key may not use."""
        return self._allowed(self.resolve(name), identity)

    def resolve_speech_for(self, name: str, identity: Identity) -> str:
        """As `resolve_speech`, for a client. Raises: as `resolve_for`."""
        return self._allowed(self.resolve_speech(name), identity)

    def _allowed(self, served: str, identity: Identity) -> str:
        if not identity.may_use(served):
            raise ApiError(403, f"model: expected a model that the key may use, got {served}", param="model")
        return served

    def _unknown(self, name: str) -> ApiError:
        message = f"model: expected {' or '.join(self.all)}, got {cut(name)}"
        return ApiError(404, message, param="model", code="model_not_found")
