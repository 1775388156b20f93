"""CloudEvents: building, reading and filtering."""
