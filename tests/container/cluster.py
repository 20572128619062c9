"""What a cluster makes of the chart's objects, in containers: pods, names of Services, updates as Kubernetes does them.

Knows Deployments and StatefulSets whose pods have one container. Nothing restarts a pod, and a Service is a name in
Docker's DNS, so that its address changes with its pods, which is harder than Kubernetes.
"""

import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.process.stack import poll_until

Json = dict[str, Any]

COMPONENT = "app.kubernetes.io/component"
START_TIMEOUT_S = 600.0
HTTP_PROBE = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)"
LOG_LINES = "60"


def docker(*words: str) -> str:
    """Output of ``docker …``; fails with what it said."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr[-2000:]}"
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or a StatefulSet."""

    name: str
    service: str
    replicas: int
    max_surge: int
    max_unavailable: int
    has_numbers: bool
    """Of a StatefulSet: a pod starts when the one with its number has ended."""
    template: Json


def workload(made: Json) -> Workload:
    """What an object asks for, with Kubernetes's defaults; fails for what this cluster cannot do."""
    spec = made["spec"]
    has_numbers = made["kind"] == "StatefulSet"
    if has_numbers:
        update = {"type": "RollingUpdate", **spec.get("updateStrategy", {})}
        bounds = {"maxSurge": 0, "maxUnavailable": 1, **update.get("rollingUpdate", {})}
        assert spec["podManagementPolicy"] == "Parallel", "pods that wait for the ones before them"
    else:
        update = {"type": "RollingUpdate", **spec.get("strategy", {})}
        bounds = update["rollingUpdate"]
    assert update["type"] == "RollingUpdate", update
    surge, unavailable = bounds["maxSurge"], bounds["maxUnavailable"]
    assert {type(surge), type(unavailable)} == {int}, "percentages"
    assert not has_numbers or (surge, unavailable) == (0, 1), bounds
    (_,) = spec["template"]["spec"]["containers"]
    return Workload(
        name=made["metadata"]["name"],
        service=spec["template"]["metadata"]["labels"][COMPONENT],
        replicas=spec["replicas"],
        max_surge=surge,
        max_unavailable=unavailable,
        has_numbers=has_numbers,
        template=spec["template"],
    )


@dataclass(slots=True)
class Pod:
    """One that runs; ready as its readiness probe says."""

    name: str
    container: Json
    grace_s: int
    is_ready: bool = False
    _num_failures: int = 0
    _next_probe: float = 0.0

    def probe(self) -> None:
        """Ask, once a period: a pod that was ready is so until the probe has failed as often as it may."""
        probe = self.container["readinessProbe"]
        if time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + probe["periodSeconds"]
        if "grpc" in probe:
            command = ["pagoda-health", f"127.0.0.1:{probe['grpc']['port']}"]
        else:
            ports = {each["name"]: each["containerPort"] for each in self.container["ports"]}
            url = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
            command = ["python", "-c", HTTP_PROBE, url]
        done = subprocess.run(["docker", "exec", self.name, *command], capture_output=True, check=False)
        self._num_failures = self._num_failures + 1 if done.returncode else 0
        if not self._num_failures:
            self.is_ready = True
        elif self._num_failures >= probe["failureThreshold"]:
            self.is_ready = False

    def end(self) -> str:
        """preStop, then SIGTERM, and SIGKILL when the grace period is over. Returns its last lines."""
        begun = time.monotonic()
        if before := self.container.get("lifecycle", {}).get("preStop"):
            docker("exec", self.name, *before["exec"]["command"])
        left_s = max(1, round(self.grace_s - (time.monotonic() - begun)))
        docker("stop", "--time", str(left_s), self.name)
        log = self.log
        docker("rm", self.name)
        return log

    @property
    def log(self) -> str:
        command = ["docker", "logs", "--tail", LOG_LINES, self.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return f"--- {self.name} ({self.container['image']})\n{done.stdout}"


@dataclass(slots=True)
class Cluster:
    """The pods of a release, on a network of their own behind a balancer."""

    balancer: str
    """Its image; it knows frontends by the name `frontend`."""
    name: str = field(default_factory=lambda: f"pagoda-test-{uuid.uuid4().hex[:8]}")
    pods: dict[str, list[Pod]] = field(default_factory=dict)
    """Of each workload, without those that end."""
    mixtures: list[frozenset[str]] = field(default_factory=list)
    """Images of the pods that were there, after each change."""
    _config_maps: dict[str, Json] = field(default_factory=dict)
    _services: dict[str, Json] = field(default_factory=dict)
    _num_started: int = 0
    _ended: list[str] = field(default_factory=list)

    def apply(self, objects: Iterable[Json]) -> None:
        """As ``helm upgrade --wait``: all workloads change at once. Returns when no old pod is left."""
        made = list(objects)
        self._config_maps = {each["metadata"]["name"]: each["data"] for each in made if each["kind"] == "ConfigMap"}
        self._services = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Service"}
        if not self.pods:
            docker("network", "create", self.name)
        workloads = [workload(each) for each in made if each["kind"] in ("Deployment", "StatefulSet")]
        with ThreadPoolExecutor() as threads:
            updates = [threads.submit(self._update, each, threads) for each in workloads]
            for ends in [update.result() for update in updates]:
                for each in ends:
                    each.result()

    def open(self) -> str:
        """Start the balancer; returns its URL."""
        name = f"{self.name}-balancer"
        confined = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
        docker(
            "run",
            "--detach",
            "--name",
            name,
            "--network",
            self.name,
            "--publish",
            "127.0.0.1::8000",
            *confined,
            self.balancer,
        )
        return f"http://{docker('port', name, '8000/tcp')}"

    def _update(self, wanted: Workload, threads: ThreadPoolExecutor) -> list[Future[None]]:
        """Replace all pods of a workload; returns the ends that may still last."""
        if wanted.has_numbers:
            self._update_stateful_set(wanted)
            return []
        return self._update_deployment(wanted, threads)

    def _update_stateful_set(self, wanted: Workload) -> None:
        """From the highest number down, each when the one before is ready; at first all at once."""
        running = self.pods.setdefault(wanted.name, [])
        if not running:
            running += [self._start(wanted, f"-{number}") for number in range(wanted.replicas)]
        else:
            for number in reversed(range(wanted.replicas)):
                self._end(running[number])
                running[number] = self._start(wanted, f"-{number}")
                self._wait_ready([running[number]])
        self._wait_ready(running)

    def _update_deployment(self, wanted: Workload, threads: ThreadPoolExecutor) -> list[Future[None]]:
        """As the Deployment's controller: as many beside the old ones, and as few that are ready, as it allows."""
        running = self.pods.setdefault(wanted.name, [])
        old, new, ends = list(running), list[Pod](), list[Future[None]]()
        least = wanted.replicas - wanted.max_unavailable

        def step() -> bool:
            if len(new) < wanted.replicas and len(running) < wanted.replicas + wanted.max_surge:
                new.append(self._start(wanted, ""))
                running.append(new[-1])
            num_spare = len(running) - least - sum(not pod.is_ready for pod in new)
            unready = [pod for pod in old if not pod.is_ready]
            if num_spare > 0 and (unready or (old and sum(pod.is_ready for pod in running) > least)):
                one = (unready or old)[0]
                old.remove(one)
                running.remove(one)
                ends.append(threads.submit(self._end, one))
            return not old and len(new) == wanted.replicas and all(pod.is_ready for pod in new)

        self._poll(running, step)
        return ends

    def _wait_ready(self, pods: list[Pod]) -> None:
        self._poll(pods, lambda: all(pod.is_ready for pod in pods))

    def _poll(self, pods: list[Pod], is_true: Callable[[], bool]) -> None:
        def probed() -> bool:
            for pod in pods:
                pod.probe()
            return is_true()

        poll_until(
            probed, what=f"{[pod.name for pod in pods]} are ready", log=lambda: self.logs, timeout_s=START_TIMEOUT_S
        )

    def _start(self, wanted: Workload, suffix: str) -> Pod:
        spec, labels = wanted.template["spec"], wanted.template["metadata"]["labels"]
        (container,) = spec["containers"]
        self._num_started += 1
        pod = Pod(
            name=f"{self.name}-{wanted.name}{suffix}-{self._num_started}",
            container=container,
            grace_s=spec["terminationGracePeriodSeconds"],
        )
        names = [name for name, each in self._services.items() if each["selector"].items() <= labels.items()]
        aliases = [*names, wanted.service]
        variables = self._environment(container, pod.name)
        args = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container["args"]]
        docker(
            *("run", "--detach", "--name", pod.name, "--hostname", f"{wanted.name}{suffix}", "--network", self.name),
            *(word for alias in aliases for word in ("--network-alias", alias)),
            *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")),
            *("--user", "{runAsUser}:{runAsGroup}".format(**spec["securityContext"])),
            *("--read-only", "--tmpfs", "/tmp", "--shm-size", "1g", "--no-healthcheck"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"),
            *("--memory", container["resources"]["limits"]["memory"].removesuffix("i")),
            container["image"],
            *args,
        )
        self._note()
        return pod

    def _environment(self, container: Json, pod_name: str) -> dict[str, str]:
        variables = {"POD_IP": pod_name}
        for each in container["envFrom"]:
            variables |= self._config_maps[each["configMapRef"]["name"]]
        return variables | {each["name"]: each["value"] for each in container["env"] if "value" in each}

    def _end(self, pod: Pod) -> None:
        self._ended.append(pod.end())
        self._note()

    def _note(self) -> None:
        images = docker("ps", "--filter", f"network={self.name}", "--format", "{{.Image}}").split()
        self.mixtures.append(frozenset(images))

    @property
    def logs(self) -> str:
        """The last lines of all pods, also of those that have ended."""
        return "\n".join([*self._ended, *(pod.log for pods in list(self.pods.values()) for pod in list(pods))])

    def remove(self) -> None:
        """All of it, whatever state it is in."""
        if containers := docker("ps", "--all", "--quiet", "--filter", f"network={self.name}").split():
            docker("rm", "--force", "--volumes", *containers)
        docker("network", "rm", "--force", self.name)
