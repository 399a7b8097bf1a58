"""Faults in lines of logs: of the kernel, of workers, and any other, by signature or by words."""
