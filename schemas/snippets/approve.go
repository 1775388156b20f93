// Approve the first event that is announced, and print the receipt. Needs azservicebus.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

type Event struct {
	ID, Type, CausationID string
	Data                  struct {
		EventID, ApprovalSession, Outcome, Reason string
		Resources                                 []string
	}
}

func main() {
	ctx := context.Background()
	bus := must(azservicebus.NewClientFromConnectionString(os.Getenv("SERVICEBUS_CONNECTION_STRING"), nil))
	receiver := must(bus.NewReceiverForSubscription("scheduled-events", "approver", nil))
	sender := must(bus.NewSender("approvals", nil))
	commandID := ""
	for {
		message := must(receiver.ReceiveMessages(ctx, 1, nil))[0]
		letGo := keepLock(ctx, receiver, message)
		var event Event
		check(json.Unmarshal(message.Body, &event))
		data := &event.Data
		if event.Type == "io.imdsbridge.scheduledevent.scheduled.v1" && commandID == "" {
			// Drain here. The approval releases every VM in data.Resources.
			commandID = event.ID // the same for a duplicate, which is then decided once
			body := must(json.Marshal(map[string]string{"EventId": data.EventID, "Id": commandID, "Reason": "drained"}))
			check(sender.SendMessage(ctx, &azservicebus.Message{Body: body, SessionID: &data.ApprovalSession}, nil))
		}
		letGo()
		check(receiver.CompleteMessage(ctx, message, nil))
		if commandID != "" && event.CausationID == commandID {
			fmt.Println(data.Outcome, data.Reason, data.Resources)
			return
		}
	}
}

// keepLock renews a message's lock until it is let go: a drain may take longer than the lock.
func keepLock(ctx context.Context, receiver *azservicebus.Receiver, message *azservicebus.ReceivedMessage) func() {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(time.Until(*message.LockedUntil)/2, time.Second)):
				if receiver.RenewMessageLock(ctx, message, nil) != nil {
					return
				}
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
