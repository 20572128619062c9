"""What a worker's flags and LeaderWorkerSet's variables may say of ranks."""

import pytest

from pagoda_worker.__main__ import main


def refusal(*flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["pagoda-worker", "--scheduler=127.0.0.1:1", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank=2", "--world-size=2", "--group=0"), "rank is 2, must be below world_size, 2"),
        (("--rank=1", "--world-size=2"), "group is not set, must be the same number for all 2 ranks"),
        (("--world-size=0",), "--world-size is 0, must be at least 1"),
        (("--tensor-parallel-size=0",), "--tensor-parallel-size is 0, must be at least 1"),
        (
            ("--tensor-parallel-size=2", "--rank=1", "--world-size=2", "--group=0"),
            "--tensor-parallel-size is 2, must be at most 1: the group has 2 ranks, and 1 is the first of these",
        ),
        (("--tensor-parallel-size=2",), "group is not set, must be the same number for all 2 ranks"),
        (
            ("--tensor-parallel-size=2", "--world-size=4", "--group=0", "--advertise-address=10.0.0.7:50053"),
            "--advertise-address is '10.0.0.7', must be on loopback for several ranks",
        ),
        (
            ("--world-size=2", "--group=0", "--advertise-address=10.0.0.7:50053"),
            "--advertise-address is '10.0.0.7', must be on loopback for several ranks",
        ),
    ],
)
def test_flags_that_make_no_rank_are_refused(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(*flags, monkeypatch=monkeypatch, capsys=capsys)


def test_leader_worker_set_says_rank_and_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LWS_WORKER_INDEX", "3")
    monkeypatch.setenv("LWS_GROUP_SIZE", "3")
    assert "rank is 3, must be below world_size, 3" in refusal(monkeypatch=monkeypatch, capsys=capsys)
