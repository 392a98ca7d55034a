"""Where the processes of one machine meet: a store that listens on the loopback interface alone.

The stores that torch's own rendezvous make listen on all interfaces, and whoever reaches one can write to it.
"""

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND, ADDRESS = "loopback", "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One machine's processes, which need not wait for others. The ranks use the launcher's store.

    Args:
        run_id: Name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id, self._is_closed = run_id, False
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Makes a new store: after a restart the old one still holds what the ended ranks have written."""
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )  # which closes it
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)
