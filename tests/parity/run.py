"""The stages with the files that they read, and the run over one golden directory."""

from collections.abc import Callable

import torch

from models.load import load_model
from models.omni import OmniModel
from tests.parity.golden import GoldenDir
from tests.parity.omni import (
    audio_encoder,
    chat,
    image,
    llm,
    mel,
    rope,
    sampler,
    speech_sampling,
    speech_stream,
    text_chunks,
    tokenizer,
    tts,
    vision,
)
from tests.parity.qwen3_tts import codec, generate, talker
from tests.parity.report import Report
from tests.parity.token2wav import (
    campplus,
    cfm,
    conformer,
    estimator,
    features,
    flow,
    hift,
    s3_tokenizer,
    s3gen,
    s3gen_source,
    vocode,
)

Stage = Callable[[GoldenDir, Report], None]

VOCODER: list[tuple[str, str, Stage]] = [  # name, prefix of its files
    ("features", "features_", features.run),
    ("campplus", "campplus_", campplus.run),
    ("s3_tokenizer", "s3tokenizer_", s3_tokenizer.run),
    ("conformer", "conformer_", conformer.run),
    ("estimator", "estimator_", estimator.run),
    ("cfm", "cfm_", cfm.run),
    ("flow", "e2e_", flow.run),
    ("hift", "hift_", hift.run),
    ("vocode", "e2e_", vocode.run),
    ("s3gen", "s3gen_estimator_", s3gen.run),
    ("s3gen_source", "s3gen_source_", s3gen_source.run),
]

CODEC: list[tuple[str, str, Stage]] = [  # of Qwen3-TTS; as VOCODER
    ("speech_decoder", "speech_decoder", codec.run_decoder),
    ("speech_encoder", "speech_encoder", codec.run_encoder),
    ("speaker_encoder", "speaker_encoder", codec.run_speaker),
]

TALKER: list[tuple[str, str, Stage]] = [  # of Qwen3-TTS; as VOCODER
    ("talker", "talker_", talker.run_talkers),
    ("code_predictor", "predictor_", talker.run_predictors),
]


def run_parity(path: str, only: str | None = None) -> tuple[Report, list[str]]:
    """Run the stages that a directory has data for. Returns: all comparisons, and the stages that made one.

    A stage that raises is a miss, so that the others still run.
    """
    torch.manual_seed(0)
    golden, report = GoldenDir(path), Report()
    stages = [(name, stage) for name, stage in _stages(golden) if name.startswith(only or "")]
    with torch.no_grad():
        for name, stage in stages:
            n_before = len(report.checks)
            try:
                stage(golden, report)
            except Exception as error:
                report.fail(name, "stage", f"{type(error).__name__}: {error}")
            if len(report.checks) == n_before:
                report.empty.append(name)
    return report, [name for name, _ in stages if name not in report.empty]


def _stages(golden: GoldenDir) -> list[tuple[str, Stage]]:
    stems, cases = set(golden.stems()), {file.stem for file in (golden.path / "cases").glob("*.json")}
    models: list[OmniModel] = []

    def with_model(run: Callable[..., None], **more: str) -> Stage:
        def stage(golden: GoldenDir, report: Report) -> None:
            if not models:
                models.append(load_model(golden.checkpoint))
            run(golden, models[0], report, **more)

        return stage

    present: list[tuple[str, bool, Stage]] = [
        ("tokenizer", golden.json("real_tokenizer_cases.json") is not None, tokenizer.run),
        ("image", "image_preprocess" in stems or golden.json("image_grid_table.json") is not None, image.run),
        ("mel", any(s.startswith("mel_") for s in stems), mel.run),
        ("vpm", "vpm" in stems, with_model(vision.run_vpm)),
        ("resampler", "resampler" in stems, with_model(vision.run_resampler)),
        ("vision_e2e", "vision_e2e" in stems, with_model(vision.run_images)),
        ("apm_full", "apm_full" in stems, with_model(audio_encoder.clips)),
        *((stem, True, with_model(audio_encoder.units, stem=stem)) for stem in golden.stems("apm_stream_")),
        ("audio_projection", "audio_projection" in stems, with_model(audio_encoder.projection)),
        ("llm", "llm" in stems, with_model(llm.run)),
        ("code_sampling", "tts" in stems, speech_sampling.run),
        ("tts", "tts" in stems, with_model(tts.run)),
        ("sampler", "sampler" in cases, sampler.run),
        ("rope", "rope" in cases, rope.run),
        ("speech_stream", "tts_stream" in cases, with_model(speech_stream.run)),
        (text_chunks.STAGE, text_chunks.STAGE in cases, with_model(text_chunks.run)),
        *((stem, stem != tokenizer.MEDIA, with_model(chat.run, stem=stem)) for stem in golden.stems("chat_")),
        *((name, bool(golden.stems(prefix)), stage) for name, prefix, stage in VOCODER + CODEC + TALKER),
        ("speech_frames", (golden.path / "generate").is_dir(), generate.run_generate),
    ]
    return [(name, stage) for name, wanted, stage in present if wanted]
