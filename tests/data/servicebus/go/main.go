// Use the lab's Service Bus with Microsoft's client for Go; print what came of it as JSON.
//
//	client send CONNECTION_STRING < {"queue", "session", "type", "events": {variant: EventId}}
//	client features CONNECTION_STRING
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	sb "github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

type object = map[string]any

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%+v\n", err)
		os.Exit(1)
	}
}

func encode(value any) []byte {
	return must(json.Marshal(value))
}

// --- commands, as programs in Go may send them ---

type order struct {
	Queue   string            `json:"queue"`
	Session string            `json:"session"`
	Type    string            `json:"type"`
	Events  map[string]string `json:"events"`
}

func send(ctx context.Context, client *sb.Client) any {
	var given order
	check(json.Unmarshal(must(io.ReadAll(os.Stdin)), &given))
	sender := must(client.NewSender(given.Queue, nil))
	batch := must(sender.NewMessageBatch(ctx, nil))
	for variant, event := range given.Events {
		if variant == "text" {
			body := sb.AMQPAnnotatedMessageBody{Value: string(encode(object{"EventId": event}))}
			properties := &sb.AMQPAnnotatedMessageProperties{MessageID: variant, GroupID: &given.Session}
			check(batch.AddAMQPAnnotatedMessage(&sb.AMQPAnnotatedMessage{Body: body, Properties: properties}, nil))
			continue
		}
		check(batch.AddMessage(command(variant, event, given), nil))
	}
	check(sender.SendMessageBatch(ctx, batch, nil))
	return "sent"
}

func command(variant, event string, given order) *sb.Message {
	data := object{"EventId": event}
	message := &sb.Message{MessageID: &variant, SessionID: &given.Session, Body: encode(data)}
	attributes := func(separator, kind string) object {
		return object{
			"cloudEvents" + separator + "specversion": "1.0",
			"cloudEvents" + separator + "type":        kind,
			"cloudEvents" + separator + "id":          variant,
			"cloudEvents" + separator + "source":      "urn:test",
		}
	}
	switch variant {
	case "plain":
	case "twice":
		message.Body = encode(string(encode(data)))
	case "structured":
		contentType := "application/cloudevents+json"
		message.ContentType = &contentType
		message.Body = encode(object{
			"specversion": "1.0", "type": given.Type, "id": variant, "source": "urn:test", "data": data,
		})
	case "binary":
		message.ApplicationProperties = attributes("_", given.Type)
	case "binary-colon":
		message.ApplicationProperties = attributes(":", given.Type)
	case "binary-other":
		message.ApplicationProperties = attributes("_", "com.example.other")
	default:
		check(fmt.Errorf("no variant %q", variant))
	}
	return message
}

// --- what receivers do ---

func one(ctx context.Context, receiver interface {
	ReceiveMessages(context.Context, int, *sb.ReceiveMessagesOptions) ([]*sb.ReceivedMessage, error)
}) *sb.ReceivedMessage {
	return must(receiver.ReceiveMessages(ctx, 1, nil))[0]
}

func features(ctx context.Context, client *sb.Client) any {
	result := object{}
	sender := must(client.NewSender("plain", nil))
	for _, name := range []string{"m1", "m2"} {
		properties := object{"given": "kept"}
		check(sender.SendMessage(ctx, &sb.Message{Body: []byte(name), MessageID: &name, ApplicationProperties: properties}, nil))
	}
	receiver := must(client.NewReceiverForQueue("plain", nil))
	message := one(ctx, receiver)
	before := *message.LockedUntil
	check(receiver.RenewMessageLock(ctx, message, nil))
	result["renewed"] = !message.LockedUntil.Before(before)
	result["tokens"] = message.LockToken != [16]byte{}
	changes := object{"tried": "once", "given": "changed"}
	check(receiver.AbandonMessage(ctx, message, &sb.AbandonMessageOptions{PropertiesToModify: changes}))
	message = one(ctx, receiver)
	result["abandoned"] = message.ApplicationProperties

	check(receiver.DeadLetterMessage(ctx, message, deadLetter()))
	check(receiver.DeadLetterMessage(ctx, one(ctx, receiver), deadLetter()))
	dead := must(client.NewReceiverForQueue("plain", &sb.ReceiverOptions{SubQueue: sb.SubQueueDeadLetter}))
	letters := []any{}
	for range 2 {
		letter := one(ctx, dead)
		letters = append(letters, []any{string(letter.Body), *letter.DeadLetterReason,
			*letter.DeadLetterErrorDescription, letter.ApplicationProperties["by"]})
		check(dead.CompleteMessage(ctx, letter, nil))
	}
	result["dead"] = letters
	result["sessions"] = sessions(ctx, client)
	return result
}

func deadLetter() *sb.DeadLetterOptions {
	reason, description := "malformed", "no EventId"
	return &sb.DeadLetterOptions{
		Reason: &reason, ErrorDescription: &description, PropertiesToModify: object{"by": "client"},
	}
}

func sessions(ctx context.Context, client *sb.Client) any {
	result := object{}
	sender := must(client.NewSender("sessions", nil))
	for _, name := range []string{"a", "b"} {
		check(sender.SendMessage(ctx, &sb.Message{Body: []byte(name), MessageID: &name, SessionID: &name}, nil))
	}
	named := must(client.AcceptSessionForQueue(ctx, "sessions", "b", nil))
	_, err := client.AcceptSessionForQueue(ctx, "sessions", "b", nil)
	result["locked"] = err != nil
	check(named.RenewSessionLock(ctx, nil))
	message := one(ctx, named)
	check(named.CompleteMessage(ctx, message, nil))
	next := must(client.AcceptNextSessionForQueue(ctx, "sessions", nil))
	result["ids"] = []string{named.SessionID(), next.SessionID()}
	result["bodies"] = []string{string(message.Body), string(one(ctx, next).Body)}
	check(named.Close(ctx))
	check(next.Close(ctx))
	return result
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	options := &sb.ClientOptions{RetryOptions: sb.RetryOptions{MaxRetries: -1}}
	client := must(sb.NewClientFromConnectionString(os.Args[2], options))
	actions := map[string]func(context.Context, *sb.Client) any{"send": send, "features": features}
	action, known := actions[os.Args[1]]
	if !known {
		check(errors.New("expected: send or features"))
	}
	fmt.Println(string(encode(action(ctx, client))))
}
