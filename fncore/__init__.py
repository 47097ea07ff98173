"""Language-model training as pure functions over parameter pytrees."""
