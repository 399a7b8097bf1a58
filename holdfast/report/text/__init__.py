"""Sentences and Markdown about incidents, nodes, policies and profiles."""
