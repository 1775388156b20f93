"""Every setting: models, validation and loading."""
