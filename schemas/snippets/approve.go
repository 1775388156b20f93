// Approve the first event that is announced, and print the receipt. Needs azservicebus.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

type Event struct {
	ID, Type, CausationID string
	Data                  struct {
		EventID, ApprovalSession, Outcome, Reason string
		Resources                                 []string
	}
}

func try[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	ctx := context.Background()
	bus := try(azservicebus.NewClientFromConnectionString(os.Getenv("SERVICEBUS_CONNECTION_STRING"), nil))
	receiver := try(bus.NewReceiverForSubscription("scheduled-events", "approver", nil))
	sender := try(bus.NewSender("approvals", nil))
	commandID := ""
	for {
		message := try(receiver.ReceiveMessages(ctx, 1, nil))[0]
		var event Event
		if err := json.Unmarshal(message.Body, &event); err != nil {
			panic(err)
		}
		if event.Type == "io.imdsbridge.scheduledevent.scheduled.v1" && commandID == "" {
			// Drain here. The approval releases every VM in event.Data.Resources.
			commandID = event.ID // the same for a duplicate, which is then decided once
			command := map[string]string{"EventId": event.Data.EventID, "Id": commandID, "Reason": "drained"}
			session := event.Data.ApprovalSession
			order := &azservicebus.Message{Body: try(json.Marshal(command)), SessionID: &session}
			if err := sender.SendMessage(ctx, order, nil); err != nil {
				panic(err)
			}
		}
		if err := receiver.CompleteMessage(ctx, message, nil); err != nil {
			panic(err)
		}
		if commandID != "" && event.CausationID == commandID {
			fmt.Println(event.Data.Outcome, event.Data.Reason, event.Data.Resources)
			return
		}
	}
}
