"""Whether a speech model's checkpoint is complete, read from its small files and the headers of its weights.

Imports nothing that may be missing on a broken machine before it is used.
"""

from pathlib import Path

from worker.doctor.checkpoint_facts import weight_facts
from worker.doctor.facts import ModelFacts, UnknownFact

TOKENIZER_FOLDER = "speech_tokenizer"


def speech_facts(path: Path) -> ModelFacts:
    """Sizes and problems of a Qwen3-TTS checkpoint.

    path: its folder, or a model id.
    Raises: UnknownFact for a model id that is not in the Hugging Face cache, and without dependencies.
    """
    try:
        from models.errors import ModelError
        from models.qwen3_tts.codec.config import load_speech_tokenizer_config
        from models.qwen3_tts.config import load_qwen3_tts_config
        from models.qwen3_tts.text import PromptTokenizer
        from worker.assembly.hub import HubError, cached
        from worker.config.hub_id import hub_id
    except ImportError as error:
        raise UnknownFact(f"reading checkpoints needs a package that is not installed: {error}") from None
    folder: Path | None = path
    if (name := hub_id(path)) is not None:
        try:
            folder = cached(name)
        except HubError as error:
            return ModelFacts(problems=(error.problem,), remedy=error.remedy)
    if folder is None:
        raise UnknownFact(f"{path} is not in the Hugging Face cache; workers download it when they start")
    problems: list[str] = []
    row_values = 0
    try:
        config = load_qwen3_tts_config(folder)
        talker = config.talker_config
        row_values = 2 * talker.num_hidden_layers * talker.num_key_value_heads * talker.head_dim
        PromptTokenizer.load(folder, config)
        load_speech_tokenizer_config(folder / TOKENIZER_FOLDER)
    except (ModelError, OSError) as error:
        problems.append(str(error))
    parts = [weight_facts(one) for one in (folder, folder / TOKENIZER_FOLDER)]
    return ModelFacts(
        n_files=sum(one.n_files for one in parts),
        n_bytes=sum(one.n_bytes for one in parts),
        n_values=sum(one.n_values for one in parts),
        row_values=row_values,
        problems=(*problems, *(text for one in parts for text in one.problems)),
    )
