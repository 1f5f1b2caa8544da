"""What loggers have written, read back from their files: ``{step: {key: value}}`` for each of them."""

from __future__ import annotations

import csv
import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["read_csv", "read_mlflow", "read_tensorboard", "read_wandb"]

Logged = dict[int, dict[str, float]]
_OWN = ("step", "epoch")


def read_csv(path: Path) -> Logged:
    """``metrics.csv``."""
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {key: float(value) for key, value in row.items() if value and key not in _OWN}
            found[int(row["step"])].update(values)
    return dict(found)


def read_tensorboard(folder: Path) -> tuple[Logged, dict[str, list[int]]]:
    """Scalars, and the steps of each image, of a folder of event files."""
    from tensorboard.backend.event_processing import event_accumulator

    # Keep every image: the accumulator drops all but four by default.
    events = event_accumulator.EventAccumulator(str(folder), {"scalars": 0, "images": 0})
    events.Reload()
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for tag in set(events.Tags()["scalars"]) - {*_OWN, "hp_metric"}:
        for event in events.Scalars(tag):
            found[event.step][tag] = event.value
    return dict(found), {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


def read_wandb(path: Path) -> tuple[Logged, dict[str, list[int]]]:
    """Numbers, and the steps of each picture, of an offline run, by Lightning's step."""
    from wandb.proto import wandb_internal_pb2

    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    pictures: defaultdict[str, list[int]] = defaultdict(list)
    for data in _wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
        step = items.pop(("trainer/global_step",), None)
        for (key, *inner), value in items.items():
            if inner == ["_type"] and value == "images/separated":  # a picture is told by several entries
                pictures[key].append(step)
            elif not inner and key not in _OWN and not key.startswith("_"):
                found[step][key] = value
    return dict(found), dict(pictures)


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a run's file, a log as of LevelDB: blocks of 32 KiB, pieces of (checksum, length, kind, bytes).

    Recent releases of W&B have no Python code that reads it.
    """
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # no header fits into the rest of a block
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""


def read_mlflow(store: str) -> tuple[Logged, list[str]]:
    """Metrics, and the paths of all artifacts, of the one run in a store."""
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(store)
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for key in set(run.data.metrics) - set(_OWN):
        for metric in client.get_metric_history(run.info.run_id, key):
            found[metric.step][key] = metric.value
    return dict(found), list(_artifacts(client, run.info.run_id, None))


def _artifacts(client: Any, run_id: str, folder: str | None) -> Iterator[str]:
    for one in client.list_artifacts(run_id, folder):
        if one.is_dir:
            yield from _artifacts(client, run_id, one.path)
        else:
            yield one.path
