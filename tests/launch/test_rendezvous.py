"""The store of a run on one machine."""

from pipetransformer.launch.rendezvous import ADDRESS, BACKEND, LoopbackRendezvous


def test_a_restart_meets_in_a_store_without_what_the_ended_ranks_wrote() -> None:
    meeting = LoopbackRendezvous("run")
    first = meeting.next_rendezvous()
    first.store.set("key", "of the first attempt")
    second = meeting.next_rendezvous()
    assert not second.store.check(["key"])
    assert (second.rank, second.world_size) == (0, 1)
    assert second.bootstrap_store_info is not None
    assert second.bootstrap_store_info.master_addr == ADDRESS


def test_the_launcher_is_told_what_it_asks() -> None:
    meeting = LoopbackRendezvous("run")
    assert (meeting.get_backend(), meeting.get_run_id(), meeting.num_nodes_waiting()) == (BACKEND, "run", 0)
    assert meeting.use_agent_store
    assert not meeting.is_closed()
    meeting.set_closed()
    assert meeting.is_closed()
    assert meeting.shutdown()
