"""Values of the Helm chart that are wrong, or do not fit each other, are refused by name."""

import re
from typing import Any

import pytest

from tests.unit.deploy.charts import render
from tests.unit.deploy.charts import with_weights as weighted

errors = pytest.importorskip("helm_python.errors", reason="needs helm-python-sdk")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": {"Tiny": {"model": "pagoda-tiny"}}}, "'Tiny'"),
        ({"models": {"a": {"settings": {}}}}, "/models/a"),
        ({"models": {"a": {"model": "x", "worker": 2}}}, "'worker'"),
        ({"models": {"a": {"model": "x", "workers": {"main": {"gpu": 1}}}}}, "/models/a/workers/main"),
        ({"models": {"a": {"model": "x", "workers": {"main": {"tensorParallelSize": 0}}}}}, "tensorParallelSize"),
        ({"models": {"a": {"model": "x", "settings": {"max-model-len": "8k"}}}}, "'max-model-len'"),
        ({"models": {"a": {"model": "x", "settings": {"PAGODA_MAX_MODEL_LEN": "8k"}}}}, "PAGODA_MAX_MODEL_LEN"),
        ({"models": {"a": {"model": "x", "weights": {"size": "much"}}}}, "/models/a/weights/size"),
        ({"models": {"a": {"model": "x", "weights": {"source": "not a source"}}}}, "/models/a/weights/source"),
        ({"models": {"a": {"model": "x", "weights": {"download": "later"}}}}, "/models/a/weights/download"),
        ({"models": {"a": {"model": "x", "frontends": {"replicas": 0}}}}, "/models/a/frontends/replicas"),
        ({"resources": {"others": {"worker": {"requests": {"memory": "12 GiB"}}}}}, "/resources/others/worker"),
        ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy"),
        ({"secrets": {"apiKeys": "My Keys"}}, "/secrets/apiKeys"),
        ({"entry": {"kind": "gateway"}}, "className"),
        ({"autoscaling": {"by": "cron"}}, "/autoscaling/by"),
        ({"priorityClass": {"create": True}}, "/priorityClass"),
        ({"networkPolicies": True}, "/networkPolicies"),
        ({"monitoring": {"enable": True}}, "'enable'"),
    ],
)
def test_values_that_are_wrong_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.HelmError, match=re.escape(message)):
        render(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (weighted(claim="a", size="1Gi"), "models.qwen.weights has claim and size, must have one of them"),
        (weighted(source="a/b"), "models.qwen.weights.source needs claim, size, perPod or hostPath"),
        (weighted(claim="a", source="a/b", path="c"), "models.qwen.weights has source and path"),
        (weighted(path="a"), "models.qwen.weights.path needs claim, size, hostPath or image"),
        (
            weighted(perPod="1Gi", source="a/b", download="job"),
            "models.qwen.weights.download is job, needs source",
        ),
        (
            {"models": {"a": {"model": "x", "workers": {"b": {"gpus": 2, "tensorParallelSize": 4}}}}},
            "models.a.workers.b.tensorParallelSize is 4, must be gpus, 2",
        ),
        (
            {"models": {"a": {"model": "x", "workers": {"b": {"nodes": 2}}, "weights": {"perPod": "1Gi"}}}},
            "models.a.workers.b.nodes is 2, must be 1 with weights.perPod",
        ),
        (
            {"models": {"a": {"model": "x", "frontends": {"shared": True, "replicas": 3}}}},
            "models.a.frontends has shared, and more",
        ),
        (
            {"models": {name: {"model": "x", "frontends": {"shared": True}} for name in ("a", "b")}},
            "models.a and models.b share frontends, and clients call both x",
        ),
        (
            {"models": {"shared": {"model": "x"}, "b": {"model": "y", "frontends": {"shared": True}}}},
            "models.shared has the name of the shared frontends, must have another one",
        ),
        ({"tls": {"frontend": "a"}}, "tls needs frontend, scheduler and worker, or none"),
        ({"entry": {"kind": "ingress", "default": "b"}}, "entry.default is b, must be one of tiny"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.HelmError, match=re.escape(message)):
        render(values)
