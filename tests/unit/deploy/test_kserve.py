"""KServe's runtime starts `pagoda serve` with flags that it has, on the ports that its probes ask."""

from pathlib import Path

import yaml

from pagoda.cli import make_parser

FOLDER = Path(__file__).parents[3] / "deploy" / "kserve"


def test_the_runtime_serves_what_the_service_asks_for() -> None:
    runtime = yaml.safe_load((FOLDER / "serving-runtime.yaml").read_text())
    service = yaml.safe_load((FOLDER / "inference-service.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    (container,) = runtime["spec"]["containers"]
    args = make_parser().parse_args(
        ["serve", "model", *(arg.replace("{{.Name}}", "name") for arg in container["args"])]
    )
    assert [each["containerPort"] for each in container["ports"]] == [args.port]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == args.port
