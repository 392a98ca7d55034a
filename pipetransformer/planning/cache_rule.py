"""Options under which no features of the training data can be stored: the same for a run and its simulation."""

from pipetransformer.config.sections import Cache
from pipetransformer.errors import UserError

RANDOM = (
    "the cache is off: the dataset's transform is random, and stored features would freeze it. "
    "cache.augmentation=first_draw keeps one draw of each sample, cache.augmentation=variants cache.variants=4 keeps "
    "four and uses them in turn, dataset.augment=false without random dataset.transforms draws nothing, and cache=off "
    "silences this"
)
NO_PAIR = (
    "the cache is off: cache.augmentation=flip_pair keeps a picture and its mirror image, and the dataset's transforms "
    "draw more than that. dataset.transforms=[RandomHorizontalFlip], with none that is random beside it and without "
    "dataset.augment, has such a pair; cache.augmentation=variants keeps several draws of any transform"
)
MIXED = (
    "the cache is off: dataset.mixup and dataset.cutmix mix each sample with another one in every step, and stored "
    "features are of single samples. Both at 0 leave the cache on, and cache=off silences this"
)


def obstacle(cache: Cache, is_random: bool, has_pair: bool, is_mixed: bool) -> str | None:
    """Returns why features of training samples cannot be stored, for the user; ``None`` where they can.

    Args:
        cache: With what is kept of a random transform.
        is_random: A training sample looks different in each epoch.
        has_pair: All that is random is whether it is mirrored.
        is_mixed: The samples of a batch are mixed with each other.
    """
    if is_mixed:
        return MIXED
    if is_random and cache.num_draws == 0:
        return RANDOM
    if is_random and cache.augmentation == "flip_pair" and not has_pair:
        return NO_PAIR
    return None


def refused(note: str) -> UserError:
    """Returns the error of a run that requires the cache and cannot have it."""
    return UserError(f"cache.require=true trains only with the cache, and {note}; cache.require=false trains without")
