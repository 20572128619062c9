"""The chart, rendered by Helm's own engine, over a matrix of values.

``python -m tests.unit.deploy.charts FOLDER`` writes what the matrix renders to, a file each, for tools that check
manifests.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "pagoda"
TLS = {"frontend": "tls-frontend", "scheduler": "tls-scheduler", "worker": "tls-worker"}
TWO_MODELS: dict[str, Any] = {
    "models": {
        "small": {
            "model": "pagoda-tiny",
            "settings": {"MAX_MODEL_LEN": "8k"},
            "frontends": {"autoscaling": {"maxReplicas": 4}},
            "workers": {"main": {"tensorParallelSize": 2}},
        },
        "large": {
            "model": "Qwen/Qwen3-8B",
            "workers": {"main": {"gpus": 1, "replicas": 2}},
            "weights": {"claim": "models"},
        },
    },
    "secrets": {"apiKeys": "keys", "operatorKeys": "operators", "hub": "hub", "serviceToken": "service"},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "entry": {"kind": "ingress", "className": "nginx", "host": "llm.example", "tlsSecret": "web", "default": "small"},
}
SETS: dict[str, Any] = {
    "models": {
        "large": {
            "model": "Qwen/Qwen3-8B",
            "frontends": {"replicas": 1, "autoscaling": {"maxReplicas": 3, "cpu": 70}},
            "workers": {
                "main": {"gpus": 4, "autoscaling": {"maxReplicas": 3, "running": 32}, "sharedMemory": "32Gi"},
                "far": {"nodes": 2, "gpus": 8, "autoscaling": {"maxReplicas": 2}},
                "cpu": {"replicas": 0, "tolerations": [{"key": "spare", "operator": "Exists"}]},
            },
            "weights": {"size": "200Gi", "source": "s3://bucket/qwen3", "download": "job", "secret": "store"},
        },
    },
    "tls": TLS,
    "autoscaling": {"by": "keda"},
    "priorityClass": {"create": True, "name": "serving"},
    "monitoring": {"enabled": True},
    "imagePullSecrets": ["registry"],
    "networkPolicies": {
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}],
        "extraEgress": [{"ports": [{"port": 4317}]}],
    },
    "entry": {"kind": "gateway", "className": "istio", "host": "llm.example", "tlsSecret": "web"},
}


SHARED: dict[str, Any] = {
    "models": {
        "small": {
            "model": "pagoda-tiny",
            "frontends": {"shared": True},
            "settings": {"SERVED_MODEL_NAME": "small,tiny"},
        },
        "chat": {
            "model": "Qwen/Qwen3-8B",
            "frontends": {"shared": True},
            "settings": {"TOOL_CALL_PARSER": "hermes", "ENABLE_AUTO_TOOL_CHOICE": True, "MAX_LOGPROBS": 5},
            "weights": {"size": "20Gi", "source": "Qwen/Qwen3-8B"},
        },
        "hub": {"model": "Qwen/Qwen3-0.6B", "frontends": {"shared": True}, "settings": {"MAX_MODEL_LEN": "8k"}},
        "claimed": {
            "model": "embed",
            "frontends": {"shared": True},
            "weights": {"claim": "models", "path": "bge"},
        },
        "kept": {
            "model": "kept",
            "frontends": {"shared": True},
            "weights": {"perPod": "20Gi", "source": "s3://bucket/kept", "secret": "store"},
        },
        "own": {"model": "Qwen/Qwen3-4B", "weights": {"claim": "models"}},
    },
    "sharedFrontends": {"autoscaling": {"maxReplicas": 4}, "settings": {"ENABLE_PROMPT_TOKENS_DETAILS": True}},
    "secrets": TWO_MODELS["secrets"],
    "monitoring": {"enabled": True},
    "entry": {"kind": "ingress", "host": "llm.example", "default": "shared"},
}
EXAMPLES = CHART.parent / "examples"


def with_weights(**weights: str) -> dict[str, Any]:
    return {"models": {"qwen": {"model": "Qwen/Qwen3-0.6B", "weights": weights}}}


MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two-models": TWO_MODELS,
    "two-models-tls": {**TWO_MODELS, "tls": TLS, "entry": {"kind": "gateway", "gateway": {"name": "shared"}}},
    "shared": SHARED,
    "shared-tls": {**SHARED, "tls": TLS, "entry": {"kind": "gateway", "className": "istio"}},
    "two-models-shared": yaml.safe_load((EXAMPLES / "two-models-shared.yaml").read_text()),
    "sets": SETS,
    "sets-hpa": {**SETS, "autoscaling": {"by": "hpa"}},
    "open": {"networkPolicies": {"enabled": False}, "monitoring": {"enabled": True}},
    "no-egress": {"networkPolicies": {"egress": False}, "monitoring": {"enabled": True, "dashboard": False}},
    "hub": with_weights(),
    "fetched": with_weights(size="20Gi", source="Qwen/Qwen3-0.6B", revision="main", accessMode="ReadWriteOnce"),
    "filled": with_weights(claim="models", path="qwen3"),
    "per-pod": with_weights(perPod="20Gi", source="gs://bucket/qwen3", storageClass="local"),
    "multi-node-tls": {
        "models": {"tiny": {"model": "pagoda-tiny", "workers": {"main": {"nodes": 2}}}},
        "tls": TLS,
    },
}
UNRESTRICTED: dict[str, dict[str, Any]] = {
    "host-path": with_weights(hostPath="/var/lib/pagoda", source="Qwen/Qwen3-0.6B"),
    "image": with_weights(image="registry.example/qwen3:1", path="qwen3"),
    "image-shared": {
        "models": {
            name: {
                "model": name,
                "frontends": {"shared": True},
                "weights": {"image": f"registry.example/{name}:1", "path": "whole"},
            }
            for name in ("one", "two")
        }
    },
}
"""What PodSecurity `restricted` forbids."""


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a release called chat in the namespace ai."""
    return _render(json.dumps(values))


@cache
def _render(values: str) -> list[dict[str, Any]]:
    return [each for text in texts(json.loads(values)) for each in yaml.safe_load_all(text) if each]


def texts(values: dict[str, Any]) -> list[str]:
    """Of the files that Kubernetes gets."""
    from helm_python.chart import Chart  # not there on every platform

    files = Chart.load(CHART).render(values, name="chat", namespace="ai")
    return [text for name, text in sorted(files.items()) if name.endswith(".yaml")]


def named(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of what makes the pods."""
    found = {}
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[each["metadata"]["name"]] = each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            found[each["metadata"]["name"]] = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, values in (MATRIX | UNRESTRICTED).items():
        (folder / f"{name}.yaml").write_text("\n---\n".join(texts(values)))
