"""What the log says while weights are read: how much of the files, and how fast."""

from pagoda_scheduler.rpc.loading_bar import LoadingBar

GB = 10**9


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_tenth_is_a_line_with_the_rate_so_far() -> None:
    clock = Clock()
    bar = LoadingBar(clock=clock)
    clock.now_s += 60  # kernels are compiled
    assert bar.advance(0, 0) is None
    clock.now_s += 0.5
    assert bar.advance(GB, 8 * GB) == "[#.........]  10 %, 1.00 of 8.00 GB, 2.00 GB/s"
    assert bar.advance(GB + 1, 8 * GB) is None
    clock.now_s += 3.5
    assert bar.advance(8 * GB, 8 * GB) == "[##########] 100 %, 8.00 of 8.00 GB, 2.00 GB/s"
    assert bar.advance(8 * GB, 8 * GB) is None


def test_weights_that_are_there_already_have_no_line() -> None:
    assert LoadingBar().advance(0, 0) is None
