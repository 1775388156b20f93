import com.azure.core.amqp.AmqpRetryOptions;
import com.azure.core.amqp.models.AmqpMessageBody;
import com.azure.core.util.BinaryData;
import com.azure.core.util.serializer.JacksonAdapter;
import com.azure.core.util.serializer.SerializerAdapter;
import com.azure.core.util.serializer.SerializerEncoding;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverClient;
import com.azure.messaging.servicebus.models.AbandonOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.SubQueue;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Uses the lab's Service Bus with Microsoft's client for Java; prints what came of it as JSON.
 *
 * <p>Client send CONNECTION_STRING < {"queue", "session", "type", "events": {variant: EventId}}
 * <p>Client features CONNECTION_STRING
 */
public final class Client {
    private static final SerializerAdapter JSON = JacksonAdapter.createDefaultSerializerAdapter();

    private final String connectionString;
    private final ServiceBusClientBuilder builder;

    private Client(String connectionString) {
        this.connectionString = connectionString;
        builder = new ServiceBusClientBuilder().connectionString(connectionString)
            .retryOptions(new AmqpRetryOptions().setMaxRetries(0).setTryTimeout(Duration.ofSeconds(15)));
    }

    public static void main(String[] arguments) throws Exception {
        Client client = new Client(arguments[1]);
        Object result = arguments[0].equals("send") ? client.send() : client.features();
        System.out.println(JSON.serialize(result, SerializerEncoding.JSON));
        System.exit(0); // the client's threads would keep the process for a while
    }

    // --- commands, as programs in Java may send them ---

    @SuppressWarnings("unchecked")
    private String send() throws Exception {
        byte[] input = System.in.readAllBytes();
        Map<String, Object> given = JSON.deserialize(input, Map.class, SerializerEncoding.JSON);
        List<ServiceBusMessage> messages = new ArrayList<>();
        for (Map.Entry<String, String> event : ((Map<String, String>) given.get("events")).entrySet()) {
            String type = given.get("type").toString();
            ServiceBusMessage message = command(event.getKey(), Map.of("EventId", event.getValue()), type);
            messages.add(message.setMessageId(event.getKey()).setSessionId(given.get("session").toString()));
        }
        try (var sender = builder.sender().queueName(given.get("queue").toString()).buildClient()) {
            sender.sendMessages(messages);
        }
        return "sent";
    }

    private static ServiceBusMessage command(String variant, Map<String, String> data, String type) throws Exception {
        String text = JSON.serialize(data, SerializerEncoding.JSON);
        switch (variant) {
            case "plain":
                return new ServiceBusMessage(BinaryData.fromObject(data));
            case "text":
                return new ServiceBusMessage(AmqpMessageBody.fromValue(text));
            case "twice":
                return new ServiceBusMessage(BinaryData.fromObject(text));
            case "structured":
                Map<String, Object> event = new LinkedHashMap<>(attributes("", variant, type));
                event.put("data", data);
                return new ServiceBusMessage(BinaryData.fromObject(event))
                    .setContentType("application/cloudevents+json");
            case "binary":
            case "binary-colon":
            case "binary-other":
                String prefix = variant.equals("binary-colon") ? "cloudEvents:" : "cloudEvents_";
                String kind = variant.equals("binary-other") ? "com.example.other" : type;
                ServiceBusMessage message = new ServiceBusMessage(text);
                message.getApplicationProperties().putAll(attributes(prefix, variant, kind));
                return message;
            default:
                throw new IllegalArgumentException("no variant " + variant);
        }
    }

    private static Map<String, String> attributes(String prefix, String id, String type) {
        return Map.of(prefix + "specversion", "1.0", prefix + "type", type, prefix + "id", id,
            prefix + "source", "urn:test");
    }

    // --- what receivers do ---

    private static ServiceBusReceivedMessage one(ServiceBusReceiverClient receiver) {
        return receiver.receiveMessages(1, Duration.ofSeconds(15)).stream().findFirst().orElseThrow();
    }

    private Map<String, Object> features() {
        Map<String, Object> result = new LinkedHashMap<>();
        try (var sender = builder.sender().queueName("plain").buildClient()) {
            for (String name : List.of("m1", "m2")) {
                ServiceBusMessage message = new ServiceBusMessage(name).setMessageId(name);
                message.getApplicationProperties().put("given", "kept");
                sender.sendMessage(message);
            }
        }
        ServiceBusReceiverClient receiver = builder.receiver().queueName("plain").disableAutoComplete().buildClient();
        ServiceBusReceivedMessage message = one(receiver);
        result.put("renewed", !receiver.renewMessageLock(message).isBefore(message.getLockedUntil()));
        result.put("tokens", message.getLockToken() != null);
        Map<String, Object> changes = Map.of("tried", "once", "given", "changed");
        receiver.abandon(message, new AbandonOptions().setPropertiesToModify(changes));
        message = one(receiver);
        result.put("abandoned", message.getApplicationProperties());
        DeadLetterOptions options = new DeadLetterOptions().setDeadLetterReason("malformed")
            .setDeadLetterErrorDescription("no EventId").setPropertiesToModify(Map.of("by", "client"));
        receiver.deadLetter(message, options);
        receiver.deadLetter(one(receiver), options);
        ServiceBusReceiverClient dead = builder.receiver().queueName("plain").subQueue(SubQueue.DEAD_LETTER_QUEUE)
            .disableAutoComplete().buildClient();
        List<Object> letters = new ArrayList<>();
        for (int count = 0; count < 2; count++) {
            ServiceBusReceivedMessage letter = one(dead);
            letters.add(List.of(letter.getBody().toString(), letter.getDeadLetterReason(),
                letter.getDeadLetterErrorDescription(), letter.getApplicationProperties().get("by")));
            dead.complete(letter);
        }
        result.put("dead", letters);
        result.put("sessions", sessions());
        return result;
    }

    private ServiceBusSessionReceiverClient sessionAcceptor() {
        return builder.sessionReceiver().queueName("sessions").disableAutoComplete().buildClient();
    }

    private Map<String, Object> sessions() {
        Map<String, Object> result = new LinkedHashMap<>();
        try (var sender = builder.sender().queueName("sessions").buildClient()) {
            for (String name : List.of("a", "b")) {
                sender.sendMessage(new ServiceBusMessage(name).setMessageId(name).setSessionId(name));
            }
        }
        var acceptor = sessionAcceptor();
        ServiceBusReceiverClient named = acceptor.acceptSession("b");
        // A client gives out a session that it holds a second time; another one is refused.
        try (var other = new Client(connectionString).sessionAcceptor()) {
            other.acceptSession("b");
            result.put("locked", false);
        } catch (RuntimeException error) {
            result.put("locked", true);
        }
        named.renewSessionLock();
        ServiceBusReceivedMessage message = one(named);
        named.complete(message);
        ServiceBusReceiverClient next = acceptor.acceptNextSession();
        result.put("ids", List.of(named.getSessionId(), next.getSessionId()));
        result.put("bodies", List.of(message.getBody().toString(), one(next).getBody().toString()));
        return result;
    }
}
