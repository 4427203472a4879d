"""`python -m training.evaluate_vocoder --weights DIR --corpus DIR`: the vocoder, measured through served code.

Exports the folder, loads it strictly, and speaks held-out sentences of the talker's voice twice: from their own mel
(`copy`, HiFT alone) and, where the flow has weights, from their speech tokens in served chunks (`chain`: tokens, flow,
HiFT). Both are aligned with the recording, so spectra are compared frame by frame.
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import Token2WavParts, load_token2wav
from models.token2wav.prompt.campplus import CampPlus
from models.token2wav.prompt.features import log_mel_128, prompt_mel, resample
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import RATE_16K, SAMPLE_RATE, SAMPLES_PER_FRAME, SAMPLES_PER_TOKEN
from models.token2wav.stream.region_table import VocoderShapes, columns_for
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import CHUNK_TOKENS, TokenWindows
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_maker import VoiceMaker
from training.export import write_vocoder
from training.hift import synthesize
from training.loop import read_weights, weights_file
from training.sizes import FLOW, HIFT, SPEAKER, TOKENIZER
from training.speech.corpus import load_corpus
from training.speech.features import pitch
from training.speech.voices import TARGET
from training.weights import new_flow, new_hift, new_speaker_encoder, new_tokenizer

CEPSTRA = 13
BANDS_HZ = ((0, 1000), (1000, 4000), (4000, 8000), (8000, 12_000))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with hift.safetensors and the other stages")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocoder", type=Path, help="folder of the export (default: in --weights)")
    parser.add_argument("--int8", action="store_true", help="export matrices as int8, as the talker has them")
    parser.add_argument("--samples", type=Path, help="folder for sound files and their texts")
    parser.add_argument("--table", type=Path, help="file for the result")
    parser.add_argument("--count", type=int, default=10, help="sentences")
    args = parser.parse_args(argv)
    folder = args.vocoder or args.weights / "token2wav"
    write_vocoder(folder, *trained_networks(args.weights), int8=args.int8)
    chain = weights_file(args.weights, "flow").exists()
    table = evaluate(folder, args.corpus, args.samples, args.count, chain)
    print(json.dumps(table, indent=1))
    if args.table:
        args.table.write_text(json.dumps(table, indent=1))


def trained_networks(weights: Path | None) -> tuple[Flow, Hift, CampPlus, S3Tokenizer]:
    """The vocoder's networks with trained weights; a stage without weights, None for all, has its first values."""
    flow, hift, speaker, tokenizer = (
        new_flow(FLOW),
        new_hift(HIFT),
        new_speaker_encoder(SPEAKER),
        new_tokenizer(TOKENIZER),
    )
    networks: dict[str, nn.Module] = {"flow": flow, "hift": hift, "speaker": speaker, "tokenizer": tokenizer}
    for name, network in networks.items():
        if weights is not None and (file := weights_file(weights, name)).exists():
            network.load_state_dict(read_weights(file))
    return flow, hift, speaker, tokenizer


@torch.no_grad()
def evaluate(
    folder: Path, corpus_folder: Path, samples: Path | None, count: int, chain: bool = True
) -> dict[str, dict[str, float]]:
    """Mean distances of `copy` and `chain` from the recordings, over `count` held-out sentences."""
    corpus = load_corpus(corpus_folder, [TARGET])
    held_out = corpus.held_out.nonzero()[0].tolist()
    prompt_at = max(held_out, key=lambda index: min(int(corpus.lengths[index]), 200))
    parts = load_token2wav(folder)
    voice = VoiceMaker(parts, parts.config).make(corpus.wave(prompt_at), SAMPLE_RATE)
    vocoder = prepared(parts, voice) if chain else None
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number, index in enumerate([one for one in held_out if one != prompt_at][:count]):
        wave = torch.from_numpy(corpus.wave(index))
        spoken = {"copy": copied(parts.hift, prompt_mel(wave))}
        if vocoder is not None:
            low = log_mel_128(resample(wave, SAMPLE_RATE, RATE_16K))
            tokens, _ = parts.speech_tokenizer(low[None], torch.tensor([low.shape[1]]))
            spoken["chain"] = streamed(vocoder, vocoder.open(voice), tokens[0].tolist())
        for name, got in spoken.items():
            rows[name].append(distances(got, wave))
        if samples is not None:
            samples.mkdir(parents=True, exist_ok=True)
            for name, sound in {"source": wave, **spoken}.items():
                soundfile.write(samples / f"{number:02d}_{name}.wav", sound.numpy(), SAMPLE_RATE, subtype="PCM_16")
            (samples / f"{number:02d}.txt").write_text(corpus.texts[index])
    keys = rows["copy"][0]
    return {name: {key: round(float(np.mean([row[key] for row in found])), 4) for key in keys}
            for name, found in rows.items()}  # fmt: skip


def prepared(parts: Token2WavParts, voice: Voice) -> Vocoder:
    """A vocoder for one session with this voice."""
    sizes = FlowSizes(
        n_sessions=1,
        n_voices=1,
        max_steps=FLOW.n_timesteps,
        max_chunk=CHUNK_TOKENS + parts.config.encoder.lookahead,
        max_prompt=voice.n_frames,
        voice_frames=voice.n_frames,
    )
    shapes = VocoderShapes(
        batch=(1,), columns=(columns_for(voice.n_frames, sizes.max_chunk),), prompt=(voice.n_frames,)
    )
    vocoder = Vocoder(parts.flow, parts.hift, sizes=sizes, shapes=shapes, steps=(FLOW.n_timesteps,), kernels="plain")
    vocoder.prepare(voice)
    return vocoder


def copied(hift: Hift, mel: Tensor) -> Tensor:
    """Sound of one mel [T, 80] in one piece."""
    n_frames = torch.tensor([len(mel)])
    f0 = hift.f0(mel.T[None], n_frames)
    return synthesize(hift, mel[None], f0)[0]


def streamed(vocoder: Vocoder, session: int, speech_tokens: list[int]) -> Tensor:
    """Sound of speech tokens in served chunks, without the silence at the start of a turn."""
    windows, waves = TokenWindows(lookahead=vocoder.lookahead), []
    for start in range(0, len(speech_tokens), CHUNK_TOKENS):
        end = start + CHUNK_TOKENS
        for window in windows.push(speech_tokens[start:end], last=end >= len(speech_tokens)):
            [wave] = vocoder.speak([Chunk(session, window.speech_tokens, window.last)])
            waves.append(wave)
    vocoder.close(session)
    skipped = vocoder.lookahead * SAMPLES_PER_TOKEN
    return torch.cat(waves)[skipped : skipped + SAMPLES_PER_TOKEN * len(speech_tokens)]


def distances(got: Tensor, expected: Tensor) -> dict[str, float]:
    """Distances of a sound from the recording.

    Mean distance of log-mels; mel cepstral and log-spectral distance in dB; difference of levels in dB in the whole and
    in each band of BANDS_HZ; share of frames of which only one is voiced; median error of the pitch of the others.
    """
    n = min(len(got), len(expected)) // SAMPLES_PER_FRAME * SAMPLES_PER_FRAME
    a, b = prompt_mel(got[:n]), prompt_mel(expected[:n])
    bins = a.shape[1]
    order, place = torch.arange(1, CEPSTRA + 1)[:, None], torch.arange(bins)
    basis = math.sqrt(2 / bins) * torch.cos(math.pi * order * (place + 0.5) / bins)
    cepstral = 10 / math.log(10) * 2 / math.sqrt(bins) * ((a - b) @ basis.T).norm(dim=1).mean()
    spectra = [
        torch.stft(wave[:n], 1024, 240, window=torch.hann_window(1024), return_complex=True).abs().clamp_min(1e-4)
        for wave in (got, expected)
    ]
    levels = 20 * (spectra[0].log10() - spectra[1].log10())
    power = [spectrum.square().sum(1) for spectrum in spectra]
    hertz = torch.linspace(0, SAMPLE_RATE / 2, len(power[0]))
    bands = {"": hertz >= 0} | {f"_{low}_{high}_hz": (hertz >= low) & (hertz < high) for low, high in BANDS_HZ}
    f0, wanted_f0 = (pitch(wave[:n]) for wave in (got, expected))
    voiced = (f0 > 0) & (wanted_f0 > 0)
    return {
        "mel_distance": float((a - b).abs().mean()),
        "cepstral_distance_db": float(cepstral),
        "spectral_distance_db": float(levels.square().mean(0).sqrt().mean()),
        **{
            f"level{name}_db": float(10 * (power[0][at].sum() / power[1][at].sum()).log10())
            for name, at in bands.items()
        },
        "voicing_error": float(((f0 > 0) != (wanted_f0 > 0)).float().mean()),
        "pitch_error": float((f0[voiced] / wanted_f0[voiced] - 1).abs().median()) if voiced.any() else 1.0,
    }


if __name__ == "__main__":
    main()
