"""Build hook: writes the stubs of every .proto before hatchling collects files (wheel, sdist, editable install)."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface[Any]):
    """Runs scripts/generate_protos.py."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        script = Path(self.root) / "scripts" / "generate_protos.py"
        runpy.run_path(str(script))["generate"]()
