"""The models of one frontend: finds the model of a request, and combines their states. Knows neither HTTP nor gRPC.

Each model has its own scheduler and requests. State that models share is in `Shared`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_common.params.lora_adapter import MAX_NAME_CHARS
from pagoda_frontend.serving.serving import RETRY_AFTER_S, Serving


class Models:
    """One model, or several with different names."""

    def __init__(self, servings: Sequence[Serving]) -> None:
        """`servings`: at least one; several have `served_model_name`, and share one `Shared`."""
        self.servings = tuple(servings)
        self.first = self.servings[0]
        """The first model, used for state that all share."""
        self.are_several = len(self.servings) > 1

    @property
    def names(self) -> list[str]:
        """The first name of each of several models."""
        return [name_of(serving) for serving in self.servings]

    async def named(self, name: object) -> Serving:
        """The model of a request, by its field `model`: a model's name, or the name of one of its adapters.

        A value that is not text leads to the first model, which refuses it.

        Raises:
            InvalidRequest: there are several, and none is named.
            NotFound: there is none of that name.
            NotReady: a model that is not ready yet may have this name, or the frontend is shutting down.
            PagodaError: a scheduler that finds adapters by name does not answer, or cannot use this adapter.
        """
        if not self.are_several or not (name is None or isinstance(name, str)):
            return self.first
        if not name:
            raise self._unnamed
        found = self.known(name) or await self._with_adapter(name)
        if found is None and (waiting := [one for one in self.servings if not one.has_been_ready]):
            message = f"the model {name[:MAX_NAME_CHARS]!r} is not known yet: {_reasons(waiting)}"
            raise NotReady(message, retry_after_s=RETRY_AFTER_S)
        if found is None and self.is_draining:
            raise NotReady(self.not_ready_reason, retry_after_s=RETRY_AFTER_S)
        return self._found(found, name)

    def named_here(self, name: str | None) -> Serving:
        """The same without asking a scheduler, for calls that are open without a key.

        Raises:
            InvalidRequest: there are several, and none is named.
            NotFound: there is none of that name.
        """
        if not self.are_several:
            return self.first
        if not name:
            raise self._unnamed
        return self._found(self.known(name), name)

    def known(self, name: object) -> Serving | None:
        """The model of this name or with this adapter, without asking a scheduler.

        Raises:
            InvalidRequest: several models have an adapter of this name.
        """
        if not isinstance(name, str):
            return None
        own = [one for one in self.servings if name in one.config.served_model_name]
        found = own or [one for one in self.servings if name in one.engine.loras]
        if len(found) > 1:
            holders = " and ".join(map(name_of, found))
            raise InvalidRequest(f"model is {name!r}, an adapter of {holders}: unload one of them", field="model")
        return found[0] if found else None

    @property
    def _unnamed(self) -> InvalidRequest:
        return InvalidRequest(f"model must be one of {', '.join(self.names)}", field="model")

    def _found(self, serving: Serving | None, name: str) -> Serving:
        if serving is None:
            raise NotFound(f"The model `{name}` does not exist.", field="model")
        return serving

    async def holding(self, resume_key: str) -> Serving:
        """The model whose scheduler knows the stream with this key; the first one if none does, which refuses it.

        Raises:
            NotReady: a scheduler that does not answer may know the stream.
        """
        if not self.are_several:
            return self.first
        asked = [asyncio.create_task(serving.engine.adopt(resume_key)) for serving in self.servings]
        faults: list[PagodaError] = []
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    await answer
                    return next(one for one, task in zip(self.servings, asked, strict=True) if _has_found(task))
                except NotFound:
                    continue
                except PagodaError as error:
                    faults.append(error)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if faults:
            raise faults[0]
        return self.first

    async def _with_adapter(self, name: str) -> Serving | None:
        """The model whose scheduler finds an adapter of this name."""
        faults: list[PagodaError] = []
        for serving in self.servings if len(name) <= MAX_NAME_CHARS else ():
            try:
                if await serving.engine.resolve_lora(name) is not None:
                    return serving
            except PagodaError as error:
                faults.append(error)
        if faults:
            raise faults[0]
        return None

    async def start(self) -> None:
        """Start loading the tokenizers and facts of the models."""
        for serving in self.servings:
            await serving.start()

    async def close(self) -> None:
        """Stop the models and their shared state."""
        for serving in self.servings:
            await serving.close()
        await self.first.shared.close()

    # State.

    @property
    def is_draining(self) -> bool:
        """Whether the frontend is shutting down."""
        return self.first.is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        for serving in self.servings:
            serving.is_draining = is_draining

    @property
    def has_been_ready(self) -> bool:
        """Whether every model has been ready since this frontend started."""
        return all(serving.has_been_ready for serving in self.servings)

    @property
    def is_ready(self) -> bool:
        """Whether every model is known and at least one takes requests: a lost model must not take down the others."""
        return self.has_been_ready and any(serving.is_ready for serving in self.servings)

    @property
    def not_ready_reason(self) -> str:
        """Why the models are not ready; "" when ready."""
        if not self.are_several or self.is_draining:
            return self.first.not_ready_reason
        unknown = [serving for serving in self.servings if not serving.has_been_ready]
        return "" if self.is_ready else _reasons(unknown or self.servings)

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return sum(serving.num_open for serving in self.servings)

    @property
    def num_calls(self) -> int:
        """Calls under way, as `Serving.num_calls`."""
        return sum(serving.num_calls for serving in self.servings)

    @property
    def num_requests(self) -> int:
        """Counter: accepted requests."""
        return sum(serving.num_requests for serving in self.servings)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return all(serving.is_idle for serving in self.servings)

    async def wait_until_idle(self) -> None:
        """Return when nothing is under way."""
        while not self.is_idle:
            for serving in self.servings:
                await serving.wait_until_idle()


def name_of(serving: Serving) -> str:
    """The name of one of several models."""
    return serving.config.served_model_name[0]


def _has_found(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _reasons(servings: Sequence[Serving]) -> str:
    return "; ".join(f"{name_of(serving)}: {serving.not_ready_reason}" for serving in servings)
