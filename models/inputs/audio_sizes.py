"""Sample and frame counts of 16 kHz sound: clips, units and the longer first unit. Torch-free."""

SAMPLE_RATE = 16_000
HOP = 160
CLIP_SAMPLES = 30 * SAMPLE_RATE  # longest sound of one encoder call

UNIT_SAMPLES = SAMPLE_RATE
UNIT_FRAMES = UNIT_SAMPLES // HOP
UNIT_TOKENS = 10  # audio embeddings of a unit
# The first unit is longer by a lookahead, which then lasts for the whole session. The released model defines it in
# milliseconds (1035) and truncates it to whole hops.
FIRST_UNIT_PADDED = 1035 * SAMPLE_RATE // 1000
FIRST_UNIT_SAMPLES = FIRST_UNIT_PADDED // HOP * HOP
