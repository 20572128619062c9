"""KServe's runtime starts `pagoda serve` with flags that it has, on the ports that its probes ask."""

import re
from pathlib import Path

import yaml

from pagoda.cli import make_parser
from tests.unit.deploy.test_all_in_one import SCRIPT, STAGE
from tests.unit.deploy.test_pods import HANDLERS, amount

FOLDER = Path(__file__).parents[3] / "deploy" / "kserve"
RUNTIME = yaml.safe_load((FOLDER / "serving-runtime.yaml").read_text())
SERVICE = yaml.safe_load((FOLDER / "inference-service.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]
PROBES = {name: CONTAINER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


def test_the_runtime_serves_what_the_service_asks_for() -> None:
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]]
    assert re.match(r"(hf|s3|gs|pvc)://", model["storageUri"])
    assert (RUNTIME["kind"], SERVICE["kind"]) == ("ServingRuntime", "InferenceService")
    assert {each["apiVersion"].partition("/")[0] for each in (RUNTIME, SERVICE)} == {"serving.kserve.io"}
    assert SERVICE["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "RawDeployment"
    assert SERVICE["spec"]["predictor"]["minReplicas"] >= 1, "the first request would wait for a load of weights"
    args = make_parser().parse_args(
        ["serve", "model", *(arg.replace("{{.Name}}", "name") for arg in CONTAINER["args"])]
    )
    assert args.served_model_name == ["name"]
    assert [each["containerPort"] for each in CONTAINER["ports"]] == [args.port]
    assert args.port != args.grpc_port
    # KServe puts its model there, by mounting it into the container of this name.
    assert CONTAINER["name"] == "kserve-container"
    assert "/mnt/models" in SCRIPT.read_text()


def test_probes_ask_the_port_that_is_served_for_what_they_mean() -> None:
    (port,) = [each["containerPort"] for each in CONTAINER["ports"]]
    assert all(HANDLERS & set(probe) == {"httpGet"} for probe in PROBES.values())
    paths = {name: (probe["httpGet"]["path"], probe["httpGet"]["port"]) for name, probe in PROBES.items()}
    assert paths == {"startup": ("/ready", port), "readiness": ("/ready", port), "liveness": ("/live", port)}
    seconds = {name: probe["periodSeconds"] * probe.get("failureThreshold", 3) for name, probe in PROBES.items()}
    assert seconds["startup"] >= 3600, "a large model is loaded for an hour"
    assert seconds["readiness"] <= 15
    assert seconds["liveness"] == 60


def test_the_container_is_restricted_as_its_image_is_made_for() -> None:
    security = CONTAINER["securityContext"]
    (user,) = [rest for name, rest in STAGE if name == "USER"]
    assert f"{security['runAsUser']}" == user.partition(":")[0]
    assert security["runAsNonRoot"] is security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert (security["capabilities"], security["seccompProfile"]) == ({"drop": ["ALL"]}, {"type": "RuntimeDefault"})
    # What is written goes to a volume.
    volumes = {each["name"]: set(each) - {"name"} for each in RUNTIME["spec"]["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in CONTAINER["volumeMounts"]}
    assert sorted(mounts.values()) == sorted(volumes)
    home = {each["name"]: each["value"] for each in CONTAINER["env"]}["HOME"]
    assert volumes[mounts[home]] == {"emptyDir"}
    requests, limits = CONTAINER["resources"]["requests"], CONTAINER["resources"]["limits"]
    assert {"cpu", "memory"} <= set(requests)
    assert amount(requests["memory"]) < amount(limits["memory"])
    assert "cpu" not in limits, "a limit throttles"
