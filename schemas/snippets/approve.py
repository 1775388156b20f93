"""Approve the first event that is announced, and print the receipt. Needs azure-servicebus."""

import json
import os

from azure.servicebus import AutoLockRenewer, ServiceBusClient, ServiceBusMessage

with (
    ServiceBusClient.from_connection_string(os.environ["SERVICEBUS_CONNECTION_STRING"]) as bus,
    AutoLockRenewer(max_lock_renewal_duration=3600) as renewer,  # a drain may take longer than the lock
    bus.get_subscription_receiver("scheduled-events", "approver", auto_lock_renewer=renewer) as receiver,
    bus.get_queue_sender("approvals") as sender,
):
    command_id = None
    for message in receiver:
        event = json.loads(str(message))
        data = event["data"]
        if event["type"] == "io.imdsbridge.scheduledevent.scheduled.v1" and not command_id:
            # Drain here. The approval releases every VM in data["Resources"].
            command_id = event["id"]  # the same for a duplicate, which is then decided once
            command = {"EventId": data["EventId"], "Id": command_id, "Reason": "drained"}
            sender.send_messages(ServiceBusMessage(json.dumps(command), session_id=data["ApprovalSession"]))
        receiver.complete_message(message)
        if command_id and event.get("causationid") == command_id:
            print(data["Outcome"], data["Reason"], data["Resources"])
            break
