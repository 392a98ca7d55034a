"""The history of a run: its plans, its time, and its comparison with the best static plan and the physical limit."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipetransformer.autopipe.breakdown import StepParts
from pipetransformer.autopipe.cost import kind_of_plan
from pipetransformer.autopipe.limit import Fill, Phase, limit
from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import StageMesh
from pipetransformer.planning.planner import Planner

NUM_WARMUP_STEPS = 2  # the first steps of a plan allocate and connect
NUM_TIMED_STEPS = 6  # after them, by which a plan is compared with its prediction


@dataclass
class PlanRecord:
    """One plan in force.

    Attributes:
        step: First step under it, 0-based.
        transition_seconds: Seconds of the transition to it, the filling of the cache and ``lost_seconds`` included.
        lost_seconds: Seconds of steps that were undone here, and are trained again.
        num_samples_left: Training samples that are still read from then on, each counted once, or once for each draw.
        choice: The planner's reason to go to this plan or to stay, in numbers.
        step_seconds: Of each step.
        step_sizes: For each step the padded length of its batch over that of a typical batch, for which steps are
            predicted.
        traced_step: The one of its steps that was traced, 0-based.
        num_devices, device_name: Of the run while it was in force; ``None`` in a prediction and in states of earlier
            releases.
    """

    plan: Plan
    step: int
    reason: str
    transition_seconds: float = 0.0
    num_samples_left: int = 0
    choice: str = ""
    num_samples: int = 0
    step_seconds: list[float] = field(default_factory=list)
    step_sizes: list[float] = field(default_factory=list)
    traced_step: int | None = None
    num_devices: int | None = None
    device_name: str | None = None
    lost_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return plan_dict(self.plan) | {
            "step": self.step,
            "transition_seconds": self.transition_seconds,
            "reason": self.reason,
            "choice": self.choice,
            "num_steps": len(self.step_seconds),
            "median_step_s": self.typical_step_s,
        }

    @property
    def typical_step_s(self) -> float | None:
        """Median of :attr:`settled_seconds`; ``None`` before the first step."""
        return statistics.median(self.settled_seconds) if self.step_seconds else None

    @property
    def settled_seconds(self) -> list[float]:
        """Seconds of each step after the first ones, each as long as it would have taken on a typical batch.

        The traced one counts only where there is no other.
        """
        steps = list(enumerate(self.typical_seconds))
        steps = steps[NUM_WARMUP_STEPS:] or steps
        steps = [step for step in steps if step[0] != self.traced_step] or steps
        return [seconds for _, seconds in steps]

    @property
    def seconds(self) -> float:
        """Seconds of its steps and of the transition to it."""
        return sum(self.step_seconds) + self.transition_seconds

    @property
    def typical_seconds(self) -> list[float]:
        """Seconds of each step over the size of its batch."""
        return [seconds / size for seconds, size in zip(self.step_seconds, self.step_sizes, strict=True)]

    @property
    def num_typical_steps(self) -> float:
        """Steps of a typical batch that are as much work as its steps."""
        return sum(self.step_sizes)


class RunHistory:
    """The record of every step and every transition of a run.

    Args:
        may_cache: The run may read frozen layers' output from a cache, even if that never pays.
        baseline: The run begins with steps under the best static plan of each kind, with which it is compared.
    """

    def __init__(self, num_blocks: int, may_cache: bool, baseline: bool = False) -> None:
        self._num_blocks, self._may_cache, self._baseline = num_blocks, may_cache, baseline
        self.entries: list[PlanRecord] = []

    def plan(self, entry: PlanRecord) -> None:
        self.entries.append(entry)

    def step(self, num_samples: int, seconds: float, size: float = 1.0) -> None:
        """Takes note of a step; ``size`` is one of :attr:`PlanRecord.step_sizes`."""
        self.entries[-1].num_samples += num_samples
        self.entries[-1].step_seconds.append(seconds)
        self.entries[-1].step_sizes.append(size)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return {"entries": [asdict(entry) for entry in self.entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`."""
        entries = [dict(entry) for entry in state["entries"]]
        for entry in entries:
            entry["plan"] = plan_from_dict(entry["plan"])
            entry.setdefault("step_sizes", [1.0] * len(entry["step_seconds"]))  # earlier releases have none
        self.entries = [PlanRecord(**entry) for entry in entries]

    def is_timed(self) -> bool:
        """Returns True when the plan in force has just made as many steps as tell its time."""
        return len(self.entries[-1].step_seconds) == NUM_WARMUP_STEPS + NUM_TIMED_STEPS

    def timed(self, planner: Planner) -> list[tuple[Plan, float]]:
        """Returns each plan that was timed on the present devices, and its median step in seconds; the oldest first."""
        known = ((entry.plan, entry.typical_step_s) for entry in self._here(planner) if _is_timed(entry))
        return [(plan, seconds) for plan, seconds in known if seconds is not None]

    def static_steps(self, planner: Planner) -> list[tuple[Plan, float, int]]:
        """Returns each plan with nothing frozen that was timed, its median step in seconds and its number of steps.

        Steps on the devices that the run had before it went on with others are none of these.
        """
        timed = [entry for entry in self._here(planner) if not entry.plan.num_frozen and _is_timed(entry)]
        pooled: list[tuple[Plan, list[float]]] = []
        for entry in timed:
            known = next((own for plan, own in pooled if same_arrangement(plan, entry.plan)), None)
            if known is None:
                pooled.append((entry.plan, known := []))
            known += entry.settled_seconds
        return [(plan, statistics.median(seconds), len(seconds)) for plan, seconds in pooled]

    def _here(self, planner: Planner) -> list[PlanRecord]:
        """Returns the plans on the devices that the run has now: what it took on others is compared with nothing."""
        return [entry for entry in self.entries if _is_here(entry, planner)]

    @property
    def num_samples(self) -> int:
        return sum(entry.num_samples for entry in self.entries)

    @property
    def train_seconds(self) -> float:
        """Steps, transitions and cache filling; not start-up and not evaluation."""
        return sum(entry.seconds for entry in self.entries)

    def summary(self, planner: Planner) -> dict[str, Any]:
        """Returns the run in figures; speed-up and limit are ``None`` before the first step.

        Both are of the steps on the devices that the run has now, ``compared_steps`` of ``optimizer_steps``.
        """
        num_samples, seconds = self.num_samples, self.train_seconds
        known = [_is_here(entry, planner) and planner.knows(entry.plan) for entry in self.entries]
        parts = [planner.parts(e.plan)._asdict() if own else None for e, own in zip(self.entries, known, strict=True)]
        frozen = sum(entry.num_samples * entry.plan.num_frozen for entry in self.entries)
        speedup, bound = self._speedup(planner), self._limit(planner)
        return {
            "train_seconds": seconds,
            "predicted_step_seconds": sum(e.plan.predicted_step_s * e.num_typical_steps for e in self.entries),
            "step_seconds": sum(sum(entry.step_seconds) for entry in self.entries),
            "optimizer_steps": sum(len(entry.step_seconds) for entry in self.entries),
            "time_parts": self._time_parts(parts),
            "samples_per_second": num_samples / seconds if seconds else 0.0,
            "num_blocks": self._num_blocks,
            "num_frozen": self.entries[-1].plan.num_frozen if self.entries else 0,
            "mean_frozen_fraction": frozen / (num_samples * self._num_blocks) if num_samples else 0.0,
            "speedup_vs_static": speedup,
            "baseline": self._baseline,
            "speedup_is": "measured" if self._is_measured(planner) else "predicted",
            "static_plans": [
                plan_dict(plan) | {"median_step_s": seconds, "num_steps": number}
                for plan, seconds, number in self.static_steps(planner)
            ],
            "compared_steps": sum(len(entry.step_seconds) for entry in self._here(planner)),
            "limit": bound,
            "share_of_limit": speedup / bound if speedup and bound else None,
            "is_static": all(same_arrangement(entry.plan, planner.static) for entry in self._here(planner)),
            "plans": [entry.as_dict() | {"step_parts": own} for entry, own in zip(self.entries, parts, strict=True)],
        }

    def _time_parts(self, parts: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
        """Returns the seconds of training by what they went to.

        Args:
            parts: The seconds of a step under each plan, as predicted; ``None`` for one of other devices.

        Returns:
            The parts of all steps; as measured the ``transitions`` and what was ``trained_again``; and what is left as
            ``unpredicted``: below zero where steps took less than their parts.
        """
        known = [(entry.num_typical_steps, own) for entry, own in zip(self.entries, parts, strict=True) if own]
        totals = {name: sum(count * own[name] for count, own in known) for name in StepParts._fields}
        totals["trained_again"] = sum(entry.lost_seconds for entry in self.entries)
        totals["transitions"] = sum(entry.transition_seconds for entry in self.entries) - totals["trained_again"]
        return totals | {"unpredicted": self.train_seconds - sum(totals.values())}

    def untimed(self, planner: Planner) -> list[Plan]:
        """Returns the best static plan of each kind of which none was timed."""
        timed = {kind_of_plan(plan) for plan, *_ in self.static_steps(planner)}
        return [plan for plan in planner.static_candidates() if kind_of_plan(plan) not in timed]

    def _is_measured(self, planner: Planner) -> bool:
        """Returns whether the run was asked for a baseline and has timed a static plan of every kind."""
        return self._baseline and not self.untimed(planner)

    def _speedup(self, planner: Planner) -> float | None:
        """Returns the time that the best static plan would have taken, over the time taken; ``None`` without steps."""
        static_step_s, own = self._static_step_s(planner), self._here(planner)
        seconds = sum(entry.seconds for entry in own)
        if static_step_s is None or not seconds:
            return None
        return static_step_s * sum(entry.num_typical_steps for entry in own) / seconds

    def _static_step_s(self, planner: Planner) -> float | None:
        """Returns the seconds of a step under the best static plan.

        With a baseline it is the fastest of those that were timed. Otherwise it is the measured step of the first plan
        of these devices that came past its slow first steps, or where none did, of the first that made one. It is taken
        times the ratio of the best static plan to that plan by the cost model, which is 1 where it is the best one.
        """
        if self._is_measured(planner):
            return min(seconds for _, seconds, _ in self.static_steps(planner))
        known = [entry for entry in self._here(planner) if entry.step_seconds and planner.knows(entry.plan)]
        warm = (entry for entry in known if len(entry.step_seconds) > NUM_WARMUP_STEPS)
        entry = next(warm, next(iter(known), None))
        if entry is None or entry.typical_step_s is None:
            return None
        return entry.typical_step_s * planner.predict(planner.static) / planner.predict(entry.plan)

    def _limit(self, planner: Planner) -> float | None:
        """Returns the higher one of two limits: with the run's cache levels, and with all frozen blocks cached."""
        entries = self._here(planner)
        if not sum(entry.num_samples for entry in entries):
            return None
        own = _limit_with(planner, entries, [entry.plan.cache_level for entry in entries])
        if not self._may_cache:
            return own
        return max(own, _limit_with(planner, entries, [entry.plan.num_frozen for entry in entries]))


def _limit_with(planner: Planner, entries: Sequence[PlanRecord], levels: Sequence[int]) -> float:
    phases = [Phase(e.plan.num_frozen, level, e.num_samples) for e, level in zip(entries, levels, strict=True)]
    fills = [
        Fill(before if before <= level else 0, level, entry.num_samples_left)
        for entry, before, level in zip(entries, [0, *levels], levels, strict=False)
        if level not in (before, 0)
    ]
    return limit(planner.without_overhead(), phases, fills, planner.static_efficiency())


def _is_here(entry: PlanRecord, planner: Planner) -> bool:
    """Returns whether the run has the devices of a plan now; of those that nobody wrote down it has."""
    cluster = planner.cluster
    return entry.num_devices in (None, cluster.num_devices) and entry.device_name in (None, cluster.device_name)


def _is_timed(entry: PlanRecord) -> bool:
    return len(entry.step_seconds) >= NUM_WARMUP_STEPS + NUM_TIMED_STEPS


def same_arrangement(one: Plan, other: Plan) -> bool:
    """Returns True for plans that differ in their predicted time alone."""
    return replace(one, predicted_step_s=0.0) == replace(other, predicted_step_s=0.0)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain values for logs and files."""
    return {
        "num_frozen": plan.num_frozen,
        "cache_level": plan.cache_level,
        "stages": [list(stage) for stage in plan.stages],
        "num_replicas": plan.num_replicas,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "replicas_adjacent": plan.rank_order == "replica-first",
        "sharded": plan.fsdp,
        "mesh": str(plan.mesh),
        "chunk_bytes": plan.chunk_bytes,
        "num_devices": plan.num_devices,
        "predicted_step_s": plan.predicted_step_s,
    }


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """Returns the plan that ``dataclasses.asdict`` turned into plain values, also after a way through JSON."""
    fields = {name: value for name, value in values.items() if name != "num_stages"}  # follows from the stages
    fields["mesh"] = StageMesh(**values.get("mesh", {}))  # older runs have none
    return Plan(**fields | {"stages": tuple((first, last) for first, last in values["stages"])})
