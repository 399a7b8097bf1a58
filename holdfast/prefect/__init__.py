"""Names, links and servers of Prefect, without importing Prefect, which takes seconds.

What talks to a Prefect server through its client is `holdfast.prefect_client`.
"""
