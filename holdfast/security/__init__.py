"""Secrets and who may connect: tokens, connections that prove that they know one, and what no log or page may show."""
