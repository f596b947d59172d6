# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes example is a sound PyTorchJob; its command dry-runs with the header's figures."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SAID = {
    "TP 4 x CP 1 x DP 4 x PP 1 = 16 ranks; sequence parallelism on": "TP 4 with sequence",
    "8,030,261,248 in all": "8.03e9 parameters",
    "5.147e+10 FLOPs a token": "5.15e10 FLOPs a token",
    "50,000,297,984 tokens in all": "47,684 steps = 5e10 tokens",
    "4.7 days": "4.7 days",
    "28.01 GB": "= 28 GB",
}
POLICIES = {"Always", "OnFailure", "Never", "ExitCode"}


def problems(job: Any) -> list[str]:
    """List what the training operator's v1 PyTorchJob does not allow, or what torchrun lacks."""
    found = []
    if (job.get("apiVersion"), job.get("kind")) != ("kubeflow.org/v1", "PyTorchJob"):
        return ["it is no PyTorchJob of kubeflow.org/v1"]
    if not job.get("metadata", {}).get("name", "").replace("-", "").isalnum():
        found.append("metadata.name is no DNS label")
    specs = job.get("spec", {}).get("pytorchReplicaSpecs", {})
    if not specs.keys() <= {"Master", "Worker"} or "Master" not in specs:
        found.append("pytorchReplicaSpecs holds Master and Worker")
    if specs.get("Master", {}).get("replicas") != 1:
        found.append("there is one Master")
    for name, spec in specs.items():
        if spec.keys() - {"replicas", "restartPolicy", "template"}:
            found.append(f"{name}: unknown fields")
        if spec.get("restartPolicy") not in POLICIES:
            found.append(f"{name}: restartPolicy")
        pod = spec.get("template", {}).get("spec", {})
        names = [container.get("name") for container in pod.get("containers", [])]
        if names.count("pytorch") != 1:  # the operator gives the variables to this one
            found.append(f"{name}: one container is called pytorch")
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod.get("containers", []):
            if not container.get("image") or not container.get("command"):
                found.append(f"{name}: image and command")
            if {mount["name"] for mount in container.get("volumeMounts", [])} - volumes:
                found.append(f"{name}: a mount without a volume")
    return found


def command(job: Any) -> list[str]:
    """Return the words of the master's shell command, line ends joined."""
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return shlex.split(container["args"][0].replace("\\\n", " "))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifest_is_sound(path):
    job = yaml.safe_load(path.read_text())
    assert problems(job) == []
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert specs["Master"]["template"] == specs["Worker"]["template"]
    assert "UNTESTED on a cluster" in path.read_text()
    words = command(job)
    begin = words.index("torchrun")
    given = dict(zip(words[begin + 1 :: 2], words[begin + 2 :: 2], strict=False))
    assert given["--nnodes"] == "$WORLD_SIZE" and given["--node-rank"] == "$RANK"
    (container,) = specs["Master"]["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["--nproc-per-node"] == str(gpus)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_its_command_dry_runs(path, launcher):
    text = path.read_text()
    job = yaml.safe_load(text)
    words = command(job)
    pods = sum(spec["replicas"] for spec in job["spec"]["pytorchReplicaSpecs"].values())
    world = pods * int(words[words.index("--nproc-per-node") + 1])
    flags = words[words.index("pretrain_llama.py") + 1 :]
    env = {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    done = launcher.python(ROOT / "pretrain_llama.py", *flags, "--dry-run", env=env)
    assert done.returncode == 0, done.stderr
    assert "does NOT fit" not in done.stdout
    header = text.split("apiVersion")[0]
    for in_report, in_header in SAID.items():
        assert in_report in done.stdout, in_report
        assert in_header in header, in_header


def test_an_unsound_manifest_is_noticed():
    job = yaml.safe_load(MANIFESTS[0].read_text())
    job["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Sometimes"
    assert problems(job) == ["there is one Master", "Worker: restartPolicy"]
    assert problems({"apiVersion": "v1"}) == ["it is no PyTorchJob of kubeflow.org/v1"]
