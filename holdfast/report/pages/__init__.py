"""HTML pages and pictures: the report of a job, its costs, its profile. Drawn with matplotlib and Jinja, imported only when one is written.

What is also shown as plain text (the terminal, Prefect) belongs to `holdfast.report`.
"""
