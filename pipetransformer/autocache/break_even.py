"""From which level on reading features is cheaper than computing them."""

from pipetransformer.autopipe.limit import fill_seconds
from pipetransformer.autopipe.profile import Profile


def read_seconds(profile: Profile, level: int) -> float:
    """Seconds per sample to read the output of block ``level``."""
    return profile.cache_read_s_per_byte * profile.layers[level].output_bytes


def forward_seconds(profile: Profile, level: int) -> float:
    """Seconds per sample to compute it, launch overhead left out."""
    return fill_seconds(profile, 0, level, 1)


def break_even(profile: Profile) -> int | None:
    """The lowest level that pays; ``None`` where none does. All higher ones pay too where outputs are equally wide."""
    levels = range(1, len(profile.layers) - 1)
    return next((level for level in levels if read_seconds(profile, level) < forward_seconds(profile, level)), None)
