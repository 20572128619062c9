"""The scheduler's own state as messages: epoch, model and load."""

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import lora_adapter_to_proto
from pagoda_scheduler.adapters.adapter_list import AdapterList
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups


class SchedulerState:
    """Epoch, model and load of one scheduler process."""

    def __init__(self, *, session_epoch: int, engine: Engine, groups: WorkerGroups) -> None:
        self.session_epoch = session_epoch
        self._engine = engine
        self._groups = groups
        self.adapters = AdapterList(config=engine.config.lora, on_change=self._take_adapters)
        """Adapters that requests may name."""
        self.loras = self._lora_list()
        """The list as a message, replaced when it changes; None: adapters are off."""

    def _take_adapters(self) -> None:
        self.loras = self._lora_list()
        self._engine.announce()

    def _lora_list(self) -> scheduler_pb2.LoraList | None:
        if not self.adapters.is_on:
            return None
        return scheduler_pb2.LoraList(
            adapters=map(lora_adapter_to_proto, self.adapters.listed()),
            session_epoch=self.session_epoch,
            has_resolver=self.adapters.has_resolver,
        )

    @property
    def model_info(self) -> types_pb2.ModelInfo | None:
        """The model, once a group has loaded it."""
        return self._groups.model_info

    def load(self) -> types_pb2.EngineLoad:
        """The current load."""
        load = self._engine.load()
        message = types_pb2.EngineLoad(
            num_running_reqs=load.num_running_reqs,
            num_waiting_reqs=load.num_waiting_reqs,
            num_used_blocks=load.num_used_blocks,
            num_total_blocks=load.num_total_blocks,
            prefix_cache_queries=load.counters.prefix_cache_queries,
            prefix_cache_hits=load.counters.prefix_cache_hits,
            num_preemptions=load.counters.num_preemptions,
            num_worker_losses=load.counters.num_worker_losses,
            num_steps=load.counters.num_steps,
            is_ready=self._engine.is_ready,
            silence_ms=load.silence_ms,
            num_groups=load.num_groups,
            block_size=self._engine.config.cache.block_size,
            sleep_level=0 if self._engine.cores else self._groups.sleep_level,
            not_ready_reason="" if self._engine.is_ready else self._engine.not_ready_reason,
        )
        if self._engine.config.speculative.is_on:
            drafts = load.counters.speculation
            message.speculation.num_drafts = drafts.num_drafts
            message.speculation.num_draft_tokens = drafts.num_draft_tokens
            message.speculation.num_accepted_tokens = drafts.num_accepted_tokens
            message.speculation.num_accepted_tokens_per_pos.extend(drafts.num_accepted_tokens_per_pos)
        return message
