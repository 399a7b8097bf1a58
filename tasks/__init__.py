"""The verbs of a job's life as Prefect tasks: launch, monitor, detect, isolate, reschedule, resume. Thin: what they stand on is the library."""
