"""What is known about Prefect without importing it, which takes seconds: event names, links, settings, a temporary server.

Code that uses the Prefect client is in `holdfast.prefect_client`.
"""
