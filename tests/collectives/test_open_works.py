"""Collectives that have begun and not ended."""

import threading

import torch.distributed as dist

from shardwise.collectives.started import OpenWorks


class EndedElsewhere(dist.Work):
    """Another thread ends its wait for a collective while this one is asked whether it is completed."""

    def __init__(self, works: OpenWorks, key: int) -> None:
        super().__init__()
        self.works, self.key = works, key

    def is_completed(self) -> bool:
        thread = threading.Thread(target=self.works.remove, args=(self.key,))
        thread.start()
        thread.join()
        return False


def test_a_collective_begins_while_another_thread_ends_its_wait() -> None:
    works = OpenWorks()
    first = works.add([dist.Work()])
    second = works.add([EndedElsewhere(works, first)])
    third = works.add([])
    assert len({first, second, third}) == 3
