"""A rank's part of a parameter, as a test says."""


class Sharding:
    """Some rows and columns of each parameter."""

    def __init__(self, rows: list[range], columns: range) -> None:
        self._rows, self._columns = rows, columns

    def rows(self, parameter: str, count: int) -> list[range]:
        return self._rows

    def columns(self, parameter: str, count: int) -> range:
        return self._columns
