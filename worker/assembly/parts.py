"""Builds the parts of an engine from its settings: model, slots, vocoder, vocabulary.

The only module of the worker that loads weights. Contains devices, sizes and memory. Does not contain sessions.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from models.checkpoint.config import OmniConfig, PreprocessorConfig, load_preprocessor_config
from models.checkpoint.files import list_tensors
from models.errors import CheckpointError, ConfigError, SettingsError
from models.inputs.tokens import Tokenizer, forbidden_speech_ids
from models.layers.kv_pages import PageSizes
from models.load import load_model
from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.early_images import EARLY_SLICES
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from models.stages.speech_steps import Speaker
from models.stages.state import SlotState
from models.stages.unit_steps import UnitSteps
from models.token2wav.backends import Kernels
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.settings import MEL_RATE
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Vocoder
from worker.assembly.backend_flags import apply_backend_flags, uses_kernels
from worker.assembly.kv_layout import layout_of, with_kv_layout
from worker.assembly.load_times import Loading
from worker.assembly.sizes import (
    PAGE_ROWS,
    llm_len,
    llm_slot_rows,
    runs_eager,
    shapes_of,
    speech_pages,
    tts_len,
    tts_slot_rows,
    vocoder_shapes_of,
)
from worker.assembly.slot_memory import (
    FREE_SHARE,
    WORK_BYTES,
    WORK_SLOT_BYTES,
    decode_copy_bytes,
    has_room_for_copy,
    one_session_bytes,
    slots_in,
    weight_bytes,
)
from worker.assembly.solver_steps import with_solver_steps
from worker.config.session import (
    FIXED_SET,
    FIXED_SPEAK_SET,
    REFERENCE_SET,
    REFERENCE_SPEAK_SET,
    REPLY_SET,
    REPLY_TEXT_SET,
    SIDE_DUPLEX_SET,
    SIDE_SET,
    EngineConfig,
)
from worker.config.weights import KVLayout
from worker.loop.language import Language, reply_terminators
from worker.loop.unit_decoder import SideLane

LOG = logging.getLogger(__name__)
CPU_SESSIONS = 4  # compiled, all of them share one batch size; `worker.admission` says how many are served in time
BATCHES = (1, 2, 4, 8, 16, 32)
VOICES = 8
MAX_PROMPT_FRAMES = 1500  # of one voice: 30 s


@dataclass(frozen=True)
class EngineParts:
    """Everything a unit loop needs.

    Attributes:
        vocoder: None for a checkpoint without speech or a folder without a vocoder.
        compiled_shapes, compiled_vocoder_shapes: sizes for compiled layers, to change to if the project's kernels fail;
            None if the current sizes are those.
        loading: time to load the weights; None if they came from memory.
    """

    model: OmniModel
    unit_steps: UnitSteps
    vocoder: Vocoder | None
    language: Language
    pictures: PreprocessorConfig
    n_slots: int
    compiled_shapes: Shapes | None = None
    compiled_vocoder_shapes: VocoderShapes | None = None
    loading: Loading | None = None

    @property
    def kv_layout(self) -> KVLayout:
        """Whether slots have rows of their own, or pages of shared pools."""
        return "pages" if self.unit_steps.state.llm.pages.is_pool else "slots"


def side_lane_of(tokenizer: Tokenizer, config: OmniConfig) -> SideLane | None:
    """Ids around text that is not spoken; None for a checkpoint without it. Raises: TokenError."""
    named = config.side_lane
    return None if named is None else SideLane(tokenizer.id(named.start), tokenizer.id(named.end))


def token_sets(
    tokenizer: Tokenizer, vocab_size: int, device: torch.device, side_lane: SideLane | None = None
) -> TokenSets:
    """Token sets of the sampler, in the order of the indices in `worker.config.session`.

    side_lane: of the checkpoint. Sessions that do not use it cannot begin a span.
    """
    special = tokenizer.special
    never = {special.tts_pad, special.chunk_eos, *tokenizer.bad_token_ids}
    duplex = TokenSet(forbidden=never, length_ids={special.turn_eos}, stop_id=special.chunk_eos, pad_id=special.listen)
    control = {special.listen, special.speak, special.turn_eos, special.chunk_tts_eos, special.tts_bos}
    ends = reply_terminators(tokenizer)
    must_speak = TokenSet(allowed={special.speak}, pad_id=special.listen)
    sets = {
        REFERENCE_SET: replace(duplex, listen_id=tokenizer.eos_id),
        # Control tokens are not words, so the repetition penalty skips them.
        FIXED_SET: replace(duplex, listen_id=special.listen, unremembered=control),
        REPLY_SET: TokenSet(forbidden=forbidden_speech_ids(tokenizer), length_ids=ends, pad_id=special.im_end),
        REPLY_TEXT_SET: TokenSet(length_ids=ends, pad_id=special.im_end),
        REFERENCE_SPEAK_SET: must_speak,
        FIXED_SPEAK_SET: replace(must_speak, unremembered=control),
    }
    if side_lane is not None:
        fixed = sets[FIXED_SET]
        sets[FIXED_SET] = replace(fixed, forbidden={*fixed.forbidden, *side_lane})
        sets[SIDE_DUPLEX_SET] = replace(fixed, forbidden={*fixed.forbidden, side_lane.end})
        # The repetition penalty would suppress the quotes of JSON.
        beside = tokenizer.special_ids | control | never | {special.unit_start, special.unit_end, side_lane.start}
        sets[SIDE_SET] = TokenSet(beside - {side_lane.end}, unremembered=range(vocab_size), pad_id=special.listen)
    return TokenSets.build([sets[index] for index in sorted(sets)], vocab_size, device)


def build(
    config: EngineConfig, *, shapes: Shapes | None = None, vocoder_shapes: VocoderShapes | None = None
) -> EngineParts:
    """Load a checkpoint and allocate its slots.

    Args:
        shapes, vocoder_shapes: sizes of the regions; None chooses them by device and settings.
    Raises: CheckpointError, ConfigError, TokenError for files that do not fit; SettingsError for a missing device or
        for too little memory for one session.
    """
    config = with_solver_steps(config)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    start = time.perf_counter()
    precision = config.precision
    model = load_model(config.model_path, device=device, dtype=dtype, precision=precision, pt_path=config.pt_path)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    loading = Loading(sum(tensor.n_bytes for tensor in list_tensors(config.model_path)[0]), seconds)
    LOG.info("%s", loading)
    tokenizer = Tokenizer.load(config.model_path)
    if tokenizer.highest_id >= model.config.vocab_size:
        expected = f"below {model.config.vocab_size} (vocab_size)"
        raise ConfigError("tokenizer: highest id", expected=expected, got=tokenizer.highest_id)
    flow_parts = None
    vocoder = config.token2wav_folder
    if model.config.init_tts and vocoder.is_dir():
        flow_parts = load_flow_and_hift(vocoder, device=device, dtype=dtype, hift_dtype=dtype, precision=precision)
    elif config.token2wav_path is not None:
        got = "a file" if config.token2wav_path.exists() else "no such folder"
        raise CheckpointError(str(config.token2wav_path), expected="a folder with a vocoder", got=got)
    pictures = load_preprocessor_config(config.model_path)
    parts = assemble(model, tokenizer, pictures, flow_parts, config, shapes=shapes, vocoder_shapes=vocoder_shapes)
    return replace(parts, loading=loading)


def assemble(
    model: OmniModel,
    tokenizer: Tokenizer,
    pictures: PreprocessorConfig,
    flow_parts: FlowAndHift | None,
    config: EngineConfig,
    *,
    shapes: Shapes | None = None,
    vocoder_shapes: VocoderShapes | None = None,
    vocoder_kernels: Kernels | None = None,
) -> EngineParts:
    """Allocate slots and regions for weights that are loaded.

    Args:
        flow_parts: None for an engine without sound.
        shapes, vocoder_shapes: as in `build`.
        vocoder_kernels: as in `Vocoder`; None: "auto" if `config.compile` enables kernels, else "plain".
    Raises: SettingsError for too little memory for one session, and for kernels that are not available.
    """
    by_kernels = uses_kernels(config.compile, model.device)
    apply_backend_flags(config.compile, model.device)  # the vocoder's modules depend on them
    if by_kernels:
        model.decode_copy = _keeps_decode_copy(model, flow_parts, config)
        _use_kernels(model)
    config = _with_kv_layout(model, flow_parts, config, by_kernels=model.kernels and model.device.type == "cuda")
    n_slots = config.max_sessions or max_sessions(model, flow_parts, config)
    LOG.info("sessions: at most %d, model.kv_layout %s", n_slots, config.kv_layout)
    llm_pages = _llm_pages(model, flow_parts, config, n_slots)
    # On a CPU each size costs seconds of compiling; without it a session alone need not wait for the work of all slots.
    few = model.device.type == "cpu" and n_slots <= CPU_SESSIONS and config.compile.enabled_on("cpu")
    batch = (n_slots,) if few else (*(size for size in BATCHES if size < n_slots), n_slots)
    compiled = shapes_of(model, batch, config) if by_kernels and shapes is None else None
    compiled_vocoder = VocoderShapes(batch=batch) if by_kernels and vocoder_shapes is None else None
    side_lane = side_lane_of(tokenizer, model.config)
    runner = Runner(
        model,
        token_sets(tokenizer, model.config.vocab_size, model.device, side_lane),
        n_slots=n_slots,
        llm_len=llm_len(model, config),
        tts_len=tts_len(model),
        shapes=shapes or shapes_of(model, batch, config, by_kernels=by_kernels),
        shared_scratch=by_kernels,
        early_slices=_early_slices(config),
        llm_pages=llm_pages,
        speech_pages=speech_pages(model, config, n_slots),
    )
    if is_eager := runs_eager(model, config):
        runner.state.read_in_place()
    vocoder = None
    if flow_parts is not None:
        vocoder = Vocoder(
            flow_parts.flow,
            flow_parts.hift,
            sizes=_flow_sizes(n_slots, config),
            shapes=vocoder_shapes or vocoder_shapes_of(batch, by_kernels=by_kernels, eager=is_eager),
            steps=(config.solver_steps,),
            kernels=vocoder_kernels or ("auto" if by_kernels else "plain"),
            seed=config.seed,
        )
        if compiled_vocoder is not None and not vocoder.regions.kernels:  # no kernel supports these sizes
            vocoder.use_plain(compiled_vocoder)
        _check_room_for_voices(vocoder, config.voices_s)
    return EngineParts(
        model=model,
        unit_steps=UnitSteps(runner, Speaker(runner) if model.config.init_tts else None),
        vocoder=vocoder,
        language=Language(tokenizer, image_rows=model.config.query_num, side_lane=side_lane),
        pictures=pictures,
        n_slots=n_slots,
        compiled_shapes=compiled,
        compiled_vocoder_shapes=compiled_vocoder,
    )


def _check_room_for_voices(vocoder: Vocoder, voices_s: float) -> None:
    """Check that all voices fit that the setting allows. Raises: SettingsError."""
    if vocoder.device.type != "cuda":
        return
    missing, (free, _) = vocoder.n_bytes - vocoder.held_bytes, torch.cuda.mem_get_info(vocoder.device)
    if missing > free:
        expected = f"seconds that fit {free / 2**30:.1f} GiB of free GPU memory"
        got = f"{voices_s:g}, which take up to {missing / 2**30:.1f} GiB more"
        raise SettingsError("duplex.voices_s", expected=expected, got=got)


def _keeps_decode_copy(model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig) -> bool:
    is_cuda = model.device.type == "cuda"
    keeps = config.keeps_decode_copy(torch.cuda.get_device_properties(model.device).total_memory if is_cuda else 0)
    if not keeps or config.decode_copy != "auto":
        return keeps
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    one = slot_bytes(model, flow_parts, _with_kv_layout(model, flow_parts, config, by_kernels=True))
    return has_room_for_copy(free, decode_copy_bytes(model), one, config)


def _with_kv_layout(
    model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig, *, by_kernels: bool
) -> EngineConfig:
    """`with_kv_layout` for a loaded model and the free memory of its device."""
    return with_kv_layout(config, by_kernels=by_kernels, n_fitting=partial(_n_fitting, model, flow_parts))


def _use_kernels(model: OmniModel) -> None:
    """Switch the model to its kernels before slots are allocated: its embeddings leave the device then."""
    try:
        model.use_kernels(True)
    except Exception as error:  # compiling tries again, reports it and falls back
        LOG.warning("kernels: %s", error)


def pick_device(name: str) -> torch.device:
    """The device that a setting names. Raises: SettingsError for a missing GPU."""
    if name == "auto":
        return torch.device(device_type(name))
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError("device", expected=f"one of {torch.cuda.device_count()} GPUs or cpu", got=name)
    return device


def device_type(name: str) -> str:
    """`cuda` or `cpu`, of the device that a setting names; whether that device exists is not checked."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name).type


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"dtype: expected the name of a torch type, got {name}"
    return dtype


def _flow_sizes(n_slots: int, config: EngineConfig) -> FlowSizes:
    frames = int(config.voices_s * MEL_RATE) // 2 * 2
    # One voice per session, and some that stay prepared for later sessions.
    return FlowSizes(
        n_sessions=n_slots,
        n_voices=n_slots + VOICES,
        voice_frames=frames,
        max_prompt=min(MAX_PROMPT_FRAMES, frames),
        max_steps=config.solver_steps,
    )


def _early_slices(config: EngineConfig) -> int:
    return EARLY_SLICES if config.early_pictures else 0


def max_sessions(model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig) -> int:
    """Sessions that fit the device's free memory. Raises: SettingsError if none fits."""
    if model.device.type != "cuda":
        return CPU_SESSIONS
    n_slots = _n_fitting(model, flow_parts, config)
    if n_slots < 1:
        needed = one_session_bytes(sum(slot_bytes(model, flow_parts, config).values()), weight_bytes(model))
        free, _ = torch.cuda.mem_get_info(model.device)
        expected = f"at least {needed / 2**30:.1f} GiB for one session and its work"
        raise SettingsError("free GPU memory", expected=expected, got=f"{free / 2**30:.1f} GiB")
    return n_slots


def _n_fitting(model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig) -> int:
    """Slots that a worker allocates by default on this GPU; 0 if none fits."""
    torch.cuda.empty_cache()
    one = sum(slot_bytes(model, flow_parts, config).values())
    free, total = torch.cuda.mem_get_info(model.device)
    return slots_in(free, total, one, weight_bytes(model))


def _llm_pages(
    model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig, n_slots: int
) -> PageSizes | None:
    """The pool of context rows: as large as a GPU's memory allows, and every slot has room for a default session.

    One slot has room for the longest context beside them.
    """
    if layout_of(config) == "slots":
        return None
    n_default, n_longest = llm_slot_rows(model, config) // PAGE_ROWS, -(-llm_len(model, config) // PAGE_ROWS)
    least, most = n_slots * n_default + n_longest - n_default, n_slots * n_longest
    if model.device.type != "cuda":
        return PageSizes(PAGE_ROWS, least)
    parts = slot_bytes(model, flow_parts, config)
    page_bytes = parts["llm"] // n_default
    others = (n_slots + 1) * (sum(parts.values()) - parts["llm"] + WORK_SLOT_BYTES)
    free, total = torch.cuda.mem_get_info(model.device)
    room = free - int(FREE_SHARE * total) - WORK_BYTES - others
    return PageSizes(PAGE_ROWS, min(max(room // page_bytes, least), most))


def slot_bytes(model: OmniModel, flow_parts: FlowAndHift | None, config: EngineConfig) -> dict[str, int]:
    """Bytes of one session's slot by part, without scratch slots, measured by allocating one.

    Of a pool of context rows, those of a default session count, and of a pool of speech rows those of an average turn.
    The longest context and the longest turn of one slot do not count. On the meta device nothing is allocated.
    """
    state = SlotState.allocate(
        model,
        n_slots=1,
        llm_len=llm_slot_rows(model, config),
        tts_len=tts_slot_rows(model, config),
        shared_scratch=True,
        early_slices=_early_slices(config),
    )
    n_bytes = state.slot_bytes()
    del state
    if flow_parts is not None:
        flow, hift, steps = flow_parts.flow, flow_parts.hift, (config.solver_steps,)
        few, more = (
            Vocoder(flow, hift, sizes=_flow_sizes(n, config), steps=steps, kernels="plain").n_bytes for n in (1, 2)
        )
        n_bytes["vocoder"] = more - few
    torch.cuda.empty_cache()
    return n_bytes
