"""Training frameworks under Holdfast: each module imports one, and nothing else in Holdfast imports it."""
