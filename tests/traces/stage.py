"""A folder's model and an engine without a thread, with an observer that records its sessions."""

from dataclasses import dataclass
from typing import Any

from models.checkpoint.config import PreprocessorConfig, load_preprocessor_config
from models.inputs.image import image_patches, plan
from models.inputs.tokens import Tokenizer
from models.load import load_model
from models.omni import OmniModel
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from models.stages.speech_steps import Speaker
from models.stages.unit_steps import UnitSteps
from tests.traces.folder import TraceFolder
from tests.traces.vocoder import FakeVocoder
from tests.traces.watch import RecordingLoop, Watcher
from worker.assembly.parts import token_sets
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.loop.language import Language
from worker.loop.sessions import Sessions
from worker.loop.voice_manager import VoiceManager

BATCHES = (1, 2, 4, 8, 16)
VOICE = object()  # the fake vocoder ignores the voice


@dataclass(frozen=True)
class RecordedModel:
    """A folder and its loaded checkpoint, shared by all runs."""

    folder: TraceFolder
    model: OmniModel
    tokenizer: Tokenizer
    pictures: PreprocessorConfig

    @classmethod
    def of(cls, folder: TraceFolder, device: str = "cpu") -> "RecordedModel":
        """Raises: TraceError; CheckpointError."""
        path = folder.checkpoint
        return cls(folder, load_model(path, device=device), Tokenizer.load(path), load_preprocessor_config(path))

    def slices(self, number: int, limit: int) -> list[Any]:
        """Patches of a frame's slices."""
        image, settings = self.folder.frame(number), self.pictures
        cut = plan(*image.size, limit, scale=settings.scale_resolution, patch=settings.patch_size)
        return image_patches(image, cut, table_side=self.model.config.vision_config.table_side)


class RecordedEngine:
    """Slots, loop and sessions for `n_slots` sessions of at most `llm_len` context rows.

    snapshots: number of saved prompts; 0 feeds every prompt.
    """

    def __init__(self, cast: RecordedModel, *, n_slots: int, llm_len: int, snapshots: int = 0):
        model, self.cast = cast.model, cast
        llm_len = min(llm_len, model.config.max_position_embeddings)
        runner = Runner(
            model,
            token_sets(cast.tokenizer, model.config.vocab_size, model.device),
            n_slots=n_slots,
            llm_len=llm_len,
            shapes=Shapes(batch=(*(size for size in BATCHES if size < n_slots), n_slots)),
        )
        self.unit_steps = UnitSteps(runner, Speaker(runner) if model.config.init_tts else None)
        self.watcher, vocoder = Watcher(self.unit_steps), FakeVocoder()
        self.language = Language(cast.tokenizer, image_rows=model.config.query_num)
        self.voices = VoiceManager(self.unit_steps, vocoder)
        self.loop = RecordingLoop(self.unit_steps, vocoder, self.voices, observer=self.watcher)
        default = SessionConfig(window=WindowConfig(mode="off"))
        config = EngineConfig(llm_len=llm_len, snapshots=snapshots, session=default)
        self.sessions = Sessions(self.unit_steps, self.language, self.voices, self.loop, config)
