"""Numbers of 16 kHz sound that units are made of. Torch-free, for those who only count samples."""

SAMPLE_RATE = 16_000
HOP = 160
CLIP_SAMPLES = 30 * SAMPLE_RATE  # longest sound the encoder takes in one piece

UNIT_SAMPLES = SAMPLE_RATE
UNIT_FRAMES = UNIT_SAMPLES // HOP
UNIT_TOKENS = 10
# The first unit is longer by a look-ahead that stays ahead for the rest of the session; it is asked for
# in milliseconds (1035) and then cut to whole hops.
FIRST_UNIT_PADDED = 1035 * SAMPLE_RATE // 1000
FIRST_UNIT_SAMPLES = FIRST_UNIT_PADDED // HOP * HOP
