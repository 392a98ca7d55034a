"""The timeline of a run: plain arithmetic on the number of steps, the same for a run and for its simulation."""

from dataclasses import dataclass

from pipetransformer.autodp.sampler import num_batches
from pipetransformer.config.schema import Config
from pipetransformer.planning.target import Progress


@dataclass(frozen=True)
class Timeline:
    """Steps of an epoch, of the run, and between two decisions."""

    num_samples: int
    batch_size: int
    steps_per_epoch: int
    num_steps: int
    decision_every: int

    @classmethod
    def of(cls, config: Config, num_samples: int) -> "Timeline":
        steps_per_epoch = num_batches(num_samples, config.batch_size)
        num_steps = steps_per_epoch * config.epochs
        interval = config.freeze.interval
        every = steps_per_epoch if interval is None else max(1, round(interval * num_steps))
        return cls(num_samples, config.batch_size, steps_per_epoch, num_steps, every)

    @property
    def num_epochs(self) -> int:
        return self.num_steps // self.steps_per_epoch

    def is_decision_step(self, step: int) -> bool:
        """Returns whether a freeze decision is due before this step, 0-based."""
        return step > 0 and step % self.decision_every == 0

    def steps_left(self, step: int) -> int:
        """Returns the optimizer steps until the run ends."""
        return self.num_steps - step

    def progress(self, step: int) -> Progress:
        """Returns how far the run has come before a step, counted in samples."""
        before = self._fraction_before(step)
        return Progress(before, self._fraction_before(step + 1) - before, self.num_epochs)

    def _fraction_before(self, step: int) -> float:
        epoch, index = divmod(step, self.steps_per_epoch)
        done = epoch * self.num_samples + min(index * self.batch_size, self.num_samples)
        return done / (self.num_epochs * self.num_samples)

    def epochs_left(self, step: int) -> range:
        """Returns the epochs that are not done before a step, 0-based."""
        return range(step // self.steps_per_epoch, self.num_epochs)

    def samples_read(self, step: int) -> int:
        """Returns the samples of the last epoch that have already been consumed; 0 in earlier epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        is_last = (epoch + 1) * self.steps_per_epoch >= self.num_steps
        return min(is_last * index * self.batch_size, self.num_samples)

    def samples_left(self, step: int) -> int:
        """Returns the training samples that are still read, each counted once."""
        return self.num_samples - self.samples_read(step)
