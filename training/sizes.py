"""Sizes of the talker's vocoder, whose folder `models.token2wav` loads as it loads the released one."""

from models.token2wav.settings import (
    CampPlusConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    HiftConfig,
    S3TokenizerConfig,
)

SPEAKER_DIM = 64

FLOW = FlowConfig(
    speaker_dim=SPEAKER_DIM,
    encoder=EncoderConfig(width=128, heads=4, inner=512, n_layers=2, n_up_layers=2),
    estimator=DiTConfig(width=192, heads=3, head_dim=64, depth=4, mlp_ratio=2.0),
    n_timesteps=5,
)
HIFT = HiftConfig(base_channels=160, f0_channels=128)
SPEAKER = CampPlusConfig(embedding=SPEAKER_DIM, growth=8, bottleneck=4, channels=32, front_channels=8)
TOKENIZER = S3TokenizerConfig(width=192, n_layers=4)
