"""GroupOrders: operators' orders for worker groups (sleep, weights). Outlives the workers; knows no gRPC."""

from typing import TypeAlias

from pagoda_common.config.checkpoint.weights_source import WeightsSource

WeightsOrders: TypeAlias = tuple[WeightsSource | None, dict[int, WeightsSource]]


class GroupOrders:
    """Sleep and weights by group number, also for groups that register later. `None` as number is every group."""

    def __init__(self) -> None:
        self.sleep_level_of_all = 0
        """Sleep level of groups with a new number; 0: awake."""
        self._sleep_levels: dict[int, int] = {}
        self._weights_of_all: WeightsSource | None = None
        self._weights: dict[int, WeightsSource] = {}
        self._known_incarnations: set[int] = set()

    def sleep(self, level: int, number: int | None = None) -> None:
        """Order sleep at `level`, or 0 to be awake."""
        if number is None:
            self.sleep_level_of_all = level
            self._sleep_levels.clear()
        else:
            self._sleep_levels[number] = level

    def sleep_level(self, number: int) -> int:
        """Sleep level of a group; 0: awake."""
        return self._sleep_levels.get(number, self.sleep_level_of_all)

    def use_weights(self, source: WeightsSource, number: int | None = None) -> None:
        """Order these weights."""
        if number is None:
            self._weights_of_all = source
            self._weights.clear()
        else:
            self._weights[number] = source

    def weights(self, number: int) -> WeightsSource | None:
        """Weights of a group; None is the model's own checkpoint."""
        return self._weights.get(number, self._weights_of_all)

    def weights_orders(self) -> WeightsOrders:
        """All weights orders, for `restore_weights_orders`."""
        return self._weights_of_all, dict(self._weights)

    def restore_weights_orders(self, orders: WeightsOrders) -> None:
        """Restore earlier orders after one that failed."""
        self._weights_of_all, self._weights = orders

    def learn(self, number: int, *, incarnation: int, sleep_level: int, weights: WeightsSource | None) -> None:
        """Take over orders that a worker got from an earlier scheduler; ignored for a worker process that this
        scheduler already knows."""
        if incarnation in self._known_incarnations:
            return
        self._known_incarnations.add(incarnation)
        if sleep_level:
            self._sleep_levels[number] = max(sleep_level, self.sleep_level(number))
        ours = self.weights(number)
        if weights is not None and (ours is None or weights.version > ours.version):
            if weights.is_for_one_group:
                self._weights[number] = weights
            else:
                self._weights_of_all = weights
