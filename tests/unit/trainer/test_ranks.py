"""A single process exchanges nothing, and an environment that is not torchrun's is refused."""

from __future__ import annotations

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.ranks import SINGLE_RANK, current_ranks, is_follower, join


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_is_the_leader_and_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with join() as ranks:
        assert ranks is current_ranks() is SINGLE_RANK
        assert ranks.is_leader
        assert ranks.broadcast(b"x") == b"x"
        assert [ranks.broadcast_bool(value) for value in (True, False)] == [True, False]
        assert ranks.gather(b"y") == [b"y"]
        assert ranks.all_reduce_sum(0.1) == 0.1
        assert ranks.run_on_all_ranks(lambda: 3) == 3
    assert not is_follower()
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun starts one process
    monkeypatch.setenv("RANK", "0")
    with join() as ranks:
        assert ranks is SINGLE_RANK


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert is_follower()
    with pytest.raises(TrimtabError, match="LOCAL_RANK is not: start several ranks with `torchrun"), join():
        pass
    assert current_ranks() is SINGLE_RANK
