"""Training algorithms as pure functions of arrays: they know no model, no rank and no config file."""
