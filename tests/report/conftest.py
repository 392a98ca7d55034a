"""A short run with two freeze decisions, as the events that a trainer writes."""

from pathlib import Path
from typing import Any

import pytest

from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, JsonLines, write_json
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.report.sinks import EventName
from pipetransformer.report.summary_text import TIME_PARTS
from pipetransformer.report.trace import Event, write_trace

Events = list[tuple[EventName, dict[str, Any]]]

NUM_BLOCKS, STEPS_PER_EPOCH, EPOCHS = 6, 8, 3
NUM_STEPS = STEPS_PER_EPOCH * EPOCHS


def plan(step: int, num_frozen: int, cache_level: int, stages: list[list[int]], num_replicas: int) -> dict[str, Any]:
    return {
        "step": step,
        "num_frozen": num_frozen,
        "cache_level": cache_level,
        "stages": stages,
        "num_replicas": num_replicas,
        "sharded": False,
        "stages_per_rank": 1,
        "num_microbatches": 4 // num_replicas,
        "schedule": "1f1b",
        "predicted_step_s": 0.4 / (1 + num_frozen),
        "transition_seconds": 0.5,
        "reason": "fastest within memory",
        "median_step_s": 0.5 / (1 + num_frozen),
        "step_parts": {"active": 0.3 / (1 + num_frozen), "frozen": 0.0, "wait": 0.1 / (1 + num_frozen)},
    }


PLANS = [
    plan(0, 0, 0, [[0, 1], [2, 3], [4, 5], [6, 7]], 1),
    plan(8, 2, 0, [[0, 4], [5, 7]], 2),
    plan(16, 4, 4, [[5, 7]], 4),
]


def _start() -> dict[str, Any]:
    return {
        "run_dir": "runs/one",
        "model": "vit_tiny",
        "dataset": "digits",
        "task": "classification",
        "num_blocks": NUM_BLOCKS,
        "num_parameters": 5_526_346,
        "world_size": 4,
        "batch_size": 64,
        "epochs": EPOCHS,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "num_steps": NUM_STEPS,
        "plan": PLANS[0],
        "reason": "one stage does not fit the memory",
    }


def _step(step: int, held: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / STEPS_PER_EPOCH,
        "loss": 2.3 / step,
        "lr": 1e-3 * (1 - step / NUM_STEPS),
        "grad_norm": 1.5,
        "step_seconds": held["predicted_step_s"],
        "samples_per_second": 64 / held["predicted_step_s"],
        "num_frozen": held["num_frozen"],
        "num_stages": len(held["stages"]),
        "num_replicas": held["num_replicas"],
        "num_idle_devices": 0,
        "cache_level": held["cache_level"],
    } | ({"cache_wait_seconds": 0.004} if held["cache_level"] else {})


def _decision(step: int, before: int, after: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / STEPS_PER_EPOCH,
        "num_frozen_before": before,
        "num_frozen": after,
        "bound": "cap",
        "reason": "at most a third of the active blocks",
        "terms": {"cap": after + 0.25, "argmin": 5.0},
        "gradient_norms": [0.0 if block < before else 0.1 * 2**block for block in range(NUM_BLOCKS)],
    }


def _transition(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": after["step"],
        "reason": "2 more blocks frozen",
        "before": before,
        "after": after,
        "seconds": 1.93,
        "plan_seconds": 0.02,
        "group_seconds": 0.11,
        "move_seconds": 1.2,
        "rebuild_seconds": 0.6,
        "num_moves": 5,
        "moves": [[4, 1, 0], [5, 1, 0], [6, 1, 0], [6, 1, 2], [7, 3, 2]],
        "bytes_moved": 3 * 2**20,
        "predicted_gain": before["predicted_step_s"] / after["predicted_step_s"],
        "predicted_gain_s": 0.05 * (NUM_STEPS - after["step"]),
        "predicted_cost_s": 0.71,
        "num_steps_left": NUM_STEPS - after["step"],
        "choice": "24 steps at 0.2 s instead of 0.3 s save 2.4 s, more than the 0.71 s that the transition costs",
    }


def _evaluation(step: int) -> dict[str, Any]:
    metrics = {"accuracy": 0.5 + step / 100, "f1": 0.4 + step / 100}
    return {"step": step, "epoch": step / 8, "split": "test", "num_samples": 1000, "metrics": metrics, "seconds": 0.7}


def _summary() -> dict[str, Any]:
    return {
        "status": "completed",
        "metric": {"name": "accuracy", "value": 0.74, "split": "test", "num_samples": 1000},
        "best": {"name": "accuracy", "value": 0.76, "split": "test", "step": 16},
        "metrics": {"test": {"accuracy": 0.74, "f1": 0.64}},
        "train_seconds": 743.2,
        "optimizer_steps": NUM_STEPS,
        "last_step": NUM_STEPS,
        "samples_per_second": 412.3,
        "num_blocks": NUM_BLOCKS,
        "num_frozen": 4,
        "mean_frozen_fraction": 0.3333,
        "speedup_vs_static": 2.04,
        "limit": 2.42,
        "share_of_limit": 0.843,
        "is_static": False,
        "time_parts": dict.fromkeys(TIME_PARTS, 0.0)
        | {"active": 371.6, "wait": 185.8, "optimizer": 3.0, "transitions": 16.8, "unpredicted": 166.0},
        "cache": {
            "hit_rate": 0.95,
            "bytes_by_tier": {"memory": 2**24},
            "fill_seconds": 3.2,
            "read_seconds": 0.3,
            "wait_seconds": 0.03,
            "recompute_seconds": 0.0,
        },
        "plans": PLANS,
    }


def run_events() -> Events:
    events: Events = [("phase", {"message": "reading data"}), ("start", _start())]
    for before, held in zip([None, *PLANS], PLANS, strict=False):
        if before:
            step = held["step"]
            events.append(("decision", _decision(step, before["num_frozen"], held["num_frozen"])))
            events.append(("transition", _transition(before, held)))
        if held["cache_level"]:
            fill = {
                "from_level": 0,
                "to_level": held["cache_level"],
                "num_samples": 512,
                "num_found": 0,
                "seconds": 3.2,
                "bytes": 2**24,
                "bytes_by_tier": {"memory": 2**24},
            }
            room = {"bytes_by_tier": {"memory": 2**20, "disk": 2**21}, "folder": "features", "outlives_run": True}
            coming = {**room, "num_samples": 512, "num_found": 0, "seconds": 1.5, "passes": 1.25}
            events.append(("cache_plan", {"step": held["step"], "from_level": 0, "to_level": 4, **coming}))
            events.append(("cache_fill", {"step": held["step"], **fill}))
        steps = range(held["step"] + 1, held["step"] + STEPS_PER_EPOCH + 1)
        events += [("step", _step(step, held)) for step in steps]
        events.append(("evaluate", _evaluation(steps[-1])))
    return [*events, ("warning", {"message": "the cache is off: random crops"}), ("summary", _summary())]


def trace_of(held: dict[str, Any]) -> list[Event]:
    """A step of a plan with a forward and a backward pass of each stage, one after the other."""
    ranks = [*range(len(held["stages"]))]
    order = [*(("forward", rank) for rank in ranks), *(("backward", rank) for rank in reversed(ranks))]
    passes = [Event(f"{kind[0].upper()}0", at * 0.01, 0.01, rank, kind) for at, (kind, rank) in enumerate(order)]
    return [*passes, Event("all-reduce", len(order) * 0.01, 0.002, 0, "all-reduce")]


@pytest.fixture
def events() -> Events:
    return run_events()


@pytest.fixture
def run_folder(tmp_path: Path, events: Events) -> Path:
    write_run(tmp_path, events)
    return tmp_path


def write_run(folder: Path, events: Events) -> None:
    """Writes a run folder, with a trace of each plan."""
    log = JsonLines(folder / EVENT_LOG)
    for event, values in events:
        log.write(event, values)
    log.close()
    (folder / CONFIG).write_text("seed: 1\nfreeze:\n  alpha: 0.33\n")
    write_json(folder / SUMMARY, events[-1][1])
    for number, held in enumerate(PLANS):
        write_trace(trace_of(held), folder, number)
