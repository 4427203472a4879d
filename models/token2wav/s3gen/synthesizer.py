"""S3Gen for many requests: prepares voices and speaks utterances in batches, at bucketed sizes.

The host side: checks, buckets and padding. An utterance has the sound of `S3Gen.sound`, whatever shares its batch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import SettingsError
from models.token2wav.prompt.source_tokens import source_log_mel, token_windows
from models.token2wav.s3gen import regions
from models.token2wav.s3gen.model import S3Gen, S3Voice, draw, prompt_part
from models.token2wav.s3gen.region_table import S3Regions, S3Shapes
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLES_PER_FRAME
from models.token2wav.voice.voice_regions import describe_voice, read_tokens

CONTEXT_SHARE = 5  # of a window of a long sound: the part at each end that is read only for its neighbours


class Utterance(NamedTuple):
    """One request. Equal seeds give equal sound."""

    speech_tokens: Tensor  # [n] int64
    voice: S3Voice
    seed: int = 0


class S3Synthesizer:
    """One S3Gen with its regions."""

    def __init__(self, model: S3Gen, shapes: S3Shapes | None = None, steps: tuple[int, ...] | None = None):
        """Arguments as `S3Regions`; shapes: None = the default ones."""
        self.model, self.shapes = model, shapes or S3Shapes()
        self.regions = S3Regions(model, self.shapes, steps)

    def release(self) -> None:
        """Delete graphs and run the plain modules again. Compiled code in the compiler goes with `reset_compiler`."""
        self.regions.drop_graphs()
        self.regions.uncompile()
        self.regions.use_kernels("plain")

    def prepare(self, sounds: Sequence[tuple[Tensor, int]]) -> list[S3Voice]:
        """The voices of the first 10 s of sounds, as `S3Gen.prepare_voice`.

        Args:
            sounds: [n] mono float samples in [-1, 1], at least 80 ms, and their rate in Hz.
        Raises: AudioError.
        """
        voices: list[S3Voice] = []
        for rows in self._batches(len(sounds)):
            voices += self._prepare(sounds[rows])
        return voices

    def _prepare(self, sounds: Sequence[tuple[Tensor, int]]) -> list[S3Voice]:
        features = [self.model.prompt_features(sound, rate) for sound, rate in sounds]
        mels, log_mels, energies = zip(*features, strict=True)
        tokens = self._read(log_mels)
        size = self.shapes.fit("s3_speaker", "batch", len(sounds))
        length = self.shapes.fit("s3_speaker", "sound", max(len(part) for part in energies))
        counts = self._counts([len(part) for part in energies], size)
        rows = _stacked([part.T for part in energies], size, length).transpose(1, 2).contiguous()
        speakers = self.regions.run(describe_voice, rows, counts).clone()
        return [S3Voice(prompt_part(tokens[row], mel), mel, speakers[row]) for row, mel in enumerate(mels)]

    def speech_tokens(self, wave: object, rate: int) -> Tensor:
        """Speech tokens [n] int64 of a sound of any length on the CPU, 25 a second: what a conversion speaks.

        Args:
            wave: [n] mono float samples in [-1, 1], at least 25 ms.
            rate: Hz.
        Raises: AudioError.
        """
        log_mel = source_log_mel(wave, rate, self.model.config.tokenizer.n_mels).to(self.model.device)
        window = self.shapes.sound[-1]
        parts = list(token_windows(log_mel.shape[1], window, window // CONTEXT_SHARE // 4 * 4))
        kept: list[Tensor] = []
        for rows in self._batches(len(parts)):
            tokens = self._read([log_mel[:, part.start : part.end] for part in parts[rows]])
            kept += (tokens[row, part.first : part.last] for row, part in enumerate(parts[rows]))
        return torch.cat(kept).cpu()

    def _read(self, log_mels: Sequence[Tensor]) -> Tensor:
        """Speech tokens [B, T] of log-mels [n_mels, F] of different lengths; B may be larger than their number."""
        size = self.shapes.fit("s3_tokens", "batch", len(log_mels))
        length = self.shapes.fit("s3_tokens", "sound", max(part.shape[1] for part in log_mels))
        counts = self._counts([part.shape[1] for part in log_mels], size)
        return self.regions.run(read_tokens, _stacked(log_mels, size, length), counts).clone()

    def speak(self, utterances: Sequence[Utterance], *, n_steps: int | None = None) -> list[Tensor]:
        """Sounds of utterances, in their order, [480 T] float32 at 24 kHz each.

        Utterances with the same size of bucket share batches.

        Args:
            utterances: tokens, voices and seeds.
            n_steps: one of the numbers of Euler steps of the regions; None = the first of them.
        Raises: ShapeError beyond the largest bucket; TokenError; SettingsError.
        """
        n_steps = next(iter(self.regions.grids)) if n_steps is None else n_steps
        if n_steps not in self.regions.grids:
            raise SettingsError("euler steps", expected=f"one of {tuple(self.regions.grids)}", got=n_steps)
        by_bucket: dict[int, list[int]] = {}
        for number, utterance in enumerate(utterances):
            self.model.check(utterance.speech_tokens, utterance.voice)
            bucket = self.shapes.fit("s3_solve", "speech_tokens", len(utterance.speech_tokens))
            self.shapes.fit("s3_solve", "prompt", len(utterance.voice.mel) // FRAMES_PER_TOKEN)
            by_bucket.setdefault(bucket, []).append(number)
        sounds: dict[int, Tensor] = {}
        for bucket, numbers in sorted(by_bucket.items()):
            for rows in self._batches(len(numbers)):
                part = [utterances[number] for number in numbers[rows]]
                sounds |= zip(numbers[rows], self._speak(part, bucket, n_steps), strict=True)
        return [sounds[number] for number in range(len(utterances))]

    def _speak(self, utterances: list[Utterance], bucket: int, n_steps: int) -> list[Tensor]:
        device, flow = self.model.device, self.model.config.flow
        size = self.shapes.fit("s3_solve", "batch", len(utterances))
        prompts = [prompt_part(one.voice.speech_tokens, one.voice.mel) for one in utterances]
        n_prompt = [len(one.voice.mel) for one in utterances]
        most = self.shapes.fit("s3_solve", "prompt", max(len(part) for part in prompts))
        length = most + bucket
        pairs = zip(prompts, utterances, strict=True)
        both = [torch.cat([prompt.to(device), one.speech_tokens.to(device)]) for prompt, one in pairs]
        n_frames = [FRAMES_PER_TOKEN * len(part) for part in both]
        drawn = [draw(one.seed, flow.n_mels, n) for one, n in zip(utterances, n_frames, strict=True)]
        n_tokens, n_new = (
            self._counts(values, size)
            for values in ([len(part) for part in both], [n - p for n, p in zip(n_frames, n_prompt, strict=True)])
        )
        # Each region may reuse the memory of the one before.
        mu = self.regions.run(regions.encode_tokens, _stacked(both, size, length), n_tokens).clone()
        mel = self.regions.run(
            regions.solve_mel,
            mu,
            self._counts(n_prompt, size),
            self._counts(n_frames, size),
            _stacked([one.voice.mel.T.to(device) for one in utterances], size, FRAMES_PER_TOKEN * length),
            _stacked([one.voice.speaker.to(device) for one in utterances], size, flow.speaker_dim),
            _stacked(
                [noise[:, :n].to(device) for (noise, _), n in zip(drawn, n_frames, strict=True)],
                size,
                FRAMES_PER_TOKEN * length,
            ),
            n_new=FRAMES_PER_TOKEN * bucket,
            n_steps=n_steps,
        )
        mel = mel.clone()
        f0 = self.regions.run(regions.find_pitch, mel, n_new).clone()
        phase = _stacked([phase.to(device) for _, phase in drawn], size, len(drawn[0][1]))
        wave = self.regions.run(regions.decode_mel, mel, f0, n_new, phase)
        counts = (n - p for n, p in zip(n_frames, n_prompt, strict=True))
        return [wave[row, : SAMPLES_PER_FRAME * n].clone() for row, n in enumerate(counts)]

    def _batches(self, n: int) -> Iterator[slice]:
        most = self.shapes.batch[-1]
        return (slice(start, start + most) for start in range(0, n, most))

    def _counts(self, values: Sequence[int], size: int) -> Tensor:
        """[size] int64; rows of padding repeat the first one's count, so that they stay finite."""
        return torch.tensor([*values, *[values[0]] * (size - len(values))], device=self.model.device)


def _stacked(parts: Sequence[Tensor], size: int, length: int) -> Tensor:
    """[size, ..., length]: each part padded with zeros at its end; rows of padding are zero."""
    rows = [F.pad(part, (0, length - part.shape[-1])) for part in parts]
    return torch.stack([*rows, *[torch.zeros_like(rows[0])] * (size - len(rows))])
