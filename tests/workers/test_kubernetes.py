"""The TFJob of the examples has only what its published schema knows. No cluster runs it here."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs pyyaml, of the dependency group test")

SCHEMA = json.loads(Path(__file__).with_name("tfjob_schema.json").read_text())
JOB_FILE = Path(__file__).parents[2] / "examples" / "schedulers" / "tfjob.yaml"
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Yields the fields that a strict Kubernetes refuses: unknown, missing, of another type."""
    if "anyOf" in schema:
        if all(any(problems(value, one, where)) for one in schema["anyOf"]):
            yield f"{where} is {value!r}"
        return
    kind = KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where} is {value!r}, not of type {schema['type']}"
        return
    if kind is list:
        for number, item in enumerate(value):
            yield from problems(item, schema["items"], f"{where}[{number}]")
    if kind is not dict or where == ".metadata":
        return
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where}.{name} is missing"
    for name, item in value.items():
        inside = known.get(name, others)
        if inside is None:
            yield f"{where}.{name} is unknown"
        else:
            yield from problems(item, inside, f"{where}.{name}")


def job() -> Any:
    return yaml.safe_load(JOB_FILE.read_text())


# Fails if the job of the examples has a field, or a value, that its schema does not know.
def test_the_job_fits_its_schema() -> None:
    assert list(problems(job(), SCHEMA["schema"])) == []
    assert job()["apiVersion"] == f"{SCHEMA['group']}/{SCHEMA['version']}"
    assert job()["kind"] == SCHEMA["kind"]
    # The schema has texts where its description has a list of values.
    (worker,) = job()["spec"]["tfReplicaSpecs"].values()
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert job()["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    pod = worker["template"]["spec"]
    mounts = {mount["name"] for box in pod["containers"] for mount in box["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


# Fails if a mistake in a job would not be found.
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["spec", "runPolicy", "backOffLimit"], 5, ".spec.runPolicy.backOffLimit is unknown"),
        (["spec", "tfReplicaSpecs", "Worker", "replicas"], "2", ".replicas is '2', not of type"),
        (["spec", "tfReplicaSpecs"], None, ".spec.tfReplicaSpecs is None"),
    ],
    ids=["unknown", "type", "none"],
)
def test_a_mistake_is_found(path: list[str], value: Any, said: str) -> None:
    wrong = copy.deepcopy(job())
    *folders, name = path
    inside = wrong
    for folder in folders:
        inside = inside[folder]
    inside[name] = value
    (found,) = problems(wrong, SCHEMA["schema"])
    assert said in found
