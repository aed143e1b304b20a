"""Processes of ranks: each answers on its own connection, a death differs from an answer, and none is left."""

import os
from multiprocessing.connection import Connection

import pytest

from shardwise._collectives.spawn import Death, RankProcesses
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes

SIZE = 4


def answer_until_told_to_die(connection: Connection, rank: int, greeting: str) -> None:
    while (message := connection.recv_bytes()) != b"die" or rank not in {1, 2}:
        connection.send(f"{greeting} {message.decode()} {rank}")
    os._exit(rank)


def test_ranks_answer_and_those_that_die_are_known_by_their_exit_codes() -> None:
    ranks = RankProcesses(SIZE, answer_until_told_to_die, "hello", forked=True)
    pids = [process.pid for process in ranks.processes]
    try:
        for message in ("a", "b"):
            answers: dict[int, object] = {}
            ranks.send(message.encode())
            ranks.collect(answers, lambda _: False, PATIENCE_SECONDS, PATIENCE_SECONDS)
            assert answers == {rank: f"hello {message} {rank}" for rank in range(SIZE)}
        assert ranks.are_alive()
        answers = {}
        ranks.send(b"die")
        ranks.collect(answers, lambda _: False, PATIENCE_SECONDS, PATIENCE_SECONDS)
        dead = {rank: str(answer) for rank, answer in answers.items() if isinstance(answer, Death)}
        assert dead == {1: "exited with code 1", 2: "exited with code 2"}
        assert {rank: answers[rank] for rank in answers.keys() - dead} == {
            rank: f"hello die {rank}" for rank in range(SIZE) if rank not in dead
        }
        assert not ranks.are_alive()
    finally:
        ranks.end()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
