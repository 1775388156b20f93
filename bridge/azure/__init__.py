"""The border to the Azure SDKs: Service Bus and credentials."""
