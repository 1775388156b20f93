"""The durable store of events between IMDS or the bus and the sinks."""
