"""Checkpoint folders of model ids: found in the Hugging Face cache, or downloaded into it. Torch-free.

Contains the only use of `huggingface_hub`, which also reads HF_HOME, HF_HUB_OFFLINE and the access token.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from models.errors import CheckpointError
from worker.config.hub_id import hub_id
from worker.config.session import EngineConfig

LOG = logging.getLogger(__name__)
# The files that loading reads; a repository may hold other formats of the same weights.
FILES = (
    *("config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    "assets/token2wav/*",
)


class HubError(CheckpointError):
    """A model id whose files are neither in the cache nor can be downloaded.

    Attributes:
        problem: the text without the remedy.
        remedy: what to do; empty if the problem says it.
    """

    def __init__(self, name: str, got: str, remedy: str = ""):
        expected = "a folder or a model id of the Hugging Face hub"
        super().__init__(f"model {name}", expected=expected, got=f"{got}; {remedy}" if remedy else got)
        self.problem = str(self).removesuffix(f"; {remedy}")
        self.remedy = remedy


def with_local_checkpoint(config: EngineConfig, progress: Callable[[str], None] = LOG.info) -> EngineConfig:
    """The settings with `model_path` as a local folder; a model id is downloaded unless the cache is complete.

    Processes that download the same model at once share the cache: `huggingface_hub` locks each file.

    Args:
        progress: called with a line of text before a download; `huggingface_hub` writes progress bars to stderr.
    Raises: CheckpointError for an id that is not cached and cannot be downloaded.
    """
    name = hub_id(config.model_path)
    if name is None:
        return config
    return config.model_copy(update={"model_path": download(name, progress)})


def download(name: str, progress: Callable[[str], None] = LOG.info) -> Path:
    """The snapshot folder of model id `name`, complete. Raises: CheckpointError."""
    # Imported here: programs whose model is a folder do not need it.
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"files of {name} from the Hugging Face {'cache' if is_offline_mode() else 'hub'}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except GatedRepoError:
        got = "a model that needs its owner's permission: request it on the model's page, then run `hf auth login`"
    except RepositoryNotFoundError:
        got = "no such model: check the spelling; a private model needs `hf auth login`"
    except LocalEntryNotFoundError as error:
        if is_offline_mode():
            raise _not_cached(name) from None
        raise HubError(name, f"no connection to the hub ({_first_line(error)})", _REMEDY) from None
    except Exception as error:  # network, file system and validation errors of several libraries
        got = f"{type(error).__name__}: {_first_line(error)}"
    raise HubError(name, got)


def cached(name: str) -> Path | None:
    """The snapshot folder of model id `name` in the cache, without network; None if a download is needed.

    Raises: CheckpointError if HF_HUB_OFFLINE forbids that download.
    """
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        if is_offline_mode():
            raise _not_cached(name) from None
        return None
    except Exception as error:  # as in `download`
        raise HubError(name, f"{type(error).__name__}: {_first_line(error)}", _REMEDY) from None
    # An interrupted download leaves a snapshot with some of its files. Offline, the checks of a folder name the others.
    return folder if is_offline_mode() or _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether `config.json` and all weight files exist. An index that cannot be read is left to the loader."""
    index = folder / "model.safetensors.index.json"
    names = {"config.json"}
    if index.is_file():
        try:
            names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError):
            return True
    else:
        names.add("model.safetensors")
    return all((folder / name).is_file() for name in names)


_REMEDY = "download it where there is a network (`hf download`) and copy the cache, or set model.model_path to a folder"


def _not_cached(name: str) -> HubError:
    from huggingface_hub.constants import HF_HUB_CACHE

    got = f"neither, and HF_HUB_OFFLINE is set (cache: {HF_HUB_CACHE})"
    return HubError(name, got, f"unset it, or {_REMEDY}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
