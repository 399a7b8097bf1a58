"""The verbs of a job's life as Prefect tasks: launch, monitor, detect, isolate, reschedule, resume. Thin: the library does it."""
