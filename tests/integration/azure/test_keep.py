"""What arrives between two receive calls of the SDK stays with the receiver."""

from __future__ import annotations

from azure.servicebus import ServiceBusClient

from bridge.azure.internals import keep_what_arrives
from tests.support.bus import QUEUE, Sender, message
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab


def test_a_message_that_comes_while_another_is_settled_is_received_next_and_only_once(
    bus: ServiceBusLab,
) -> None:
    with (
        Sender(bus) as sender,
        ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        keep_what_arrives(receiver)
        sender.send(message(b"", message_id="1"))
        (first,) = receiver.receive_messages(max_message_count=5, max_wait_time=30)
        sender.send(*(message(b"", message_id=name) for name in "234"))  # the receiver asked for four more
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 4)
        receiver.complete_message(first)
        assert bus.entity(QUEUE).counts.locked == 3  # not given back
        kept = receiver.receive_messages(max_message_count=3, max_wait_time=30)
        assert [one.message_id for one in kept] == ["2", "3", "4"]
        for one in kept:
            receiver.complete_message(one)
    assert bus.entity(QUEUE).counts.active == 0
