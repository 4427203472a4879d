"""The name under which clients of the OpenAI API address the model, and the names that mean the same model."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from server.access.identity import Identity
from server.doors.errors import ApiError
from worker.config.service import Config
from worker.describe import cut


class ModelNames:
    """The names of the served model.

    Args:
        served: the name that the list of models has.
        aliases: patterns of further names, with `*` for any text.
    """

    def __init__(self, served: str, aliases: Sequence[str] = ()):
        self.served, self._aliases = served, tuple(aliases)

    @classmethod
    def of(cls, config: Config) -> "ModelNames":
        """The names from the settings; the default name is the last part of `model.model_path`."""
        return cls(config.api.model_name or config.model.model_path.name, config.api.model_aliases)

    def resolve(self, name: str) -> str:
        """The name of the served model. Raises: ApiError 404 `model_not_found` for a name of another model."""
        if name == self.served or any(fnmatchcase(name, alias) for alias in self._aliases):
            return self.served
        message = f"model: expected {self.served}, got {cut(name)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def resolve_for(self, name: str, identity: Identity) -> str:
        """As `resolve`, for a client. Raises: ApiError, also 403 for a model that the client's key may not use."""
        served = self.resolve(name)
        if not identity.may_use(served):
            raise ApiError(403, f"model: expected a model that the key may use, got {served}", param="model")
        return served
