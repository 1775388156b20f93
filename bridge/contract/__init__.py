"""What consumers rely on: event types, their data and the JSON Schemas."""
