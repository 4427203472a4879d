"""Which stage reads which file, and the run over one golden directory."""

from collections.abc import Callable

import torch

from models.load import load_model
from models.omni import OmniModel
from tests.parity import audio_encoder, chat, code_sampling, image, llm, mel, sampler, tokenizer, tts, vision
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

Stage = Callable[[GoldenDir, Report], None]


def run_parity(path: str, only: str | None = None) -> tuple[Report, list[str]]:
    """Run the stages a directory has data for. Returns: all comparisons and the names of the stages that ran.

    A stage that raises is a miss, so that the others still run.
    """
    torch.manual_seed(0)
    golden, report = GoldenDir(path), Report()
    stages = [(name, stage) for name, stage in _stages(golden) if name.startswith(only or "")]
    with torch.no_grad():
        for name, stage in stages:
            try:
                stage(golden, report)
            except Exception as error:
                report.fail(name, "stage", f"{type(error).__name__}: {error}")
    return report, [name for name, _ in stages]


def _stages(golden: GoldenDir) -> list[tuple[str, Stage]]:
    stems = set(golden.stems())
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
        ("code_sampling", "tts" in stems, code_sampling.run),
        ("tts", "tts" in stems, with_model(tts.run)),
        ("sampler", (golden.path / "cases" / "sampler.json").exists(), sampler.run),
        *(
            (stem, True, with_model(chat.run, stem=stem))
            for stem in golden.stems("chat_")
            if "input_ids" in golden.tensors(stem)
        ),
    ]
    return [(name, stage) for name, wanted, stage in present if wanted]
