"""Load of the engine, and counters that outlive its worker groups."""

from dataclasses import dataclass, field, replace

from pagoda_scheduler.core.speculation import SpeculationCounters
from pagoda_scheduler.engine.engine_core import EngineCore


@dataclass(slots=True)
class Counters:
    """Counters of lost groups, so that sums only grow."""

    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_worker_losses: int = 0
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)

    def copy(self) -> "Counters":
        """A copy of the counters."""
        counters = replace(self, speculation=SpeculationCounters())
        counters.speculation.add(self.speculation)
        return counters

    def take(self, core: EngineCore) -> None:
        """Add the counters of `core`."""
        self.num_steps += core.num_steps
        self.prefix_cache_queries += core.scheduler.kv.num_prefix_queries
        self.prefix_cache_hits += core.scheduler.kv.num_prefix_hits
        self.num_preemptions += core.scheduler.num_preemptions
        self.speculation.add(core.scheduler.speculation.counters)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engine; counters only grow."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_blocks: int
    num_total_blocks: int
    silence_ms: int
    num_groups: int
    counters: Counters = field(default_factory=Counters)
