"""Whole answers of Qwen3-TTS: rows of the prompt, text that follows, logits, codes, processed scores."""

import json
from typing import Any

import numpy as np
import torch

from models.qwen3_tts import regions
from models.qwen3_tts.codec.config import FRAME_SAMPLES
from models.qwen3_tts.config import Qwen3TTSConfig, parse_qwen3_tts_config
from models.qwen3_tts.draws import final_scores
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import PromptText, SpeechPrompt, SpeechVoice, lay_out
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import CodeSampling, FrameSampling
from models.qwen3_tts.state import FIRST, REST, TalkerState
from tests.parity.golden import GoldenDir, read_tensors
from tests.parity.qwen3_tts.codec import WAVE_TOLERANCE, decoded, tokenizer_of
from tests.parity.qwen3_tts.talker import HEAD, override
from tests.parity.report import Report

VALUES = 5e-5
Tensors = dict[str, torch.Tensor]


class Case:
    """One recorded answer, or several in one batch."""

    def __init__(self, golden: GoldenDir, stem: str):
        about = golden.manifest["cases"][stem]
        self.stem, self.settings, self.about = stem, about["kwargs"], about
        self.tensors, _ = read_tensors(golden.path / "generate", stem)
        raw = json.loads((golden.path / about["model"] / about["config"]).read_text())
        self.config: Qwen3TTSConfig = parse_qwen3_tts_config(raw)
        self.model: Qwen3TTS = load_qwen3_tts(golden.model(about["model"]), config=self.config)
        override(self.model, self.tensors, about["overrides"])
        self.columns = golden.kept_rows(HEAD, about["model"])
        self.n = sum(name.startswith("input_ids.") for name in self.tensors)
        reference = golden.tensors("reference")
        self.prompts = [self._prompt(row, reference) for row in range(self.n)]

    @property
    def sampling(self) -> FrameSampling:
        given = self.settings

        def codes(prefix: str, sampled: str) -> CodeSampling:
            names = ("temperature", "top_k", "top_p")
            stated = {name: given[prefix + name] for name in names if prefix + name in given}
            return CodeSampling(greedy=not given.get(sampled, True), **stated)

        penalty = given.get("repetition_penalty", 1.05)
        return FrameSampling(codes("", "do_sample"), codes("subtalker_", "subtalker_dosample"), penalty)

    def _of(self, name: str, row: int) -> Any:
        value = self.settings.get(name)
        return value[row] if isinstance(value, list) else value

    def _ids(self, name: str, row: int) -> list[int]:
        ids = self.tensors.get(f"{name}.{row}")
        return [] if ids is None else ids[0].tolist()

    def _prompt(self, row: int, reference: Tensors) -> SpeechPrompt:
        ids, transcript = self._ids("input_ids", row), self._ids("ref_ids", row)
        opening, second, third = ids[:3]
        texts = PromptText(
            role=(opening, second, third),
            text=tuple(ids[3:-5]),
            reference=tuple(transcript[3:-2]),
            instruct=tuple(self._ids("instruct_ids", row)),
        )
        is_clone = self.about["method"] == "generate_voice_clone"
        return lay_out(
            self.config,
            texts,
            self._voice(row, is_clone, reference if transcript else {"spk_embedding": reference["spk_embedding"]}),
            language=self._of("language", row) or "auto",
            streams_text=not self.settings.get("non_streaming_mode", not is_clone),
        )

    def _voice(self, row: int, is_clone: bool, reference: Tensors) -> SpeechVoice:
        if is_clone:
            codes = reference.get("ref_code")
            return SpeechVoice(
                embedding=reference["spk_embedding"].numpy(), reference_codes=None if codes is None else codes.numpy()
            )
        speaker = self._of("speaker", row)
        return SpeechVoice(name=speaker.lower() if speaker else None)


def run_generate(golden: GoldenDir, report: Report) -> None:
    """Every recorded answer: its prompt, and its codes, drawn anew or, where they were sampled, forced."""
    folder = GoldenDir(golden.path / "generate")
    for stem in folder.stems():
        case = Case(golden, stem)
        _compare_prompts(case, report)
        if "generated_code0" in case.tensors:
            _compare_frames(case, report)
        _compare_sound(golden, case, report)


def _compare_prompts(case: Case, report: Report) -> None:
    expected, mask = case.tensors.get("prefill_embeds"), case.tensors["prefill_mask"].bool()
    talker = case.model.talker
    for row, prompt in enumerate(case.prompts):
        name = f"{case.stem} {row}"
        speaker = np.zeros(case.config.talker_config.hidden_size, np.float32)
        arrays = (prompt.text, prompt.codes, speaker if prompt.speaker is None else prompt.speaker)
        text, codes, speakers = (torch.from_numpy(array)[None] for array in arrays)
        rows = regions.prompt_rows(case.model, text, codes, speakers, torch.tensor([prompt.speaker_row]))
        if expected is not None:
            report.close(name, "prompt", rows[0], expected[row, mask[row]], VALUES)
        if (trailing := case.tensors.get("trailing_text")) is not None:
            pads = [case.config.tts_pad_token_id] * (trailing.shape[1] - len(prompt.trailing))
            ids = torch.tensor([*prompt.trailing, *pads])
            report.close(name, "text that follows", talker.rows_of_text(ids), trailing[row], VALUES)


def _compare_frames(case: Case, report: Report) -> None:
    """Run the frames beside the recorded ones: greedy codes are drawn, sampled ones forced."""
    tensors, longest = case.tensors, max(len(prompt) for prompt in case.prompts)
    first_codes = tensors["generated_code0"]
    n_tokens = first_codes.shape[1]
    runner = TalkerRunner(case.model, n_slots=case.n, max_len=longest + n_tokens)
    slots = torch.arange(case.n)
    for slot in range(case.n):
        runner.open(slot, case.sampling, seed=0, max_frames=n_tokens)
    runner.feed(dict(enumerate(case.prompts)))
    recorder = _Recorder(case, is_forced="talker_scores" in tensors)
    bound = (case.model, runner.state, recorder)
    codes = [regions.first_frame(*bound, slots, None)[0]]
    while len(codes) < n_tokens:
        codes.append(regions.frame(*bound, slots, runner.max_len, None)[0])
    drawn = torch.stack(codes, dim=1)
    eos_id = case.config.talker_config.codec_eos_token_id
    for slot in range(case.n):
        name, expected = f"{case.stem} {slot}", tensors.get(f"codes.{slot}")
        n_frames = n_tokens - 1 if expected is None else len(expected)
        if not recorder.is_forced:
            report.equal_if(name, "codes", drawn[slot, :n_frames], expected)
            n_drawn = int(runner.state.frames[slot])
            report.equal(name, "frames", n_drawn, _frames(first_codes[slot], eos_id))
        recorder.compare(name, slot, n_frames, report)


def _compare_sound(golden: GoldenDir, case: Case, report: Report) -> None:
    """Sound of the recorded codes; after an in-context prompt, that of the codes which continue the reference."""
    for row in range(case.n):
        codes, expected = (case.tensors.get(f"{name}.{row}") for name in ("codes", "wav"))
        if codes is None or expected is None:
            continue
        before = torch.from_numpy(case.prompts[row].codes)
        is_reference = (before >= 0).all(1)
        whole = torch.cat((before[is_reference], codes))
        sound = decoded(tokenizer_of(golden).decoder, whole, [len(whole)])
        sound = sound[int(is_reference.sum()) * FRAME_SAMPLES :]
        report.close(f"{case.stem} {row}", "sound", sound, expected, WAVE_TOLERANCE)


def _frames(first_codes: torch.Tensor, eos_id: int) -> int:
    """Frames that these codes give, the last one counted."""
    ended = (first_codes == eos_id).nonzero()
    return int(ended[0]) if len(ended) else len(first_codes)


class _Recorder:
    """Draws in place of `draw_codes`: notes logits and scores, and returns recorded codes in forced cases."""

    def __init__(self, case: Case, is_forced: bool):
        self.case, self.is_forced = case, is_forced
        self.logits: list[torch.Tensor] = []  # of each frame
        self.scores: list[torch.Tensor] = []
        self.residual: list[list[torch.Tensor]] = []  # logits of each frame and group
        self.residual_scores: list[list[torch.Tensor]] = []

    def __call__(
        self,
        scores: torch.Tensor,
        slots: torch.Tensor,
        state: TalkerState,
        draws: torch.Tensor,
        which: int,
        candidates: int | None,
    ) -> torch.Tensor:
        model, group = self.case.model, 0 if which == FIRST else len(self.residual[-1]) + 1
        frame = len(self.logits) - (group > 0)
        if group == 0:
            self.logits.append(model.talker.logits(state.hidden[slots], model.backend))
            self.scores.append(final_scores(scores, slots, state, FIRST) if self.is_forced else scores)
            self.residual.append([])
            self.residual_scores.append([])
        else:
            self.residual[-1].append(scores)
            if self.is_forced:
                self.residual_scores[-1].append(final_scores(scores, slots, state, REST))
        if not self.is_forced:
            return scores.argmax(1)
        if group == 0:
            return self.case.tensors["generated_code0"][:, frame]
        codes = [self.case.tensors[f"codes.{row}"] for row in range(self.case.n)]
        return torch.stack([one[min(frame, len(one) - 1), group] for one in codes])

    def compare(self, name: str, slot: int, n_frames: int, report: Report) -> None:
        """Compare one slot's frames, and the logits of the code after them."""
        tensors, config = self.case.tensors, self.case.config.talker_config
        tokens = slice(0, n_frames + 1)

        def first(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(values, dim=1)[slot, tokens]

        def rest(values: list[list[torch.Tensor]]) -> torch.Tensor:
            return torch.stack([torch.stack(one, dim=1) for one in values], dim=1)[slot, :n_frames]

        if (expected := tensors.get("talker_logits")) is not None:
            report.close(name, "logits", first(self.logits)[:, self.case.columns], expected[slot, tokens], VALUES)
        if (expected := tensors.get("pred_logits")) is not None:
            report.close(name, "residual logits", rest(self.residual), expected[slot, :n_frames], VALUES)
        if (expected := tensors.get("talker_scores_codes_eos")) is not None:
            columns = [*range(config.n_codes), config.codec_eos_token_id]
            _compare_scores(name, "scores", first(self.scores)[:, columns], expected[slot, tokens], report)
        if self.is_forced:
            _compare_scores(name, "scores", first(self.scores), tensors["talker_scores"][slot, tokens], report)
            got = rest(self.residual_scores)
            _compare_scores(name, "residual scores", got, tensors["pred_scores"][slot, :n_frames], report)


def _compare_scores(name: str, what: str, got: torch.Tensor, expected: torch.Tensor, report: Report) -> None:
    """Which codes are left, exactly, and their scores."""
    kept = expected.isfinite()
    report.equal(name, f"{what}: number of differing codes", int((got.isfinite() != kept).sum()), 0)
    report.close(name, what, got.masked_fill(~kept, 0), expected.masked_fill(~kept, 0), VALUES)
