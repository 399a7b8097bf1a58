"""Training frameworks under Holdfast: each module imports one framework, and nothing else in Holdfast imports it."""
